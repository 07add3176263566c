from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from minimax_tools.dumps.legacy import LegacyCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import DumpReading, open_source, refuse_unreadable
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.sites import Site


def write_legacy(directory: Path) -> Path:
    directory.mkdir(parents=True)
    torch.save(torch.ones(1, 2, 3), directory / "layer_0_output.pt")
    return directory


def test_folder_of_pt_files_is_opened(tmp_path: Path) -> None:
    source = open_source(write_legacy(tmp_path / "full_model"))
    assert isinstance(source, LegacyCapture)
    assert torch.equal(source.read(0, Site.OUTPUT), torch.ones(1, 2, 3))


def test_manifest_counts_more_than_pt_files(tmp_path: Path) -> None:
    directory = write_legacy(tmp_path / "full_model")
    (directory / "manifest.json").write_text("{}", encoding="utf-8")
    with pytest.raises(CaptureError, match=r"manifest\.json is damaged: found JSON that is no manifest"):
        open_source(directory)


def test_map_is_refused_for_the_old_layout(tmp_path: Path) -> None:
    (tmp_path / "map.yaml").write_text('sites: {output: "nowhere.{layer}"}')
    reading = DumpReading(names=NameMap.read(tmp_path / "map.yaml"))
    with pytest.raises(UsageError, match="old layout: it takes no format and no map"):
        open_source(write_legacy(tmp_path / "full_model"), reading)


def test_directory_that_is_not_there_is_named_with_a_next_step(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no capture directory .*gone.*mm2-gpu extract-all"):
        open_source(tmp_path / "gone")


def test_directory_of_captures_names_them(golden: Path, tmp_path: Path) -> None:
    shutil.copytree(golden, tmp_path / "single_layer_0")
    write_legacy(tmp_path / "single_layer_1")
    (tmp_path / "other").mkdir()
    with pytest.raises(
        CaptureError, match=r"Name one of the captures in it: single_layer_0, single_layer_1\."
    ):
        open_source(tmp_path)


def test_tensors_of_hooks_of_ones_own_are_told_a_name_to_be_read_under(tmp_path: Path) -> None:
    torch.save(torch.zeros(1), tmp_path / "step0_layer0_hidden.pt")
    with pytest.raises(CaptureError, match=r"captured_tensors_cte_step_1_module_layers\.0\.mlp_output\.pt"):
        open_source(tmp_path)


def test_whole_dump_is_read_links_too(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.pt").write_bytes(b"")
    (tmp_path / "a" / "y.pt").symlink_to("x.pt")
    (tmp_path / "again").symlink_to(".")
    refuse_unreadable(tmp_path)


def test_everything_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.pt").mkdir()
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "module").symlink_to("nowhere")
    (tmp_path / "c.safetensors").symlink_to("c.safetensors")
    with pytest.raises(CaptureError) as caught:
        refuse_unreadable(tmp_path)
    for words in ("a.pt: a folder", "b/module (a link to nowhere): No such file", "c.safetensors (a link to"):
        assert words in str(caught.value)


@pytest.fixture
def dump_of_another_user() -> Iterator[Path]:
    """A folder in which this process may not read everything; as root it goes on as nobody."""
    nobody, was_root = 65534, os.geteuid() == 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        (Path(folder) / "denied").mkdir(mode=0)
        (Path(folder) / "x.pt").touch(mode=0)
        if was_root:
            os.seteuid(nobody)
        try:
            yield Path(folder)
        finally:
            if was_root:
                os.seteuid(0)
            (Path(folder) / "denied").chmod(0o700)


def test_folder_and_file_without_access_are_named(dump_of_another_user: Path) -> None:
    with pytest.raises(CaptureError, match=r"denied: Permission denied.*x\.pt: Permission denied"):
        refuse_unreadable(dump_of_another_user)
