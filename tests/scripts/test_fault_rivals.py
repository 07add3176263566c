"""The rules of other tools say what their sources say: on which side of their limits a difference lies."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.cases import Case
from faults.rivals import RULES
from faults.table import render_table

GOLDEN = torch.linspace(-3, 3, 600, dtype=torch.float64).reshape(20, 30) + 0.01
TWIN = GOLDEN * (1 + 1e-3)
FLOOR = float((GOLDEN - TWIN).norm())

# At right angles to the golden and of its norm: what a rule on direction sees.
OTHER = torch.randn(GOLDEN.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
OTHER -= GOLDEN * (OTHER * GOLDEN).sum() / GOLDEN.square().sum()
OTHER *= GOLDEN.norm() / OTHER.norm()


def spoilt(value: float) -> torch.Tensor:
    """The golden with one element replaced."""
    port = GOLDEN.clone()
    port[3, 4] = value
    return port


@pytest.mark.parametrize("rule", RULES)
def test_equal_tensors_are_equal_to_every_rule(rule: str) -> None:
    assert not RULES[rule](GOLDEN, GOLDEN.clone(), TWIN)


@pytest.mark.parametrize("rule", RULES)
def test_other_tensor_is_different_to_every_rule(rule: str) -> None:
    assert RULES[rule](GOLDEN, OTHER, TWIN)


@pytest.mark.parametrize(
    ("rule", "within", "beyond"),
    [
        # cosine 0.99 is an angle whose tangent is 0.1425
        ("tenstorrent", GOLDEN + 0.14 * OTHER, GOLDEN + 0.145 * OTHER),
        # One limit alone is not enough, until the second pair of limits.
        ("msprobe", GOLDEN + 0.14 * OTHER, GOLDEN + 0.145 * OTHER),
        ("msprobe", spoilt(float(GOLDEN[3, 4]) + 0.9), spoilt(float(GOLDEN[3, 4]) + 1.1)),
        ("msprobe_both", GOLDEN + 0.0009, GOLDEN + 0.0011),
        # Either tolerance suffices.
        ("polygraphy", GOLDEN * (1 + 0.9e-5), GOLDEN * (1 + 1.1e-5)),
        # 4.5 % of relative L2
        ("sglang", GOLDEN + 0.044 * OTHER, GOLDEN + 0.046 * OTHER),
        ("vllm_neuron", TWIN + OTHER / OTHER.norm() * 5.9 * FLOOR, TWIN + OTHER / OTHER.norm() * 6.1 * FLOOR),
        (
            "vllm_neuron_dense",
            TWIN + OTHER / OTHER.norm() * 2.9 * FLOOR,
            TWIN + OTHER / OTHER.norm() * 3.1 * FLOOR,
        ),
        (
            "aws_equivalence",
            TWIN + OTHER / OTHER.norm() * 1.19 * FLOOR,
            TWIN + OTHER / OTHER.norm() * 1.21 * FLOOR,
        ),
        ("seeds", GOLDEN + 0.0009, GOLDEN + 0.0011),
    ],
)
def test_limit_lies_where_it_is_published(rule: str, within: torch.Tensor, beyond: torch.Tensor) -> None:
    assert not RULES[rule](GOLDEN, within, TWIN)
    assert RULES[rule](GOLDEN, beyond, TWIN)


def test_tenstorrent_takes_nan_for_zero() -> None:
    assert not RULES["tenstorrent"](GOLDEN, spoilt(float("nan")), TWIN)


@pytest.mark.parametrize("rule", ["seeds", "polygraphy", "sglang", "vllm_neuron", "aws_equivalence"])
def test_nan_is_a_difference(rule: str) -> None:
    assert RULES[rule](GOLDEN, spoilt(float("nan")), TWIN)


def test_table_has_a_row_for_every_mistake() -> None:
    case = Case(
        run="a run",
        baseline="a baseline",
        port="planted",
        backend="cpu",
        rows="prefill",
        layer=2,
        kind="catalogued",
        mistake="rope_theta",
        parameters={"theta": 10000.0},
        sites=("q_rope",),
        effects={"q_rope": 30.0, "output": 2.0},
        failed=("q_rope",),
        blamed=(("q_rope",),),
        named=(("rope_theta", {"theta": 10000.0}),),
        rivals=dict.fromkeys(RULES, ()),
    )
    row = render_table([case]).splitlines()[-1]
    rivals = " | ".join(["0/1"] * 7)
    assert row == f"| `rope_theta` theta 1e+04 | 1 | 30 to 30 | 1/1 | 1/1 | 0/1 | 1/1 | {rivals} |"
