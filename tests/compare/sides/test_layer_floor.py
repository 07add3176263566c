"""A layer's stored floor: what is read of it, and when it is refused."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.noise.rows import Squares
from compare.sides.layer_floor import LayerFloor, read_squares
from compare.sides.sides import Batch
from minimax_tools.errors import CaptureError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site

MASK = torch.tensor([[1, 1, 0]])
SITE = Site.Q_PROJ
# Norms over ordinary and massive channels, and over all; the last token is padding.
PARTS = {
    "q_proj.error_ordinary": torch.tensor([[3.0, 6.0, 99.0]]),
    "q_proj.error_massive": torch.tensor([[4.0, 8.0, 99.0]]),
    "q_proj.error": torch.tensor([[5.0, 10.0, 99.0]]),
}


@dataclass
class Golden:
    """A golden of one layer, 7, which keeps some statistics."""

    floor: Mapping[str, torch.Tensor]
    variants: tuple[str, ...] = ()
    values: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    twins: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    l2: float | None = 1.0
    dtype: str = "bfloat16"
    directory: Path = Path("golden")
    graph: ModelGraph = field(default_factory=ModelGraph)

    @property
    def known_description(self) -> Any:
        provenance = SimpleNamespace(dtypes={"weights": self.dtype})
        return SimpleNamespace(floor_variants=self.variants, provenance=provenance)

    def read_floor(self, layer: int, name: str) -> torch.Tensor | None:
        return self.floor.get(name) if layer == 7 else None

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        return self.twins.get(site) if layer == 7 else None

    def read(self, layer: int, site: Site) -> torch.Tensor:
        assert layer == 7
        return self.values[site]

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(self.values) if layer == 7 else ()

    def entry(self, layer: int, site: Site) -> Any:
        return SimpleNamespace(statistics=SimpleNamespace(l2=self.l2))


def floor_of(golden: Golden) -> LayerFloor:
    reference: Any = golden
    return LayerFloor(reference, Batch(MASK), layer=7)


def of_variant(name: str, factor: float) -> dict[str, torch.Tensor]:
    return {f"{name}/{key}": factor * values for key, values in PARTS.items()}


def squares_of(golden: Golden) -> list[list[float]] | None:
    squares = floor_of(golden).squares(SITE)
    return None if squares is None else [squares.ordinary.tolist(), squares.massive.tolist()]


def without(name: str) -> Golden:
    return Golden({key: values for key, values in PARTS.items() if key != name})


class TestSquares:
    def test_real_tokens_alone_are_squared(self) -> None:
        assert squares_of(Golden(PARTS)) == [[9.0, 36.0], [16.0, 64.0]]

    def test_part_that_is_missing_is_none(self) -> None:
        assert squares_of(without("q_proj.error_ordinary")) is None
        assert squares_of(without("q_proj.error_massive")) is None
        assert squares_of(without("q_proj.error")) is not None
        assert read_squares(SITE, lambda _: None) is None

    def test_parts_that_do_not_add_up_are_refused(self) -> None:
        sentence = r"q_proj\.error_massive do not add up to q_proj\.error at q_proj of layer 7"
        assert squares_of(Golden(PARTS | {"q_proj.error": 1.0009 * PARTS["q_proj.error"]})) is not None
        for factor in (1.0011, 0.9989):
            with pytest.raises(CaptureError, match=sentence):
                squares_of(Golden(PARTS | {"q_proj.error": factor * PARTS["q_proj.error"]}))

    def test_floor_of_zeros_is_refused_unless_the_values_are_zero_or_float32(self) -> None:
        zeros = {name: torch.zeros(1, 3) for name in PARTS}
        words = r"layer_7\.floor\.safetensors says that BF16 cost nothing at q_proj"
        with pytest.raises(CaptureError, match=words):
            squares_of(Golden(zeros))
        one = {name: torch.tensor([[0.0, 1.0 if "massive" not in name else 0.0, 0.0]]) for name in PARTS}
        for golden in (
            Golden(zeros, l2=0.0),
            Golden(zeros, l2=None),
            Golden(zeros, dtype="float32"),
            Golden(one),
        ):
            assert squares_of(golden) is not None


class TestVariants:
    def test_largest_of_golden_and_variants_counts(self) -> None:
        golden = Golden(PARTS | of_variant("a", 0.5) | of_variant("b", 2.0), variants=("a", "b"))
        floor = floor_of(golden)
        largest = floor.largest("q_proj.error")
        assert largest is not None
        assert largest.tolist() == [10.0, 20.0]
        widened = floor.widened_squares(SITE)
        assert widened is not None
        assert (widened.ordinary.tolist(), widened.massive.tolist()) == ([36.0, 144.0], [64.0, 256.0])
        smaller = floor_of(Golden(PARTS | of_variant("a", 0.5), variants=("a",))).largest("q_proj.error")
        assert smaller is not None
        assert smaller.tolist() == [5.0, 10.0]

    def test_golden_without_variants_is_not_widened(self) -> None:
        floor = floor_of(Golden(PARTS))
        assert floor.widened_squares(SITE) is None
        assert floor.variant_averages(SITE) is None
        assert floor.largest("nothing") is None

    def test_variant_of_which_nothing_is_kept_or_whose_parts_do_not_add_up_is_refused(self) -> None:
        with pytest.raises(CaptureError, match=r"no q_proj\.error of variant a of layer 7"):
            floor_of(Golden(PARTS, variants=("a",))).largest("q_proj.error")
        wrong = of_variant("b", 1.0) | {"b/q_proj.error": torch.tensor([[5.0, 11.0, 99.0]])}
        golden = Golden(PARTS | of_variant("a", 1.0) | wrong, variants=("a", "b"))
        with pytest.raises(CaptureError, match="of variant b do not add up"):
            floor_of(golden).widened_squares(SITE)

    def test_averages_are_the_largest_of_the_variants_and_at_least_1(self) -> None:
        figures = {
            "a/q_proj.structure": torch.tensor([0.5, 2.0, 0.9]),
            "b/q_proj.structure": torch.tensor([0.8, 1.5, 3.0]),
        }
        golden = Golden(figures, variants=("a", "b", "c"))
        assert floor_of(golden).variant_averages(SITE) == (1.0, 2.0, 3.0)


class TestProof:
    # Squares of 5 and of 10, in ordinary and massive channels.
    MEASURED = Squares(
        ordinary=torch.tensor([25.0, 36.0], dtype=torch.float64),
        massive=torch.tensor([0.0, 64.0], dtype=torch.float64),
    )

    def test_other_distances_and_none_are_refused(self) -> None:
        off = PARTS | {"q_proj.error": torch.tensor([[5.0, 10.1, 99.0]])}
        with pytest.raises(CaptureError, match="not as far apart as"):
            floor_of(Golden(off)).prove(SITE, self.MEASURED)
        with pytest.raises(CaptureError, match=r"layer_7\.floor\.safetensors holds no q_proj\.error"):
            floor_of(Golden({})).prove(SITE, self.MEASURED)

    def test_distances_that_agree_pass_and_tokens_of_nan_are_left_out(self) -> None:
        floor = floor_of(Golden(PARTS))
        floor.prove(SITE, self.MEASURED)
        ordinary = torch.tensor([torch.nan, 36.0], dtype=torch.float64)
        floor.prove(SITE, replace(self.MEASURED, ordinary=ordinary))
        with pytest.raises(CaptureError, match="not as far apart as"):
            floor.prove(SITE, replace(self.MEASURED, ordinary=ordinary + 1.0))


class TestRouter:
    """Router of 12 experts, of which 2 are chosen: 6 scores compete, and their largest error is the noise."""

    NUM_EXPERTS = 12
    LOGITS = torch.zeros(1, 3, NUM_EXPERTS)
    CHOICE = torch.tensor([[[0, 1], [2, 3], [0, 0]]])

    def golden(
        self,
        *,
        noise: float = 0.06,
        margin: float = 9.0,
        choice: torch.Tensor | None = None,
        lacks: frozenset[str] = frozenset(),
    ) -> Golden:
        # Errors of the scores are 0.01 to 0.12.
        twin = (0.5 - 0.01 * torch.arange(1, self.NUM_EXPERTS + 1)).logit().expand(1, 3, -1)
        values = {
            Site.ROUTER_LOGITS: self.LOGITS,
            Site.ROUTER_EXPERTS: self.CHOICE if choice is None else choice,
        }
        twins = {Site.ROUTER_LOGITS: twin, Site.ROUTER_EXPERTS: self.CHOICE}
        floor = {
            "router_noise": torch.tensor([[noise, noise, 99.0]]),
            "router_margin": torch.tensor([[margin, margin, 0.0]]),
        }
        return Golden(
            {name: tensor for name, tensor in floor.items() if name not in lacks},
            values={site: tensor for site, tensor in values.items() if str(site) not in lacks},
            twins={site: tensor for site, tensor in twins.items() if f"twin {site}" not in lacks},
        )

    def test_noise_must_be_that_of_six_scores(self) -> None:
        for noise in (0.06, 0.12):
            floor_of(self.golden(noise=noise)).prove_router()
        for noise in (0.0599, 0.1201):
            with pytest.raises(CaptureError, match=r"expected from 0\.06 to 0\.12 at token 0"):
                floor_of(self.golden(noise=noise)).prove_router()

    def test_other_choice_must_be_near(self) -> None:
        other = torch.tensor([[[1, 0], [2, 5], [7, 8]]])
        floor_of(self.golden(margin=0.2399, choice=other)).prove_router()
        with pytest.raises(CaptureError, match=r"expected experts \[2, 3\] at token 1, found \[2, 5\]"):
            floor_of(self.golden(margin=0.2401, choice=other)).prove_router()

    @pytest.mark.parametrize(
        "lacking",
        [
            *("router_noise", "router_margin", "router_logits", "router_experts"),
            *("twin router_logits", "twin router_experts"),
        ],
    )
    def test_golden_that_lacks_a_part_is_not_checked(self, lacking: str) -> None:
        wrong = torch.tensor([[[9, 8], [7, 6], [0, 0]]])
        floor_of(self.golden(noise=9.0, choice=wrong, lacks=frozenset({lacking}))).prove_router()
