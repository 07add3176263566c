from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from minimax_tools.capture.taps import Tap, verify_taps
from minimax_tools.errors import TargetError
from minimax_tools.model.sites import Site


@pytest.mark.parametrize(
    ("text", "tap"),
    [
        ("self_attn.q_proj", Tap(path="self_attn.q_proj")),
        ("", Tap(path="")),
        ("mlp:input", Tap(path="mlp", point="input")),
        ("experts.3:output", Tap(path="experts.3")),
        ("mlp.gate:output[2]", Tap(path="mlp.gate", index=2)),
        ("norm:input[1]", Tap(path="norm", point="input", index=1)),
        ("attn.qkv:output[0][0:512]", Tap(path="attn.qkv", part=(0, 512))),
        ("attn.qkv[512:640]", Tap(path="attn.qkv", part=(512, 640))),
        ("attn:output[2:4]", Tap(path="attn", part=(2, 4))),
    ],
)
def test_notation_is_read(text: str, tap: Tap) -> None:
    assert Tap.parse(text) == tap


def test_tap_is_written_in_full() -> None:
    assert str(Tap(path="attn.qkv", part=(0, 512))) == "attn.qkv:output[0][0:512]"


@pytest.mark.parametrize(
    "text",
    [
        *("a b", "mlp:", "mlp:out", "mlp[0]", "mlp:output[x]", "mlp:output[-1]", "a:b:c"),
        *("attn[a:b]", "attn[1:]", "attn[0][1]"),
    ],
)
def test_unreadable_notation_is_refused(text: str) -> None:
    with pytest.raises(
        TargetError, match=r"cannot be read: expected 'submodule.path', 'submodule.path:input'"
    ):
        Tap.parse(text)


@pytest.mark.parametrize("text", ["attn[4:2]", "attn[2:2]"])
def test_cut_of_nothing_is_refused(text: str) -> None:
    with pytest.raises(TargetError, match="its part ends before it begins"):
        Tap.parse(text)


class Output(NamedTuple):
    states: Any
    weights: Any


def test_element_is_picked_and_put_back_in_the_tuple_of_its_kind() -> None:
    output, new = Output(states=torch.tensor(1.0), weights=torch.tensor(2.0)), torch.tensor(9.0)
    for index in (0, 1):
        tap = Tap(path="", index=index)
        assert tap.pick(output) is output[index]
        changed = tap.put(output, new)
        assert isinstance(changed, Output)
        assert (changed[index], changed[1 - index]) == (new, output[1 - index])


def test_lone_tensor_is_its_first_element() -> None:
    tensor = torch.ones(2)
    assert Tap(path="").pick(tensor) is tensor
    assert Tap(path="").put(tensor, tensor + 1).tolist() == [2.0, 2.0]
    assert Tap(path="", index=1).pick(tensor) is None
    assert Tap(path="").pick("no tensor") is None


def test_every_missing_submodule_is_named() -> None:
    module = nn.Sequential(nn.Linear(2, 2))
    verify_taps(module, {Site.Q_PROJ: Tap(path="0"), Site.OUTPUT: Tap(path="")})
    taps = {Site.Q_PROJ: Tap(path="1"), Site.K_PROJ: Tap(path="a.b"), Site.V_PROJ: Tap(path="0")}
    with pytest.raises(
        TargetError, match=r"that Sequential does not have: found q_proj: '1', k_proj: 'a.b'\. Paths"
    ):
        verify_taps(module, taps)


def test_part_is_picked_and_put_back() -> None:
    tap, fused = Tap(path="", part=(2, 4)), torch.arange(6.0).reshape(1, 6)
    picked = tap.pick(fused)
    assert picked is not None
    assert picked.tolist() == [[2.0, 3.0]]
    assert tap.put(fused, torch.tensor([[8.0, 9.0]])).tolist() == [[0.0, 1.0, 8.0, 9.0, 4.0, 5.0]]
    assert fused.tolist() == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0]]
    assert tap.put((fused, "kept"), torch.zeros(1, 2))[1] == "kept"


def test_narrow_tensor_is_named() -> None:
    with pytest.raises(
        TargetError, match=r"attn:output\[0\]\[0:8\] cannot be cut: expected at least 8 .*\[1, 6\]"
    ):
        Tap(path="attn", part=(0, 8)).pick(torch.zeros(1, 6))
