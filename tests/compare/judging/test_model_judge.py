"""Sites outside the layers, and generated tokens, on a golden and a port that are a few tensors in memory."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.judging.model_judge import ModelJudge
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.rows import Rows, square_difference
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import Continuation, Generation, Likely
from minimax_tools.capture.source import CaptureSource
from minimax_tools.metrics.noise_floor import (
    error_name,
    massive_error_name,
    ordinary_error_name,
    variant_name,
)
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import SiteStatus

LAYER, WORDS, HIDDEN = 5, 200, 48
MASK = torch.tensor([[1] * 12, [1] * 9 + [0] * 3])
REAL = MASK.bool()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TWIN = {
    ModelSite.FINAL_NORM: random(2, 12, HIDDEN, seed=1),
    ModelSite.LOGITS: 3.0 * random(2, 12, WORDS, seed=2),
}
EMBEDDING, OUTPUT = random(2, 12, HIDDEN, seed=3).bfloat16(), random(2, 12, HIDDEN, seed=4).bfloat16()


def rounded(seed: int) -> dict[ModelSite, torch.Tensor]:
    """Return a right implementation's values: rounding errors of its own."""
    norm, logits = TWIN[ModelSite.FINAL_NORM], TWIN[ModelSite.LOGITS]
    return {
        ModelSite.EMBEDDING: EMBEDDING,
        ModelSite.FINAL_NORM: (norm * (1.0 + 2e-3 * random(*norm.shape, seed=seed))).bfloat16(),
        ModelSite.LOGITS: logits + 0.02 * random(*logits.shape, seed=seed + 1),
    }


GOLDEN, PORT = rounded(10), rounded(20)


def statistics(site: ModelSite, values: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return the norms of a site's errors; no channel is massive."""
    norms = (values.float() - TWIN[site]).norm(dim=-1)
    zeros = torch.zeros_like(norms)
    return {error_name(site): norms, ordinary_error_name(site): norms, massive_error_name(site): zeros}


FLOOR = {name: norms for site in TWIN for name, norms in statistics(site, GOLDEN[site]).items()}


class ModelCapture(CaptureSource):
    """A capture of the sites outside the layers, and of the output of its last layer, in memory."""

    def __init__(self, tensors: Mapping[ModelSite, torch.Tensor], **kept: Any) -> None:
        """`kept`: twin, floor, output, generation, held tokens, is_whole, and what its description says."""
        self.directory = Path("memory")
        self._tensors, self._kept = tensors, {"output": OUTPUT, **kept}

    @property
    def known_description(self) -> Any:
        if not {"variants", "dtypes"} & set(self._kept):
            return None
        dtypes = self._kept.get("dtypes", {})
        provenance = SimpleNamespace(dtypes=dtypes, backend="cpu", model_config={})
        return SimpleNamespace(floor_variants=self._kept.get("variants", ()), provenance=provenance)

    @property
    def layers(self) -> tuple[int, ...]:
        return (LAYER,)

    def sites(self, layer: int) -> tuple[Site, ...]:
        return () if self._kept["output"] is None or layer != LAYER else (Site.OUTPUT,)

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(self._tensors)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        output: torch.Tensor = self._kept["output"]
        return self._tensors[site] if isinstance(site, ModelSite) else output

    def read_attention_mask(self) -> torch.Tensor:
        return MASK

    def read_twin(self, layer: int | None, site: Any) -> torch.Tensor | None:
        twin: torch.Tensor | None = self._kept.get("twin", {}).get(site)
        return twin

    def read_floor(self, layer: int | None, name: str) -> torch.Tensor | None:
        norms: torch.Tensor | None = self._kept.get("floor", {}).get(name)
        return norms

    def read_generation(self) -> Generation | None:
        return self._kept.get("generation")

    def read_passes(self) -> Any:
        return SimpleNamespace() if self._kept.get("is_whole") else None

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        return self._kept.get("held") if site is ModelSite.LOGITS else None


def judge_of(
    port: Mapping[ModelSite, torch.Tensor] = PORT,
    *,
    golden: Mapping[ModelSite, torch.Tensor] = GOLDEN,
    floor: str = "full",
    criteria: str = "noise",
    reference: Mapping[str, Any] | None = None,
    **target: Any,
) -> ModelJudge:
    kept: dict[str, Any] = {"full": {"twin": TWIN, "floor": FLOOR}, "stats": {"floor": FLOOR}, "off": {}}[
        floor
    ]
    sides = Sides(
        reference=ModelCapture(golden, **{**kept, **(reference or {})}),
        target=ModelCapture(port, **{"variants": (), **target}),
        batch=Batch(MASK),
        criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )
    return ModelJudge(sides, last_layer=LAYER)


def changed(site: ModelSite, values: torch.Tensor) -> dict[ModelSite, torch.Tensor]:
    return {**PORT, site: values}


def without(tensors: Mapping[ModelSite, torch.Tensor], site: ModelSite) -> dict[ModelSite, torch.Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name is not site}


def rows_of(judge: ModelJudge, site: ModelSite = ModelSite.FINAL_NORM) -> Rows:
    rows = judge.judged_rows(site)
    assert rows is not None
    return rows


@pytest.mark.parametrize("floor", ["full", "stats", "off"])
@pytest.mark.parametrize("site", [*PORT])
def test_right_port_passes_and_a_wrong_one_fails(site: ModelSite, floor: str) -> None:
    found = judge_of(floor=floor).judge(site)
    assert (found.status, found.layer, found.site) == (SiteStatus.PASS, None, str(site))
    assert found.num_judged == 21
    assert (found.logits is not None) == (site is ModelSite.LOGITS)
    wrong = judge_of(changed(site, 1.2 * PORT[site]), floor=floor).judge(site)
    assert wrong.status is SiteStatus.FAIL


@pytest.mark.parametrize("site", [*PORT])
def test_what_a_side_lacks_is_said(site: ModelSite) -> None:
    missing = "missing: the run declared it and did not store it"
    for judge, status, reason in (
        (judge_of(without(PORT, site)), SiteStatus.FAIL, missing),
        (judge_of(without(PORT, site), is_whole=True), SiteStatus.NOT_EXPOSED, "the port does not expose it"),
        (
            judge_of(golden=without(GOLDEN, site)),
            SiteStatus.NOT_CAPTURED,
            "the golden was captured without it",
        ),
        (judge_of(changed(site, PORT[site][..., :-1])), SiteStatus.FAIL, "shape: expected"),
    ):
        found = judge.judge(site)
        assert (found.status, found.reason[: len(reason)]) == (status, reason)
        assert judge.judged_rows(site) is None


def test_rows_are_the_real_tokens_with_their_floor() -> None:
    rows = rows_of(judge_of())
    for found, side in ((rows.reference, GOLDEN), (rows.target, PORT), (rows.twin, TWIN)):
        assert found is not None
        assert torch.equal(found, side[ModelSite.FINAL_NORM][REAL])
    assert torch.equal(rows.places, REAL.nonzero())
    assert rows.twin is not None
    measured = square_difference(rows.twin, rows.reference, massive=rows.massive)
    stats = rows_of(judge_of(floor="stats"))
    assert rows.floor is not None
    assert stats.floor is not None
    assert torch.equal(rows.floor.whole, measured.whole)
    assert torch.allclose(stats.floor.whole, measured.whole, rtol=1e-4)
    assert (rows.widened_floor, rows.input_error, stats.twin) == (None, None, None)
    assert not rows_of(judge_of(floor="off")).has_floor


def test_embedding_is_its_own_twin_in_any_dtype() -> None:
    rows = rows_of(judge_of(floor="off"), ModelSite.EMBEDDING)
    assert (rows.twin is rows.reference, rows.floor) == (True, None)
    nudged = EMBEDDING.clone()
    nudged[0, 0, 0] *= 1.01
    for shown, status in (
        (EMBEDDING.float(), SiteStatus.PASS),
        (nudged, SiteStatus.FAIL),
        (nudged.float(), SiteStatus.FAIL),
    ):
        assert judge_of(changed(ModelSite.EMBEDDING, shown)).judge(ModelSite.EMBEDDING).status is status


def test_variants_widen_the_floor_by_the_largest() -> None:
    own = statistics(ModelSite.FINAL_NORM, GOLDEN[ModelSite.FINAL_NORM])
    floor = {**FLOOR, **{variant_name("one", name): 2.0 * norms for name, norms in own.items()}}
    floor |= {variant_name("other", name): norms * 3.0 for name, norms in own.items()}
    judge = judge_of(reference={"floor": floor, "variants": ("one", "other")})
    rows = rows_of(judge)
    assert rows.floor is not None
    assert rows.widened_floor is not None
    assert torch.allclose(rows.widened_floor.whole, 9.0 * rows.floor.whole, rtol=1e-4)
    assert rows_of(judge, ModelSite.LOGITS).widened_floor is None


def test_head_inherits_the_error_of_the_last_layer() -> None:
    judge = judge_of(output=1.1 * OUTPUT)
    error = rows_of(judge).input_error
    assert error is not None
    assert error.overall == pytest.approx(0.1, rel=0.05)
    assert rows_of(judge, ModelSite.EMBEDDING).input_error is None
    assert rows_of(judge_of(output=None)).input_error is None


def at(*places: tuple[int, int]) -> torch.Tensor:
    """The tokens that are held, bool [B,S]."""
    held = torch.zeros(2, 12, dtype=torch.bool)
    for place in places:
        held[place] = True
    return held


def test_tokens_that_both_sides_hold_are_judged() -> None:
    last, first = at((0, 11), (1, 8)), at((0, 0), (1, 0))
    for options in ({"held": last}, {"reference": {"held": last}}):
        assert rows_of(judge_of(**options), ModelSite.LOGITS).places.tolist() == [[0, 11], [1, 8]]
    judge = judge_of(held=last | first, reference={"held": last})
    assert judge.judge(ModelSite.LOGITS).num_judged == 2
    assert judge.judge(ModelSite.FINAL_NORM).num_judged == 21
    found = judge_of(held=first, reference={"held": last}).judge(ModelSite.LOGITS)
    assert found.status is SiteStatus.NOT_JUDGED
    assert found.reason == "the sides hold it of no token in common"


class TestTokens:
    """A likeliest token that noise does not explain, in logits whose error is otherwise as usual."""

    @staticmethod
    def port(size: float = 60.0) -> dict[ModelSite, torch.Tensor]:
        logits = PORT[ModelSite.LOGITS].clone()
        logits[0, 3, 7] = size
        return changed(ModelSite.LOGITS, logits)

    def test_it_fails_the_logits_with_its_place(self) -> None:
        found = judge_of(self.port(), floor="off").judge(ModelSite.LOGITS)
        assert found.status is SiteStatus.FAIL
        assert found.logits is not None
        assert found.logits.num_unexplained == 1
        assert "the worst at row 0, token 3: 7 for" in found.reason
        # Beside another reason, both are told.
        both = judge_of(changed(ModelSite.LOGITS, 1.5 * self.port()[ModelSite.LOGITS]))
        found = both.judge(ModelSite.LOGITS)
        assert found.status is SiteStatus.FAIL
        assert "the noise floor" in found.reason
        assert "; 1 of 21 likeliest tokens are others beyond noise" in found.reason

    def test_classic_limits_do_not_judge_it_and_nan_fails_without_distributions(self) -> None:
        found = judge_of(self.port(), criteria="classic").judge(ModelSite.LOGITS)
        assert (found.status, found.logits is None) == (SiteStatus.NOT_JUDGED, False)
        found = judge_of(self.port(float("nan"))).judge(ModelSite.LOGITS)
        assert (found.status, found.logits) == (SiteStatus.FAIL, None)


def test_usual_error_is_that_of_the_goldens_dtype() -> None:
    limits = judge_of()._sides.criteria.noise
    assert judge_of().usual_error == limits.floorless(ModelSite.LOGITS, "relative_l2").usual
    float32 = judge_of(reference={"dtypes": {"weights": "float32"}})
    assert float32.usual_error == limits.float32


class TestGenerated:
    @staticmethod
    def generation(*first: int, keeps: bool = False) -> Generation:
        kept = ((Likely(token=first[0], behind=0.0), Likely(token=1, behind=9.0)),) if keeps else ()
        rows = tuple(
            Continuation(prompt_ids=(1, 2), generated_ids=(token,), text=None, likeliest=kept)
            for token in first
        )
        return Generation(rows=rows, sampling={"do_sample": False})

    BEST = tuple(int(GOLDEN[ModelSite.LOGITS][row, last].argmax()) for row, last in ((0, 11), (1, 8)))

    def test_without_a_side_there_is_none(self) -> None:
        assert judge_of().judge_generated() == ()
        assert judge_of(generation=self.generation(1, 2)).judge_generated() == ()
        assert judge_of(reference={"generation": self.generation(1, 2)}).judge_generated() == ()

    def test_first_token_is_held_against_the_logits_behind_its_prompt(self) -> None:
        own = self.generation(*self.BEST)
        right = judge_of(generation=own, reference={"generation": own}).judge_generated()
        assert [row.status for row in right] == [SiteStatus.PASS] * 2
        worst = int(GOLDEN[ModelSite.LOGITS][1, 8].argmin())
        wrong = self.generation(self.BEST[0], worst)
        found = judge_of(generation=wrong, reference={"generation": own}).judge_generated()
        assert [row.status for row in found] == [SiteStatus.PASS, SiteStatus.FAIL]
        assert found[1].margin is not None
        assert found[1].reach is not None
        values = GOLDEN[ModelSite.LOGITS][1, 8].float()
        assert found[1].margin == pytest.approx(float(values.max() - values.min()))

    def test_logits_that_one_prompt_lacks_choose_no_first_token(self) -> None:
        own = self.generation(*self.BEST)
        other = self.generation(self.BEST[0] + 1, self.BEST[1])
        options: dict[str, Any] = {"generation": other, "reference": {"generation": own}}
        assert judge_of(**options).judge_generated()[0].status is SiteStatus.FAIL
        nowhere = torch.full_like(PORT[ModelSite.LOGITS], torch.nan)
        judge = judge_of(changed(ModelSite.LOGITS, nowhere), **options)
        assert judge.read_logits() is None
        row = judge.judge_generated()[0]
        assert (row.status, row.reach) == (SiteStatus.NOT_JUDGED, None)
        for lacking in (
            judge_of(without(PORT, ModelSite.LOGITS), **options),
            judge_of(golden=without(GOLDEN, ModelSite.LOGITS), **options),
            judge_of(changed(ModelSite.LOGITS, PORT[ModelSite.LOGITS][..., :-1]), **options),
        ):
            assert lacking.read_logits() is None


def test_logits_are_read_of_both_sides() -> None:
    rows = judge_of().read_logits()
    assert rows is not None
    assert torch.equal(rows.target, PORT[ModelSite.LOGITS][REAL])
    assert rows.num_tokens == 21
