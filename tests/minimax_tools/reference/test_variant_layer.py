from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.names import EXPERT_DOWN, EXPERT_GATE, EXPERT_UP, expert_weight
from minimax_tools.reference.modules import read_config
from minimax_tools.reference.variant_layer import VariantLayer, add_experts
from minimax_tools.reference.variants import VARIANTS, Variant, variants_beside
from minimax_tools.sites import Site

LAYER = 1
CPU = torch.device("cpu")
COMPUTED = tuple(site for site in Site if site is not Site.INPUT)
BEFORE_ATTENTION = COMPUTED[: COMPUTED.index(Site.ATTN_CONTEXT)]


@pytest.fixture(scope="module")
def weights(open_layer: Any) -> Mapping[str, torch.Tensor]:
    tensors = open_layer(LAYER)
    return {name: tensors[name] for name in tensors}


def run(
    variant: Variant, toy: Path, weights: Mapping[str, torch.Tensor], capture: Capture, **changes: Any
) -> dict[Site, torch.Tensor]:
    runner = VariantLayer(variant, read_config(toy, num_hidden_layers=4), weights, layer=LAYER, device=CPU)
    fed = {"router_experts": capture.read(LAYER, Site.ROUTER_EXPERTS), "sites": COMPUTED, **changes}
    return runner.run(capture.read(LAYER, Site.INPUT), capture.read_inputs(), **fed)


def distance(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact.double()).norm() / exact.double().norm())


def test_golden_of_eager_implementations_is_the_eager_variant(
    toy: Path, weights: Mapping[str, torch.Tensor], tmp_path: Path, command: Any
) -> None:
    ways = ("--attn-implementation", "eager", "--experts-implementation", "eager", "--noise-floor", "off")
    asked = ("--model", toy, "--layer", LAYER, "--seq-len", "24,15", "--sites", "all", "--quiet")
    made = command(mm2_gpu, "single-layer", *asked, *ways, "--output-dir", tmp_path / "eager")
    assert made.exit_code == 0, made.output
    eager = Capture.open(tmp_path / "eager")
    variant = run(VARIANTS["eager"], toy, weights, eager)
    real = eager.read_attention_mask().bool()
    for site in COMPUTED:
        mine, theirs = variant[site], eager.read(LAYER, site)
        if site.has_heads_dim:
            mine, theirs = mine.transpose(1, 2), theirs.transpose(1, 2)
        if site in (Site.MOE_DELTA, Site.OUTPUT):
            # Gate and up are two products where transformers has one: kernels may add in another order.
            assert distance(mine[real], theirs[real]) < 5e-4, site
        else:
            assert torch.equal(mine[real], theirs[real]), site
    other = run(VARIANTS["halves"], toy, weights, eager)
    assert not torch.equal(other[Site.ATTN_CONTEXT], eager.read(LAYER, Site.ATTN_CONTEXT))


@pytest.mark.parametrize("name", VARIANTS)
def test_variant_rounds_in_other_places_and_is_as_right(
    name: str, toy: Path, weights: Mapping[str, torch.Tensor], capture: Capture
) -> None:
    variant = run(VARIANTS[name], toy, weights, capture)
    real = capture.read_attention_mask().bool()
    for site in BEFORE_ATTENTION:
        assert torch.equal(variant[site], capture.read(LAYER, site)), site
    for site in (Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT):
        twin = capture.read_twin(LAYER, site)
        assert twin is not None
        mine, own = variant[site][real], capture.read(LAYER, site)[real]
        assert not torch.equal(mine, own)
        assert 0.8 < distance(mine, twin[real]) / distance(own, twin[real]) < 1.5


def test_halves_are_rounded_before_they_are_added(
    toy: Path, weights: Mapping[str, torch.Tensor], capture: Capture
) -> None:
    variant = run(VARIANTS["halves"], toy, weights, capture)
    context, projection = variant[Site.ATTN_CONTEXT], weights["self_attn.o_proj.weight"]
    half = context.shape[-1] // 2
    parts = [
        (context[..., part] @ projection[:, part].T).bfloat16()
        for part in (slice(0, half), slice(half, None))
    ]
    assert torch.equal(variant[Site.ATTN_DELTA], parts[0] + parts[1])


def test_variant_goes_on_with_the_choice_it_is_given(
    toy: Path, weights: Mapping[str, torch.Tensor], capture: Capture
) -> None:
    golden = capture.read(LAYER, Site.ROUTER_EXPERTS)
    other = run(VARIANTS["eager"], toy, weights, capture, router_experts=(golden + 1) % 32)
    own = run(VARIANTS["eager"], toy, weights, capture)
    real = capture.read_attention_mask().bool()
    # Its own choice is told, whatever it went on with.
    assert torch.equal(other[Site.ROUTER_EXPERTS], own[Site.ROUTER_EXPERTS])
    assert distance(other[Site.MOE_DELTA][real], own[Site.MOE_DELTA][real]) > 0.5


def test_experts_are_added_up_in_the_dtype_of_the_states() -> None:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).bfloat16()

    weights = {
        expert_weight(number, name): draw(16, 8) if name != EXPERT_DOWN else draw(8, 16)
        for number in range(3)
        for name in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)
    }
    states = draw(5, 8)
    experts = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2], [1, 0]])
    shares = torch.rand(5, 2, generator=generator)

    def one(number: int, token: int, share: torch.Tensor, columns: slice) -> torch.Tensor:
        gate, up, down = (
            weights[expert_weight(number, name)] for name in (EXPERT_GATE, EXPERT_UP, EXPERT_DOWN)
        )
        inner = torch.nn.functional.silu(states[token : token + 1] @ gate.T) * (
            states[token : token + 1] @ up.T
        )
        return ((inner[:, columns] @ down[:, columns].T) * share).bfloat16()[0]

    for num_parts, columns in ((1, [slice(None)]), (2, [slice(0, 8), slice(8, None)])):
        found = add_experts(weights, states, experts, shares, num_parts=num_parts)
        for token in range(5):
            order = experts[token].argsort().tolist()
            parts = [
                sum(
                    (one(int(experts[token, k]), token, shares[token, k], part) for k in order),
                    torch.zeros(8, dtype=torch.bfloat16),
                )
                for part in columns
            ]
            expected = parts[0] if num_parts == 1 else parts[0] + parts[1]
            # Products of one row and of several may sum in another order: a step of BF16.
            torch.testing.assert_close(found[token], expected, rtol=2**-6, atol=2**-7)


def test_a_golden_needs_no_variant_that_it_is_itself() -> None:
    assert variants_beside(attn_implementation="sdpa", experts_implementation="grouped_mm") == (
        "eager",
        "halves",
    )
    assert variants_beside(attn_implementation="sdpa", experts_implementation="eager") == ("eager", "halves")
    assert variants_beside(attn_implementation="eager", experts_implementation="eager") == ("halves",)
