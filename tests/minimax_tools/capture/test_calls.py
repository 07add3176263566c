from __future__ import annotations

import pytest
import torch

from minimax_tools.capture.recorder import NUM_TRACED, Calls, join_calls
from minimax_tools.model.sites import Site

B, S, F, N = 2, 6, 16, 4
STATES = torch.arange(float(B * S * F)).view(B, S, F)
HEADS = torch.arange(float(B * N * S * F)).view(B, N, S, F)
WHOLE = {Site.POST_NORM: Calls(tensors=(STATES,))}


def join(site: Site, *calls: torch.Tensor, inputs: tuple[torch.Tensor, ...] = ()) -> torch.Tensor | None:
    return join_calls({**WHOLE, site: Calls(tensors=calls, inputs=inputs)}, (B, S)).get(site)


def columns(tensor: torch.Tensor, *sizes: int, dim: int = 1) -> tuple[torch.Tensor, ...]:
    return tensor.split(list(sizes), dim=dim)


@pytest.mark.parametrize(
    ("site", "calls", "expected"),
    [
        (Site.MOE_DELTA, (STATES,), STATES),
        (Site.MOE_DELTA, (STATES[:1], STATES[1:]), STATES),
        (Site.MOE_DELTA, columns(STATES, 4, 2), STATES),
        (Site.MOE_DELTA, STATES.flatten(0, 1).split(5), STATES.flatten(0, 1)),
        (Site.MOE_DELTA, STATES.flatten(0, 1)[None].split(5, dim=1), STATES.flatten(0, 1)),
        (Site.Q_ROPE, (HEADS[:1], HEADS[1:]), HEADS),
        (Site.Q_ROPE, columns(HEADS, 4, 2, dim=2), HEADS),
        (Site.Q_ROPE, columns(HEADS.transpose(1, 2), 4, 2), HEADS.transpose(1, 2)),
        (
            Site.Q_ROPE,
            HEADS.transpose(1, 2).flatten(0, 1).split(5),
            HEADS.transpose(1, 2).flatten(0, 1),
        ),
    ],
)
def test_calls_that_add_up_are_joined_in_their_order(
    site: Site, calls: tuple[torch.Tensor, ...], expected: torch.Tensor
) -> None:
    joined = join(site, *calls)
    assert joined is not None
    assert torch.equal(joined, expected)


@pytest.mark.parametrize(
    "calls",
    [
        (STATES[:, :4], STATES[:, :4]),  # one column twice
        (STATES, STATES + 1),  # other values the second time
        (STATES[:1], STATES[1:].half()),
        (STATES[:1, :5], STATES[1:, :4]),  # rows without their padding
        tuple(STATES.flatten(0, 1)[expert:] for expert in range(4)),
    ],
)
def test_other_calls_are_left_out(calls: tuple[torch.Tensor, ...]) -> None:
    assert join(Site.MOE_DELTA, *calls) is None


@pytest.mark.parametrize(
    "calls",
    [
        (STATES, STATES),
        (STATES[:1], STATES[:1], STATES[1:], STATES[1:]),
        (STATES[:1], STATES[1:], STATES[:1], STATES[1:]),
    ],
)
def test_what_is_computed_again_counts_once(calls: tuple[torch.Tensor, ...]) -> None:
    joined = join(Site.MOE_DELTA, *calls)
    assert joined is not None
    assert torch.equal(joined, STATES)


class TestFlatCallsOfEvenSizes:
    """Calls of 4 tokens: the first 4 of row 0, or 2 columns of both rows."""

    LOGITS = -STATES

    def test_inputs_tell_their_order(self) -> None:
        for parts in (
            self.LOGITS.flatten(0, 1).split(4),
            tuple(part.flatten(0, 1) for part in self.LOGITS.split(2, dim=1)),
        ):
            inputs = tuple(-part[:, :NUM_TRACED] for part in parts[1:])
            joined = join(Site.ROUTER_LOGITS, *parts, inputs=inputs)
            assert joined is not None
            assert torch.equal(joined.view(B, S, F), self.LOGITS)

    def test_without_inputs_that_tell_they_are_left_out(self) -> None:
        parts = self.LOGITS.flatten(0, 1).split(4)
        unknown = tuple(torch.zeros(4, NUM_TRACED) for _ in parts[1:])
        assert join(Site.ROUTER_LOGITS, *parts) is None
        assert join(Site.ROUTER_LOGITS, *parts, inputs=unknown) is None
