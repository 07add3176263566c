from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mm2
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CheckpointError, TargetError
from minimax_tools.model.sites import Site
from mm2.recording import backend_name
from neuron.ports.sources import import_callable

PORTS = Path(__file__).parents[1] / "ports"
Run = Callable[..., mm2.Recording]
Example = Callable[[str], Any]


def test_recording_holds_the_sites_that_the_module_shows(
    run: Run, example: Example, layer: mm2.GoldenLayer
) -> None:
    recording = run(example("minimal_port.py"))
    assert {"input", "q_proj", "moe_delta", "output"} <= set(recording.sites)
    assert torch.equal(recording["input"], layer.input)
    assert recording.backend == "cpu"
    with pytest.raises(KeyError, match="router_experts; recorded: input, input_norm"):
        recording["router_experts"]


def test_given_sites_take_the_place_of_the_modules_own(run: Run, example: Example) -> None:
    recording = run(example("port.py"), sites={"moe_delta": "moe"})
    assert set(recording.sites) == {"input", "moe_delta", "output"}


def test_further_outputs_are_kept_beside_the_sites(run: Run, example: Example) -> None:
    recording = run(example("port.py"), also={"router": "moe.router", "given": "moe:input"})
    assert list(recording.further) == ["given", "router.0", "router.1", "router.2"]
    assert torch.equal(recording.further["given"], recording["post_norm"])
    with pytest.raises(TargetError, match="no submodule 'mo', which the further output a=mo names"):
        run(example("port.py"), also={"a": "mo"})
    with pytest.raises(TargetError, match=r"showed no tensor at the further output a=:output\[1\]"):
        run(example("port.py"), also={"a": ":output[1]"})


@pytest.mark.parametrize("num_calls", [0, 2])
def test_module_must_run_once(num_calls: int) -> None:
    module = nn.Linear(4, 4)

    def run_in_a_block() -> None:
        with mm2.record(module):
            for _ in range(num_calls):
                module(torch.ones(1, 2, 4))

    with pytest.raises(mm2.UsageError, match=f"Linear ran {num_calls} times"):
        run_in_a_block()


def test_hooks_are_gone_after_an_error_in_the_block() -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(ZeroDivisionError), mm2.record(module):
        _ = 1 / 0
    with mm2.record(module) as recording:
        module(torch.ones(1, 2, 4))
    assert recording.num_calls == 1


def test_values_are_as_they_were_when_they_were_computed() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = nn.Identity()

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return self.mlp(states + 1).mul_(0)

    module = InPlace()
    with mm2.record(module) as recording:
        module(torch.ones(1, 2, 4))
    assert recording["moe_delta"].unique().tolist() == [2.0]


def test_heads_may_come_behind_the_tokens(run: Run, example: Example, layer: mm2.GoldenLayer) -> None:
    found = import_callable(f"{PORTS / 'tokens_first.py'}:Right")
    assert found is not None
    recording, right = run(found[1]), run(example("port.py"))
    assert recording["q_rope"].shape == right["q_rope"].transpose(1, 2).shape
    comparison = mm2.compare(layer, recording)
    assert (comparison.verdict, comparison.compared) == ("pass", 17)
    assert mm2.compare(right, recording).site("q_rope").metrics.max_abs_diff == 0.0


def test_backends_have_the_names_of_mm2(monkeypatch: pytest.MonkeyPatch) -> None:
    assert backend_name(torch.device("cpu")) == "cpu"
    monkeypatch.setenv("PJRT_DEVICE", "CPU")
    assert backend_name(torch.device("xla")) == "xla-cpu"
    monkeypatch.setenv("PJRT_DEVICE", "NEURON")
    assert backend_name(torch.device("xla")) == "neuron-xla"
    # Limits were not measured there: a comparison says so.
    assert backend_name(torch.device("cuda")) == "cuda"


def test_every_public_name_is_there() -> None:
    assert [name for name in mm2.__all__ if not hasattr(mm2, name)] == []
    assert set(mm2.__all__) <= set(dir(mm2))


def test_import_does_not_wait_for_torch() -> None:
    code = "import sys, mm2, mm2.pytest_plugin; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=Path(__file__).parents[2]).returncode == 0


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'mm2' has no attribute 'recrod'"):
        _ = mm2.recrod  # type: ignore[attr-defined]


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
