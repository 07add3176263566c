from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors import safe_open

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.header import encode_header, read_header
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CannotRunError
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_of, layer_prefix
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from minimax_tools.synthetic.checkpoint import FP8, synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import cloned_shards
import full_size_checkpoint
import reflinks

SCRIPTS = Path(__file__).parents[2] / "scripts"
LAYERS, DISTINCT = 24, 3
TOY = ["--preset", "toy", "--num-hidden-layers", LAYERS, "--distinct-layers", DISTINCT]


def run(*arguments: object, **environment: str) -> click.testing.Result:
    """Run the script in this process; a crash is raised."""
    result = click.testing.CliRunner().invoke(
        full_size_checkpoint.main, [str(argument) for argument in arguments], env=environment
    )
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def made(*arguments: object) -> dict[str, Any]:
    """Run the script, and return what it prints about the checkpoint that it made or found."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    described: dict[str, Any] = json.loads(result.stdout)
    return described


def planned(*names: str) -> tuple[TensorSize, ...]:
    return tuple(TensorSize(name=name, shape=(16, 16), dtype=FLOAT8_E4M3FN) for name in names)


def source_name(name: str, *, is_cloned: bool) -> str:
    """The tensor whose bytes `name` holds."""
    layer = layer_of(name)
    if layer is None or not is_cloned:
        return name
    return name.replace(layer_prefix(layer), layer_prefix(layer % DISTINCT))


def is_loop_used(image: Path) -> bool:
    backing = Path("/sys/block").glob("loop*/loop/backing_file")
    return any(str(image) in file.read_text() for file in backing)


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder where images can be mounted; skips, saying why, where they cannot."""
    if os.geteuid() != 0:
        pytest.skip("not root: a loop mount is not allowed")
    if shutil.which("mkfs.xfs") is None:
        pytest.skip("mkfs.xfs is missing: apt-get install xfsprogs")
    folder = tmp_path_factory.mktemp("images")
    mount_point, image = folder / "probe", folder / "probe.img"
    mount_point.mkdir()
    with image.open("wb") as file:
        file.truncate(320 << 20)
    subprocess.run(["mkfs.xfs", "-q", "-m", "reflink=1", str(image)], check=True)
    tried = subprocess.run(
        ["mount", "-o", "loop", str(image), str(mount_point)], capture_output=True, text=True, check=False
    )
    if tried.returncode:
        pytest.skip(f"no loop mount is allowed on this machine: {tried.stderr.strip()}")
    subprocess.run(["umount", str(mount_point)], check=True)
    image.unlink()
    return folder


@pytest.fixture(scope="module")
def cloned(scratch: Path) -> Iterator[Path]:
    """A toy of 24 layers in an image, 3 of them distinct."""
    folder = scratch / "cloned"
    made("--output", folder, *TOY)
    yield folder
    assert run("--output", folder, "--remove").exit_code == 0


@pytest.fixture
def image_place(scratch: Path, tmp_path: Path) -> Iterator[Path]:
    """A folder in which a test may build a checkpoint; it is removed afterwards."""
    yield tmp_path / "m2"
    assert run("--output", tmp_path / "m2", "--remove").exit_code == 0


@pytest.fixture
def xfs(scratch: Path, tmp_path: Path) -> Iterator[Path]:
    """A file system with reflinks that is not the script's."""
    image, folder = reflinks.ReflinkImage(file=tmp_path / "xfs.img"), tmp_path / "xfs"
    image.make(size_bytes=0)
    image.mount(folder, is_read_only=False)
    yield folder
    reflinks.unmount(folder)


# What needs no mount: headers, the plan, refusals.


@pytest.mark.parametrize("num_tensors", [1, 40, 41, 42, 400])
def test_data_behind_a_header_begin_on_a_block(num_tensors: int, tmp_path: Path) -> None:
    tensors = planned(*(f"tensor.{number}" for number in range(num_tensors)))
    header = encode_header(tensors, alignment=4096)
    path = tmp_path / "shard.safetensors"
    path.write_bytes(header + bytes(range(256)) * num_tensors)
    assert len(header) % 4096 == 0
    assert read_header(path)[0].offset == len(header)
    with safe_open(path, "pt") as shard:
        assert sorted(shard.keys()) == sorted(tensor.name for tensor in tensors)
        assert shard.get_tensor("tensor.0").view(torch.uint8).flatten().tolist() == list(range(256))


def test_plan_of_the_true_size_writes_a_thirteenth() -> None:
    plan = cloned_shards.plan_shards(SyntheticModel.m2(), num_distinct_layers=4)
    assert len(plan) == 187
    assert sum(shard.data_bytes for shard in plan) == 230_121_630_720
    assert sum(shard.written_bytes for shard in plan) < 17.5e9


def test_plan_clones_every_code_of_a_later_layer_and_nothing_else() -> None:
    plan = cloned_shards.plan_shards(
        replace(SyntheticModel(), num_hidden_layers=8), num_distinct_layers=DISTINCT
    )
    for shard in plan:
        (layer,) = {layer_of(tensor.name) for tensor in shard.tensors}
        is_code = {tensor.dtype == FLOAT8_E4M3FN for tensor in shard.tensors}
        assert is_code in ({True}, {False})
        assert (shard.source is not None) == (is_code == {True} and layer is not None and layer >= DISTINCT)
        if shard.source is not None:
            for tensor, source in zip(shard.tensors, shard.source.tensors, strict=True):
                assert source.name == source_name(tensor.name, is_cloned=True)


def test_source_of_other_shapes_is_refused() -> None:
    source = cloned_shards.PlannedShard(file_name="a.safetensors", tensors=planned("a", "b"))
    with pytest.raises(ValueError, match="b.safetensors differs from a.safetensors in shapes or dtypes"):
        cloned_shards.PlannedShard(file_name="b.safetensors", tensors=planned("a"), source=source)


def test_source_that_ends_within_a_block_is_refused() -> None:
    source = cloned_shards.PlannedShard(file_name="a.safetensors", tensors=planned("a", "b"))
    with pytest.raises(ValueError, match="b.safetensors holds 512 bytes: blocks of 4096 are cloned"):
        cloned_shards.PlannedShard(file_name="b.safetensors", tensors=planned("c", "d"), source=source)


@pytest.mark.parametrize("wrong", ["source_offset", "target_offset", "size_bytes"])
def test_range_within_a_block_is_refused(wrong: str, tmp_path: Path) -> None:
    offsets = {"source_offset": 4096, "target_offset": 4096, "size_bytes": 4096, wrong: 4104}
    with pytest.raises(ValueError, match=f"{wrong} is 4104: blocks of 4096 bytes are cloned"):
        reflinks.clone_range(tmp_path / "a", tmp_path / "b", **offsets)


@pytest.mark.skipif(
    not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm: it is known to have no reflinks"
)
def test_file_system_without_reflinks_is_recognised_and_named() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        source, target = Path(folder, "source"), Path(folder, "target")
        source.write_bytes(bytes(4096))
        target.touch()
        assert not reflinks.has_reflinks(Path(folder))
        with pytest.raises(CannotRunError, match="expected a file system with reflinks: XFS or btrfs"):
            reflinks.clone_range(source, target, source_offset=0, target_offset=0, size_bytes=4096)


def test_too_little_disk_is_refused_with_both_sizes(tmp_path: Path) -> None:
    with pytest.raises(CannotRunError, match=f"expected {1 << 60} bytes free, found [0-9]+"):
        reflinks.require_room(tmp_path, 1 << 60)


@pytest.mark.skipif(sys.platform != "linux", reason="the script says here that it needs Linux")
def test_missing_tools_end_with_3_and_the_package_to_install(tmp_path: Path) -> None:
    arguments = ["--output", tmp_path / "m2", "--image", tmp_path / "m2.img", *TOY]
    result = run(*arguments, PATH=str(tmp_path))
    assert result.exit_code == 3
    assert "no mkfs.xfs (Debian: apt-get install xfsprogs)" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the script says here that it needs Linux")
def test_without_root_it_ends_with_3_and_says_so() -> None:
    program = (
        f"import os, sys; sys.path.insert(0, {str(SCRIPTS)!r}); import full_size_checkpoint\n"
        "if os.geteuid() == 0: os.setuid(65534)\n"
        "full_size_checkpoint.main()"
    )
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        words = ["--output", f"{folder}/m2", "--image", f"{folder}/m2.img", *map(str, TOY)]
        result = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=False
        )
    assert result.returncode == 3, result.stderr
    assert "this is not root, and only root may mount" in result.stderr


def test_more_distinct_layers_than_layers_end_with_2(tmp_path: Path) -> None:
    result = run("--output", tmp_path / "m2", "--preset", "toy", "--distinct-layers", 5)
    assert result.exit_code == 2
    assert "5 distinct layers were asked for: expected at most --num-hidden-layers, 4" in result.stderr


@pytest.mark.parametrize("action", [[], ["--remove"]])
def test_foreign_folder_is_left_alone(action: list[str], tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    result = run("--output", tmp_path, "--preset", "toy", *action)
    assert result.exit_code == 2
    assert "exists, and this script did not write it" in result.stderr
    assert (tmp_path / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("action", [[], ["--remove"]])
def test_foreign_image_is_left_alone(action: list[str], tmp_path: Path) -> None:
    image = tmp_path / "mine.img"
    image.write_bytes(b"XFSB" + bytes(200))
    result = run("--output", tmp_path / "m2", "--image", image, "--preset", "toy", *action)
    assert result.exit_code == 2
    assert "mine.img is not an image that this script made" in result.stderr
    assert image.read_bytes() == b"XFSB" + bytes(200)


def test_nothing_to_remove_is_no_error(tmp_path: Path) -> None:
    result = run("--output", tmp_path / "m2", "--remove", "--json")
    assert (result.exit_code, json.loads(result.stdout)["done"]) == (0, [])


# In an image.


@pytest.mark.slow
def test_all_but_the_cloned_codes_is_what_a_whole_synthesis_writes(cloned: Path, tmp_path: Path) -> None:
    model = replace(SyntheticModel(), num_hidden_layers=LAYERS)
    synthesize(tmp_path / "whole", model=model, dtype=FP8, shard_size_bytes=None, seed=0)
    assert (cloned / "config.json").read_text() == (tmp_path / "whole/config.json").read_text().replace(
        "  ", " "
    )
    with CheckpointReader(cloned) as clones, CheckpointReader(tmp_path / "whole") as whole:
        assert clones.index.names == whole.index.names
        for name in clones.index.names:
            source = source_name(name, is_cloned=clones.index[name].dtype == FLOAT8_E4M3FN)
            found, expected = clones.read(name), whole.read(source)
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


def test_safetensors_reads_a_clone_as_mm2_does(cloned: Path) -> None:
    with CheckpointReader(cloned) as reader:
        for name in reader.index.layer_names(LAYERS - 1)[::7]:
            with safe_open(reader.index[name].file, "pt") as shard:
                theirs = shard.get_tensor(name)
            assert torch.equal(theirs.view(torch.uint8), reader.read(name).view(torch.uint8))


def test_layers_that_share_codes_differ_in_digest_and_in_every_matrix(cloned: Path) -> None:
    spec = ModelSpec.from_config(json.loads((cloned / "config.json").read_text()))
    with CheckpointReader(cloned) as reader:
        digests = fingerprint_model(reader, spec, Span(0, LAYERS)).layers.values()
        assert len(set(digests)) == LAYERS
        for name in reader.index.layer_names(0):
            if reader.index[name].dtype == FLOAT8_E4M3FN:
                clone = name.replace(layer_prefix(0), layer_prefix(DISTINCT))
                assert torch.equal(reader.read(name).view(torch.uint8), reader.read(clone).view(torch.uint8))
                weights = (reader.read_weight(part, torch.float32) for part in (name, clone))
                assert not torch.equal(*weights)


def test_clones_take_no_disk(cloned: Path) -> None:
    assert sum(file.stat().st_size for file in cloned.iterdir()) > 2 * shutil.disk_usage(cloned).used


def test_second_call_finds_the_first_and_its_figures(cloned: Path) -> None:
    again = made("--output", cloned, *TOY)
    assert again["was_there"] is True
    assert (again["num_hidden_layers"], again["distinct_layers"]) == (LAYERS, DISTINCT)
    assert again["logical_bytes"] > 80_000_000
    assert again["disk_bytes"] == Path(again["image"]).stat().st_blocks * 512
    assert again["seconds"] > 0


def test_other_layers_at_the_same_place_are_refused(cloned: Path) -> None:
    result = run("--output", cloned, "--preset", "toy")
    assert result.exit_code == 2
    assert "holds another checkpoint" in result.stderr


def test_mounted_checkpoint_cannot_be_written(cloned: Path) -> None:
    with pytest.raises(OSError, match="Read-only file system"):
        (cloned / "config.json").write_text("{}")


def test_unmounted_image_is_mounted_again_with_the_same_bytes(image_place: Path) -> None:
    made("--output", image_place, "--preset", "toy", "--distinct-layers", 1)
    before = {file.name: file.read_bytes() for file in image_place.iterdir()}
    assert run("--output", image_place, "--unmount").exit_code == 0
    assert not image_place.exists()
    assert made("--output", image_place, "--preset", "toy", "--distinct-layers", 1)["was_there"] is True
    assert {file.name: file.read_bytes() for file in image_place.iterdir()} == before


def test_remove_leaves_no_file_mount_or_loop_device(scratch: Path, tmp_path: Path) -> None:
    image = tmp_path / "elsewhere" / "m2.img"
    made("--output", tmp_path / "m2", "--image", image, "--preset", "toy")
    assert is_loop_used(image)
    result = run("--output", tmp_path / "m2", "--remove", "--json")
    assert json.loads(result.stdout)["done"] == [str(tmp_path / "m2"), str(image)]
    assert not is_loop_used(image)
    assert [path for path in tmp_path.rglob("*") if path.is_file() or path.name == "m2"] == []


def test_checkpoint_in_use_is_not_removed(image_place: Path) -> None:
    made("--output", image_place, "--preset", "toy")
    with (image_place / "config.json").open():
        result = run("--output", image_place, "--remove")
    assert result.exit_code == 3
    assert "busy" in result.stderr
    assert (image_place / "config.json").exists()


@pytest.mark.slow
def test_killed_build_leaves_nothing_in_the_way_of_the_next(image_place: Path) -> None:
    words = ["--output", image_place, "--preset", "toy", "--num-hidden-layers", 600, "--distinct-layers", 600]
    build = subprocess.Popen(
        [sys.executable, str(SCRIPTS / "full_size_checkpoint.py"), *map(str, words)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    partial = image_place.with_name(".m2.partial")
    while not any(partial.glob("*.safetensors")):
        assert build.poll() is None
        time.sleep(0.01)
    build.send_signal(signal.SIGKILL)
    build.wait()
    assert not image_place.exists()
    made("--output", image_place, "--preset", "toy")
    assert sorted(path.name for path in image_place.parent.iterdir()) == ["m2", "m2.img"]


def test_damaged_image_ends_with_3_and_its_name(image_place: Path) -> None:
    image = image_place.with_name("m2.img")
    made("--output", image_place, "--preset", "toy")
    assert run("--output", image_place, "--unmount").exit_code == 0
    with image.open("r+b") as file:
        file.seek(8)  # the number of blocks; magic and label stay
        file.write(bytes(8))
    result = run("--output", image_place, "--preset", "toy")
    assert result.exit_code == 3
    assert "m2.img cannot be mounted" in result.stderr
    assert not is_loop_used(image)


@pytest.mark.slow
def test_folder_with_reflinks_needs_no_image(xfs: Path) -> None:
    used_before = shutil.disk_usage(xfs).used
    first = made("--output", xfs / "m2", *TOY)
    assert (first["image"], first["was_there"]) == (None, False)
    assert sorted(path.name for path in xfs.iterdir()) == ["m2"]
    assert shutil.disk_usage(xfs).used - used_before < first["logical_bytes"] / 2
    assert made("--output", xfs / "m2", *TOY)["was_there"] is True
    with CheckpointReader(xfs / "m2") as reader:
        assert reader.index.layers == tuple(range(LAYERS))
    assert run("--output", xfs / "m2", "--remove").exit_code == 0
    assert list(xfs.iterdir()) == []


def test_mount_point_itself_is_refused(xfs: Path) -> None:
    result = run("--output", xfs, "--preset", "toy")
    assert result.exit_code == 2
    assert "is where a file system is mounted: expected a folder in it" in result.stderr
