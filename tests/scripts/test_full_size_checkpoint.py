from __future__ import annotations

import shutil
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.model.weight_names import layer_of, layer_prefix
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from minimax_tools.synthetic.checkpoint import FP8, synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
import full_size_checkpoint
from full_size_checkpoint import make_checkpoint, plan_shards

DISTINCT = 3
TOY = replace(SyntheticModel(), num_hidden_layers=8)


def source_name(name: str, *, is_code: bool) -> str:
    """The tensor whose bytes `name` holds."""
    layer = layer_of(name)
    return name.replace(layer_prefix(layer), layer_prefix(layer % DISTINCT)) if is_code and layer else name


def copy_range(
    source: Path, target: Path, *, source_offset: int, target_offset: int, size_bytes: int
) -> None:
    """Stands in for a clone on a file system without reflinks."""
    with source.open("rb") as from_file, target.open("rb+") as to_file:
        from_file.seek(source_offset)
        to_file.seek(target_offset)
        to_file.write(from_file.read(size_bytes))


def test_plan_of_the_true_size_writes_a_thirteenth() -> None:
    plan = plan_shards(SyntheticModel.m2(), num_distinct_layers=4)
    assert len(plan) == 187
    assert sum(shard.data_bytes for shard in plan) == 230_121_630_720
    assert sum(shard.written_bytes for shard in plan) < 17.5e9


def test_all_but_the_cloned_codes_is_what_a_whole_synthesis_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(full_size_checkpoint, "clone_range", copy_range)
    make_checkpoint(tmp_path / "cloned", TOY, num_distinct_layers=DISTINCT, seed=0)
    synthesize(tmp_path / "whole", model=TOY, dtype=FP8, shard_size_bytes=None, seed=0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cloned", "whole"]
    with CheckpointReader(tmp_path / "cloned") as clones, CheckpointReader(tmp_path / "whole") as whole:
        assert clones.index.names == whole.index.names
        for name in clones.index.names:
            source = source_name(name, is_code=clones.index[name].dtype == FLOAT8_E4M3FN)
            found, expected = clones.read(name), whole.read(source)
            assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name
        # Layers share codes, and are not equal.
        name = f"{layer_prefix(DISTINCT)}self_attn.o_proj.weight"
        weights = (
            clones.read_weight(part, torch.float32) for part in (name, source_name(name, is_code=True))
        )
        assert not torch.equal(*weights)
    with pytest.raises(UsageError, match="exists"):
        make_checkpoint(tmp_path / "cloned", TOY, num_distinct_layers=DISTINCT, seed=0)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="no tmpfs at /dev/shm, known to have no reflinks")
def test_file_system_without_reflinks_is_named_and_nothing_is_left() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        with pytest.raises(CannotRunError, match="expected a file system with reflinks: XFS or btrfs"):
            make_checkpoint(Path(folder, "m2"), TOY, num_distinct_layers=DISTINCT, seed=0)
        assert not list(Path(folder).iterdir())


def test_too_little_disk_is_refused_with_both_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(2, 1, 1))
    with pytest.raises(CannotRunError, match="expected [0-9]+ bytes free, found 1"):
        make_checkpoint(tmp_path / "m2", TOY, num_distinct_layers=DISTINCT, seed=0)
