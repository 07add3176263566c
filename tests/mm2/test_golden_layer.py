from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mm2
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError, TargetError
from minimax_tools.model.sites import Site


def test_layer_gives_the_golden_input_mask_and_positions(layer: mm2.GoldenLayer, golden: Path) -> None:
    capture = Capture.open(golden)
    hidden_states, attention_mask, position_ids = layer.inputs
    assert torch.equal(hidden_states, capture.read(1, Site.INPUT))
    assert attention_mask.sum(dim=1).tolist() == [48, 33]
    assert position_ids.shape == attention_mask.shape == hidden_states.shape[:2]


def test_weights_have_the_names_of_the_hub(layer: mm2.GoldenLayer) -> None:
    weights = layer.weights
    assert weights["self_attn.q_proj.weight"].dtype is torch.bfloat16  # FP8 on the disk
    assert weights["block_sparse_moe.gate.weight"].dtype is torch.float32
    # A test may change what it was given: the next one gets the checkpoint's.
    weights["input_layernorm.weight"] = torch.zeros(1)
    assert layer.weights["input_layernorm.weight"].shape == (256,)


def test_load_builds_the_port_and_fills_it(layer: mm2.GoldenLayer, example: Callable[[str], Any]) -> None:
    port = layer.load(example("minimal_port.py"))
    assert torch.equal(port.self_attn.q_proj.weight, layer.weights["self_attn.q_proj.weight"])


def test_load_lists_names_that_do_not_fit(layer: mm2.GoldenLayer) -> None:
    def build(config: Any, layer_idx: int) -> torch.nn.Module:
        return torch.nn.Linear(4, 4)

    with pytest.raises(TargetError, match=r"build, layer 1: .*(missing|unexpected)"):
        layer.load(build)


def test_missing_layer_names_those_that_are_there(layers: mm2.GoldenLayers) -> None:
    with pytest.raises(mm2.UsageError, match="holds no layer 9: expected layers 0-3"):
        layers.layer(9)


def test_golden_without_its_checkpoint_says_where_to_name_it(layers: mm2.GoldenLayers, golden: Path) -> None:
    without = mm2.GoldenLayers(Capture.open(golden), weights=None)
    with pytest.raises(CheckpointError, match=r"are not on this machine.*--mm2-model DIR"):
        _ = without.layer(1).weights
    # The golden's values need no checkpoint.
    assert torch.equal(without.layer(1).input, layers.layer(1).input)


def test_other_checkpoint_is_refused(golden: Path, tmp_path: Path) -> None:
    from minimax_tools.synthetic.checkpoint import synthesize
    from minimax_tools.synthetic.toy_model import SyntheticModel

    synthesize(
        tmp_path / "other", model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=None, seed=1
    )
    with (
        mm2.open_golden(golden, model=tmp_path / "other") as opened,
        pytest.raises(mm2.IncomparableError, match="is not of the checkpoint"),
    ):
        _ = opened.layer(0).weights
