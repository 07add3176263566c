from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from minimax_tools.cli import mm2_split
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.checkpoint import plan_tensors
from minimax_tools.synthetic.toy_model import SyntheticModel

SMALL = ("--num-hidden-layers", "1", "--num-local-experts", "4")
SIZES = ("much", "500000")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(mm2_split, [str(argument) for argument in arguments])


def test_synthesize_writes_the_toy_into_several_shards(tmp_path: Path) -> None:
    result = run("synthesize", "--output", tmp_path / "toy", "--json")
    assert result.exit_code == 0, result.output
    shards = sorted((tmp_path / "toy").glob("model-*.safetensors"))
    made = json.loads(result.stdout)
    assert (made["folder"], made["num_shards"]) == (str(tmp_path / "toy"), len(shards))
    assert len(shards) >= 3
    assert "model-00000-of-0000" in result.stderr
    assert sum(shard.stat().st_size for shard in shards) < 30_000_000
    assert ModelSpec.from_folder(tmp_path / "toy") == SyntheticModel().spec()


def test_every_quantity_given_replaces_the_presets(tmp_path: Path) -> None:
    quantities = {
        **{"num_hidden_layers": 3, "hidden_size": 384, "num_attention_heads": 6, "num_key_value_heads": 3},
        **{"head_dim": 128, "rotary_dim": 48, "num_local_experts": 5, "num_experts_per_tok": 2},
        **{"intermediate_size": 256, "vocab_size": 300},
    }
    options = [text for name, value in quantities.items() for text in (f"--{name.replace('_', '-')}", value)]
    result = run("synthesize", "--output", tmp_path / "model", *options)
    assert result.exit_code == 0, result.output
    assert "shard" in result.stdout
    assert ModelSpec.from_folder(tmp_path / "model") == SyntheticModel(**quantities).spec()


def test_m2_preset_can_be_cut_to_any_depth_and_width(tmp_path: Path) -> None:
    options = ("--num-hidden-layers", 1, "--num-local-experts", 8, "--vocab-size", 400)
    words = ("--preset", "m2", *options, "--shard-size", "50MB")
    result = run("synthesize", "--output", tmp_path / "m2", *words)
    assert result.exit_code == 0, result.output
    spec = ModelSpec.from_folder(tmp_path / "m2")
    assert (spec.hidden_size, spec.query_width, spec.num_local_experts) == (3072, 6144, 8)
    assert max(shard.stat().st_size for shard in (tmp_path / "m2").glob("*.safetensors")) < 50_100_000


def test_dtype_names_how_linear_layers_are_stored(tmp_path: Path) -> None:
    result = run("synthesize", "--output", tmp_path / "toy", *SMALL, "--dtype", "bfloat16")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "toy" / "config.json").read_text(encoding="utf-8"))
    assert "quantization_config" not in config
    assert config["torch_dtype"] == "bfloat16"


@pytest.mark.parametrize(("text", "size_bytes"), [("300KB", 300_000), ("1MiB", 2**20)])
def test_shard_size_is_read_with_its_unit(text: str, size_bytes: int, tmp_path: Path) -> None:
    assert run("synthesize", "--output", tmp_path / "toy", *SMALL, "--shard-size", text).exit_code == 0
    model = SyntheticModel(num_hidden_layers=1, num_local_experts=4)
    largest = max(shard.stat().st_size for shard in (tmp_path / "toy").glob("*.safetensors"))
    total = sum(tensor.size_bytes for tensor in plan_tensors(model, dtype=torch.float8_e4m3fn))
    assert min(size_bytes, total) / 2 < largest < size_bytes + 20_000


@pytest.mark.parametrize(
    ("options", "exit_code", "message"),
    [
        *((("--shard-size", text), 2, "expected a size, for example 500MB, 2GB or 64MiB") for text in SIZES),
        (("--hidden-size", 200), 2, "these widths do not fit FP8's blocks: expected multiples of 128"),
        (("--vocab-size", 10**13), 3, "toy cannot be written: expected "),
        (("--output", "."), 2, " exists: expected a new or empty folder"),
    ],
)
def test_what_cannot_be_written_is_one_message(
    options: tuple[object, ...], exit_code: int, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    result = run("synthesize", "--output", "toy", *options)
    assert result.exit_code == exit_code
    assert message in result.stderr
    assert "Traceback" not in result.output
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
