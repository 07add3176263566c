"""The choice of experts, derived from a port's own logits: it is sure only beyond the rounding of these logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.derived_choice import derive_choice, find_contradictions
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE


class OneToken:
    """The two sides of a layer: a token's logits over four experts, of which each token takes one."""

    def __init__(self, logits: list[float], bias: list[float]) -> None:
        self._rows = torch.tensor([logits])
        self._bias = torch.tensor(bias)
        self.weights, self.reference = self, None

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        return (self._rows, self._rows) if site is Site.ROUTER_LOGITS else None

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        yield SimpleNamespace(
            tensors={CORRECTION_BIAS: self._bias}, spec=SimpleNamespace(num_experts_per_tok=1)
        )


def contradicts(logits: list[float], *, bias: list[float], chosen: int) -> bool:
    sides: Any = OneToken(logits, bias)
    found = find_contradictions(sides, 0, torch.tensor([[chosen]]))
    assert found is not None
    return bool(found.item())


NO_BIAS = [0.0, 0.0, 0.0, 0.0]
# So much closer are the scores of the logits 2 and 1 with the bias: less than BF16 rounds the larger one.
CLOSE = [0.0, torch.tensor([2.0, 1.0]).sigmoid().diff().neg().item() - 2e-4, 0.0, 0.0]


def test_an_expert_of_a_lower_logit_is_a_contradiction() -> None:
    assert contradicts([2.0, 1.0, -1.0, -1.0], bias=NO_BIAS, chosen=1)
    assert not contradicts([2.0, 1.0, -1.0, -1.0], bias=NO_BIAS, chosen=0)


@pytest.mark.parametrize(("logit", "is_sure"), [(2.0, False), (2.0001, True)], ids=["bfloat16", "float32"])
def test_logits_are_as_sure_as_they_are_precise(logit: float, is_sure: bool) -> None:
    assert contradicts([logit, 1.0, -1.0, -1.0], bias=CLOSE, chosen=1) is is_sure


class Port:
    """The two sides of a layer of which the port shows some rows: four experts, two of them for each token."""

    def __init__(self, *, is_classic: bool = False, has_weights: bool = True, **shown: torch.Tensor) -> None:
        self._shown = {Site(name): rows for name, rows in shown.items()}
        self.weights, self.reference, self.is_classic = (self if has_weights else None), None, is_classic
        self.num_opened = 0

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        # The golden's rows say the opposite.
        return (-self._shown[site], self._shown[site]) if site in self._shown else None

    @contextmanager
    def open_layer(self, layer: int, reference: object) -> Iterator[Any]:
        self.num_opened += 1
        tensors = {CORRECTION_BIAS: torch.tensor(NO_BIAS), GATE: GATE_ROWS.bfloat16()}
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


def test_what_is_no_number_is_left_out() -> None:
    broken = LOGITS.clone()
    broken[1, 1] = float("nan")
    assert derive(router_logits=broken) is None
    assert derive(router_logits=broken, post_norm=STATES) == [[0, 1], [2, 3]]
