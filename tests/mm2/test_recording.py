from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mm2
from minimax_tools.errors import TargetError
from mm2.recording import backend_name
from neuron.ports.sources import import_callable

PORTS = Path(__file__).parents[1] / "ports"


def test_recording_holds_the_sites_that_the_module_shows(
    run: Callable[..., mm2.Recording], example: Callable[[str], Any], layer: mm2.GoldenLayer
) -> None:
    recording = run(example("minimal_port.py"))
    assert {"input", "q_proj", "moe_delta", "output"} <= set(recording.sites)
    assert torch.equal(recording["input"], layer.input)
    assert recording.backend == "cpu"
    with pytest.raises(KeyError, match="router_experts; recorded: input, input_norm"):
        recording["router_experts"]


def test_given_sites_take_the_place_of_the_modules_own(
    run: Callable[..., mm2.Recording], example: Callable[[str], Any]
) -> None:
    recording = run(example("port.py"), sites={"moe_delta": "moe"})
    assert set(recording.sites) == {"input", "moe_delta", "output"}


def test_further_outputs_are_kept_beside_the_sites(
    run: Callable[..., mm2.Recording], example: Callable[[str], Any]
) -> None:
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


def test_heads_may_come_behind_the_tokens(
    run: Callable[..., mm2.Recording], example: Callable[[str], Any], layer: mm2.GoldenLayer
) -> None:
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
