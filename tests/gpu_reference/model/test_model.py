from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import open_golden
from gpu_reference.model.model import load_golden_model
from gpu_reference.model.model_checks import weight_of
from gpu_reference.model.placement import Placement
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.run import single_layer_run


@pytest.mark.parametrize("is_offloaded", [False, True])
def test_float32_golden_rounds_nothing(ask: Any, toy: Path, tmp_path: Path, is_offloaded: bool) -> None:
    placement = Placement(device_map={"": "disk" if is_offloaded else "cpu"}, offload_folder=tmp_path)
    with (
        open_golden(ask(dtype=torch.float32, placement=placement)) as golden,
        CheckpointReader(toy) as reader,
    ):
        projection = golden.model.get_submodule("model.layers.3.self_attn.q_proj")
        exact = reader.read_weight("model.layers.3.self_attn.q_proj.weight", torch.float32)
        assert torch.equal(weight_of(projection, "weight"), exact)
        assert not torch.equal(exact, exact.bfloat16().float())
        assert {value.dtype for value in golden.model.state_dict().values()} == {torch.float32}
        assert golden.forward().dtype == torch.float32


def test_layers_past_the_span_are_not_loaded(ask: Any) -> None:
    with open_golden(ask(run=single_layer_run(1, sites_level="layer"))) as golden:
        assert len(list(golden.model.get_submodule("model.layers").children())) == 2


def test_float32_matmuls_are_not_tf32(ask: Any) -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with open_golden(ask()) as golden:
        assert golden.describe().provenance.options["float32_matmul"] == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "ieee"


def test_convolutions_are_not_tf32_and_the_process_can_still_export(ask: Any) -> None:
    with open_golden(ask()):
        pass
    assert torch.backends.cudnn.allow_tf32 is False
    exported = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(2, 2),))
    assert exported.module()(torch.ones(2, 2)).shape == (2, 2)


def test_attention_implementation_without_its_package_is_an_error_that_names_it(ask: Any) -> None:
    with pytest.raises(CheckpointError, match=r"transformers cannot load .*FlashAttention"):
        with open_golden(ask(attn_implementation="flash_attention_2")):
            pass


def test_model_that_fits_nowhere_asks_for_an_offload_folder(ask: Any) -> None:
    placement = Placement(device_map="auto", max_memory={"cpu": 5_000_000})
    with pytest.raises(UsageError, match=r"does not fit .*Give --offload-folder DIR too"):
        with open_golden(ask(placement=placement)):
            pass


def test_what_transformers_cannot_load_names_folder_and_reason(ask: Any, toy: Path, tmp_path: Path) -> None:
    for path in toy.iterdir():
        if path.name != "config.json":
            (tmp_path / path.name).symlink_to(path)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    request = ask(folder=tmp_path)
    (tmp_path / "config.json").write_text("{")
    with CheckpointReader(tmp_path) as reader:
        with pytest.raises(CheckpointError, match=f"transformers cannot load {tmp_path}: found "):
            load_golden_model(request.model, reader)


# Two goldens, the first quietly, in one process: each start takes seconds. Layer 0 alone: transformers reports the
# weights of all other layers as unexpected.
QUIET_AND_NOT = """
import sys
from gpu_reference.cli import main

words = ["single-layer", "--layer", "0", "--seq-len", "4", "--noise-floor", "off", "--stream", "off", *sys.argv[1:]]
for options in (["--quiet"], ["--overwrite"]):
    main([*words, *options], standalone_mode=False)
    print("\\nNEXT", file=sys.stderr)
"""


def test_report_of_the_loaded_weights_follows_quiet(
    toy: Path, tmp_path: Path, forked_python: Any, golden_modules: tuple[str, ...]
) -> None:
    words = ("--model", toy, "--output-dir", tmp_path / "golden")
    done = forked_python(QUIET_AND_NOT, *words, modules=golden_modules)
    assert done.returncode == 0, done.stderr
    quiet, told, _ = done.stderr.split("\nNEXT\n")
    assert quiet == ""
    assert "LOAD REPORT" in told


def test_missing_shard_is_told_before_anything_is_loaded(ask: Any, toy: Path, tmp_path: Path) -> None:
    for path in toy.iterdir():
        if "00002-of" not in path.name:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(CheckpointError, match="model-00002-of"):
        with open_golden(ask(folder=tmp_path)):
            pass
