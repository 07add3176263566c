"""The choice of experts, derived from a port's own logits: it is sure only beyond the rounding of these logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.port_choice import DerivedChoice, derive_choice, find_contradictions
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE

NO_BIAS = torch.zeros(4)


class Port:
    """The two sides of a layer of which the port shows some rows: four experts, two of them for each token."""

    def __init__(
        self,
        *,
        is_classic: bool = False,
        has_weights: bool = True,
        bias: torch.Tensor = NO_BIAS,
        **shown: torch.Tensor,
    ) -> None:
        self._bias = bias
        self._shown = {Site(name): rows for name, rows in shown.items()}
        self.weights, self.reference, self.is_classic = (self if has_weights else None), None, is_classic
        self.num_opened = 0

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        # The golden's rows say the opposite.
        return (-self._shown[site], self._shown[site]) if site in self._shown else None

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        self.num_opened += 1
        tensors = {CORRECTION_BIAS: self._bias, GATE: GATE_ROWS.bfloat16()}
        yield SimpleNamespace(tensors=tensors, spec=SimpleNamespace(num_experts_per_tok=2))


GATE_ROWS = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0], [0.0, -1.0]])
LOGITS = torch.tensor([[2.0001, 1.0, -1.0, -1.5], [-1.0, 2.0, 1.0001, -2.0]])
STATES = torch.tensor([[3.0, 1.0], [-3.0, -1.0]])


def derive(**options: Any) -> list[list[int]] | None:
    sides: Any = Port(**options)
    found = derive_choice(sides, 0)
    return None if found is None else found.experts.sort(dim=1).values.tolist()


def test_choice_follows_from_logits_or_else_from_the_routers_input() -> None:
    assert derive(router_logits=LOGITS) == [[0, 1], [1, 2]]
    assert derive(post_norm=STATES) == [[0, 1], [2, 3]]
    assert derive(router_logits=LOGITS, post_norm=STATES) == [[0, 1], [1, 2]]


def test_what_is_no_number_or_not_known_gives_no_choice() -> None:
    broken = LOGITS.clone()
    broken[1, 1] = float("nan")
    assert derive() is None
    assert derive(router_logits=broken) is None
    assert derive(router_logits=broken, post_norm=STATES) == [[0, 1], [2, 3]]
    assert derive(router_logits=LOGITS, has_weights=False) is None
    assert derive(router_logits=LOGITS, is_classic=True) is None
    experts = torch.zeros(2, 2, dtype=torch.int64)
    for options in ({"router_logits": broken}, {"router_logits": LOGITS, "has_weights": False}):
        assert find_contradictions(Port(**options), 0, experts) is None  # type: ignore[arg-type]
    sides: Any = Port(post_norm=STATES)
    assert find_contradictions(sides, 0, experts) is None
    assert sides.num_opened == 0


def test_contradictions_are_told_token_by_token() -> None:
    sides: Any = Port(router_logits=LOGITS)
    experts = torch.tensor([[1, 0], [1, 3]])
    found = find_contradictions(sides, 0, experts)
    assert found is not None
    assert found.tolist() == [False, True]


@pytest.mark.parametrize("shift", [0.0, 1e-4], ids=["bfloat16", "float32"])
@pytest.mark.parametrize(("times", "is_sure"), [(0.99, False), (1.01, True)])
def test_a_choice_is_sure_beyond_twice_the_error_of_the_scores(
    shift: float, times: float, is_sure: bool
) -> None:
    """Token 0 is the one under test; token 1 has smaller logits, a smaller error, and so a smaller margin is sure."""
    step = 2e-5 if shift else 2.0**-8
    logits = torch.tensor([[8.0 + shift, 3.0, 2.0, -3.0], [0.0390625 + step, 0.0390625, 0.0390625, 0.0]])
    scores = logits[0].sigmoid()
    # The error is one of the logit in BF16, of the token's largest logit in float32.
    errors = 2.0**-8 * logits[0].abs() if shift == 0.0 else 1e-5 * logits[0].abs().max()
    reach = float((scores * (1.0 - scores) * errors).max())
    bias = torch.zeros(4)
    bias[2] = float(scores[1] - scores[2]) - 2.0 * times * reach
    sides: Any = Port(router_logits=logits, bias=bias)
    found = derive_choice(sides, 0)
    assert found is not None
    assert found.is_sure.tolist() == [is_sure, True]
    other = torch.stack((torch.tensor([0, 2]), found.experts[1]))
    contradictions = find_contradictions(sides, 0, other)
    assert contradictions is not None
    assert contradictions.tolist() == [is_sure, False]


def test_another_choice_completes_the_tokens_that_are_not_sure() -> None:
    one = DerivedChoice(
        experts=torch.tensor([[0, 1], [2, 3], [4, 5]]), is_sure=torch.tensor([True, False, False])
    )
    other = DerivedChoice(
        experts=torch.tensor([[6, 7], [8, 9], [1, 2]]), is_sure=torch.tensor([True, True, False])
    )
    assert one.completed(None) is one
    found = one.completed(other)
    assert found.experts.tolist() == [[0, 1], [8, 9], [1, 2]]
    assert found.is_sure.tolist() == [True, True, False]
