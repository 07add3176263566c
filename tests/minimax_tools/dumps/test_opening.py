from __future__ import annotations

from pathlib import Path

import pytest
import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.writer import open_capture
from minimax_tools.dumps.legacy import LegacyCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import DumpReading, open_source
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.provenance import ModelFingerprint, Provenance


def write_legacy(directory: Path) -> Path:
    directory.mkdir(parents=True)
    torch.save(torch.ones(1, 2, 3), directory / "layer_0_output.pt")
    return directory


def write_own(directory: Path) -> Path:
    ids = torch.arange(2)[None]
    inputs = Inputs(
        input_ids=ids, attention_mask=torch.ones_like(ids), position_ids=ids.clone(), source="a test"
    )
    description = Description(
        side="neuron",
        run=single_layer_run(0, sites_level="layer"),
        provenance=Provenance(
            model=ModelFingerprint(spec_digest="0" * 64, tensors_digest="0" * 64, layers={0: "0" * 64}),
            model_source="/models/MiniMax-M2",
            backend="cpu",
            device="cpu",
            dtypes={"weights": "bfloat16"},
            target="builtin",
        ),
        inputs_digest=inputs.digest(),
        input_source=inputs.source,
    )
    with open_capture(directory, description, inputs=inputs) as writer:
        writer.write(0, {Site.OUTPUT: torch.ones(1, 2, 3)})
        writer.finish()
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


def test_directory_of_captures_names_them(tmp_path: Path) -> None:
    write_own(tmp_path / "single_layer_0")
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
