from __future__ import annotations

import pytest
import torch

from minimax_tools.split.causal_part import AddsNothing, Elsewhere, PassThrough


def test_pass_through_gives_back_what_it_is_given() -> None:
    states = torch.randn(2, 3, 4)
    assert PassThrough(torch.nn.Identity(), in_tuple=False)(states, None, use_cache=True) is states
    assert PassThrough(torch.nn.Identity(), in_tuple=True)(states)[0] is states


def test_pass_through_tells_its_layers_kind() -> None:
    layer = torch.nn.Identity()
    layer.attention_type = "sliding_attention"  # type: ignore[assignment]
    assert PassThrough(layer, in_tuple=False).attention_type == "sliding_attention"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_adding_nothing_keeps_every_bit_and_the_dtype(dtype: torch.dtype) -> None:
    states = torch.tensor([-0.0, 0.0, 1e-7, -3.5, float("inf"), float("-inf")], dtype=dtype)
    added = states + AddsNothing()(torch.arange(3))
    assert added.dtype == dtype
    assert torch.equal(added.view(torch.uint8), states.view(torch.uint8))
    # A plain zero would not.
    assert not torch.equal((states + 0.0).view(torch.uint8), states.view(torch.uint8))


def test_what_is_elsewhere_cannot_be_called() -> None:
    with pytest.raises(RuntimeError, match="belongs to another part"):
        Elsewhere()(torch.zeros(1))
