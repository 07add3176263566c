"""The choice of experts, derived from a port's own logits: it is sure only beyond the rounding of these logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.derived_choice import find_contradictions
from minimax_tools.model.sites import Site
from minimax_tools.model.weight_names import CORRECTION_BIAS


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


def test_nothing_is_derived_from_nan() -> None:
    sides: Any = OneToken([float("nan"), 1.0, 0.0, 0.0], NO_BIAS)
    assert find_contradictions(sides, 0, torch.tensor([[1]])) is None
