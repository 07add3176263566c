"""The cache of a whole port, judged against the keys and values of its layer: right ones, other forms, and mistakes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.model_runs.cache import CacheJudgement, judge_cache
from compare.model_runs.passes import split_passes
from compare.sides.sides import Sides
from minimax_tools.capture.passes import CacheChange, CachePair
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from minimax_tools.reference.float32_stages import split_heads
from minimax_tools.results.results import ModelFinding

LAYER = 1
HEAD_DIM = 64
# Of prompts of 48 and 33 tokens.
DECODED = torch.zeros(2, 48, dtype=torch.bool)
DECODED[0, 46:] = DECODED[1, 31:33] = True
LAST = torch.zeros(2, 48, dtype=torch.bool)
LAST[0, 47] = LAST[1, 32] = True
ALL = torch.ones(2, 48, dtype=torch.bool)

Edit = Callable[[torch.Tensor], torch.Tensor]
JudgeCache = Callable[..., CacheJudgement]


def pair_of(capture: Capture, layer: int) -> CachePair:
    """Right keys and values, [B,K,S,D] each."""
    return capture.read(layer, Site.K_ROPE), split_heads(capture.read(layer, Site.V_PROJ), HEAD_DIM)


def at(tokens: torch.Tensor, edit: Edit) -> Edit:
    """Edits the entries of some tokens, bool [B,S], alone."""
    return lambda part: torch.where(tokens[:, None, :, None], edit(part), part)


@pytest.fixture
def judge_port(golden: Path, write_port: Callable[..., Sides]) -> JudgeCache:
    """Judges a port whose layers are the golden's, and whose cache of one layer is `keys` and `values` edited."""
    source = Capture.open(golden)

    def judge(
        edit: Edit | CachePair = torch.clone,
        *,
        keys: Edit = torch.clone,
        is_decoding_wrong: bool = False,
        shown: tuple[Site, ...] = (Site.K_NORM, Site.K_ROPE, Site.V_PROJ),
        is_cached: bool = True,
        reference: Capture | None = None,
        own: Edit = torch.clone,
        **passes: Any,
    ) -> CacheJudgement:
        pairs: dict[int, CachePair | None] = {layer: pair_of(source, layer) for layer in (0, LAYER, 2)}
        right = pair_of(source, LAYER)
        edited = edit if isinstance(edit, tuple) else (edit(keys(right[0])), edit(right[1]))
        pairs[LAYER] = edited if is_cached else None
        sides = write_port(
            {
                layer: ({site: own(source.read(layer, site)) for site in (*shown, Site.OUTPUT)}, pair)
                for layer, pair in pairs.items()
            },
            **passes,
        )
        sides = replace(sides, reference=reference or source)
        split = split_passes(sides)
        assert split is not None
        return judge_cache(sides, LAYER, split=split, is_decoding_wrong=is_decoding_wrong)

    return judge


def only(judgement: CacheJudgement) -> ModelFinding:
    (finding,) = judgement.findings
    assert (finding.layer, finding.sites, judgement.note) == (LAYER, ("cache",), "")
    return finding


def noisy(share: float) -> Edit:
    generator = torch.Generator().manual_seed(0)
    return lambda part: (part + share * part.float() * torch.randn(part.shape, generator=generator)).to(
        part.dtype
    )


HIDDEN_PORT = (Site.K_NORM,)


def test_right_cache_is_no_finding_whatever_its_dtype_and_padding(judge_port: JudgeCache) -> None:
    padding = ALL.clone()
    padding[0], padding[1, :33] = False, False
    assert judge_port(is_decoding_wrong=True) == CacheJudgement()
    assert judge_port(torch.Tensor.float, shown=HIDDEN_PORT) == CacheJudgement()
    assert judge_port(at(padding, lambda part: part + 9), is_decoding_wrong=True) == CacheJudgement()
    # What was not read is not judged.
    assert judge_port(is_decoding_wrong=True, is_cached=False) == CacheJudgement()


def test_other_shape_is_noted(judge_port: JudgeCache) -> None:
    judgement = judge_port(lambda part: part[:, :, :40])
    assert judgement.findings == ()
    assert judgement.note == "its shape [2, 2, 40, 64] is not that of the keys, [2, 2, 48, 64]"


def test_entries_that_a_step_did_not_write_are_named_from_that_step_on(judge_port: JudgeCache) -> None:
    finding = only(judge_port(at(LAST, torch.zeros_like)))
    assert (finding.number, finding.mistake, dict(finding.parameters)) == (2, "cache_not_written", {})
    start = "from decode step 2 on the cached keys and values of kv heads 0, 1 are off by "
    assert finding.reason.startswith(start)
    # In BF16, keys and values have an error of about 1.7e-3.
    assert 300 < float(finding.reason.removeprefix(start).split()[0]) < 1200
    assert finding.reason.endswith(
        " times the noise at 2 tokens (row 0, token 47; row 1, token 32); the port's own keys and values are other "
        "ones: the cache is wrong, not the projections"
    )


def test_entries_of_all_steps_are_told_from_the_first_on(judge_port: JudgeCache) -> None:
    finding = only(judge_port(at(DECODED, torch.zeros_like), shown=HIDDEN_PORT))
    assert finding.number == 1
    assert "at 4 tokens (row 0, tokens 46-47; row 1, tokens 31-32)" in finding.reason
    # It does not show keys and values of its own.
    assert "the projections" not in finding.reason


def test_steps_that_are_only_wrong_together_are_told_from_the_first_on(judge_port: JudgeCache) -> None:
    steps = torch.zeros(2, 48, dtype=torch.bool)
    steps[0, 44:] = steps[1, 29:33] = True
    finding = only(judge_port(keys=at(steps, noisy(0.0039)), num_decoded=4, is_decoding_wrong=True))
    assert finding.number == 1
    assert "at 8 tokens (row 0, tokens 44-47; row 1, tokens 29-32)" in finding.reason
    # With more noise, the second step is wrong by itself.
    alone = only(judge_port(keys=at(steps, noisy(0.0045)), num_decoded=4, is_decoding_wrong=True))
    assert alone.number == 2
    assert "(row 0, tokens 45-46; row 1, tokens 30-31)" in alone.reason


def test_golden_without_its_twin_judges_too(judge_port: JudgeCache, copyist: Any, golden: Path) -> None:
    reference = Capture.open(copyist.golden(noise_floor="stats"))
    finding = only(judge_port(at(LAST, torch.zeros_like), reference=reference))
    assert (finding.number, finding.mistake) == (2, "cache_not_written")
    # Nothing tells the noise: a ten-thousandth of the size of keys, and of values, is taken.
    keys, values = pair_of(Capture.open(golden), LAYER)
    for pair, kind in (((keys * 2, values), "keys"), ((keys, values * 2), "values")):
        finding = only(judge_port(pair, reference=reference, is_decoding_wrong=True))
        assert (
            f"from the prefill on the cached {kind} of kv heads 0, 1 are off by 1e+04 times" in finding.reason
        )


def test_content_is_named_by_the_ports_own_keys_and_values(judge_port: JudgeCache, golden: Path) -> None:
    keys, values = (part * 1.5 for part in pair_of(Capture.open(golden), LAYER))
    exchanged = keys[:, [1, 0]], values[:, [1, 0]]
    finding = only(judge_port(exchanged, own=lambda part: part * 1.5, is_decoding_wrong=True))
    assert (finding.mistake, dict(finding.parameters)) == ("cache_heads_exchanged", {"order": "1, 0"})


@pytest.mark.parametrize(("shares", "heads"), [((0.0, 0.5), "1"), ((0.4, 0.8), "0, 1")])
def test_heads_with_a_third_of_the_error_are_named(judge_port: JudgeCache, shares: Any, heads: str) -> None:
    def wrong(keys: torch.Tensor) -> torch.Tensor:
        return torch.stack([noisy(share)(keys)[:, head] for head, share in enumerate(shares)], dim=1)

    finding = only(judge_port(keys=at(DECODED, wrong)))
    assert (finding.mistake, finding.look_at) == (None, "how the cache is written and read")
    assert f"on the cached keys of kv heads {heads} are off" in finding.reason


class TestAllPassesAlike:
    def test_unknown_form_is_noted_where_decoding_is_right(self, judge_port: JudgeCache) -> None:
        judgement = judge_port(noisy(0.5))
        assert judgement.findings == ()
        assert judgement.note == "it is kept in a form that mm2 does not know; decoding from it is right"
        finding = only(judge_port(noisy(0.5), is_decoding_wrong=True))
        assert (finding.number, finding.mistake) == (0, None)
        assert finding.reason.startswith("from the prefill on the cached keys and values")
        assert "at 81 tokens (row 0, tokens 0-47; row 1, tokens 0-32)" in finding.reason

    @pytest.mark.parametrize("shown", [HIDDEN_PORT, (Site.K_NORM, Site.K_ROPE, Site.V_PROJ)])
    def test_content_of_another_layer_is_named_and_keys_before_rotary_embedding_are_a_form(
        self, judge_port: JudgeCache, golden: Path, shown: tuple[Site, ...]
    ) -> None:
        source = Capture.open(golden)
        finding = only(judge_port(pair_of(source, 2), is_decoding_wrong=True, shown=shown))
        assert (finding.mistake, dict(finding.parameters)) == ("cache_of_another_layer", {"layer": 2})
        unrotated = split_heads(source.read(LAYER, Site.K_NORM), HEAD_DIM)
        judgement = judge_port(keys=lambda _: unrotated, is_decoding_wrong=True, shown=shown)
        assert judgement == CacheJudgement(note="it holds keys before rotary embedding")

    def test_fewer_bits_with_scales_are_a_form(self, judge_port: JudgeCache) -> None:
        def scaled(part: torch.Tensor) -> torch.Tensor:
            scale = part.float().abs().amax(-1, keepdim=True) / 448
            return (part / scale).to(torch.float8_e4m3fn).float() * scale

        judgement = judge_port(scaled, is_decoding_wrong=True)
        assert (judgement.findings, judgement.holds_fewer_bits) == ((), True)
        assert judgement.note == "it holds keys and values in fewer bits, with scales"


def change(number: int, layer: int = LAYER) -> CacheChange:
    return CacheChange(
        layer=layer, number=number, kind="values", heads=(0, 1), places=((1, 4), (1, 5)), num_tokens=7
    )


class TestSteps:
    def test_first_pass_that_changed_earlier_entries_is_told(self, judge_port: JudgeCache) -> None:
        finding = only(judge_port(cache_changes=(change(1, layer=0), change(2), change(1))))
        assert (finding.number, finding.mistake) == (1, "cache_overwritten")
        assert finding.reason == (
            "decode step 1 changed the cached values of 7 earlier tokens (row 1, token 4, row 1, token 5) in kv heads "
            "0, 1"
        )
        assert judge_port(cache_changes=(change(2, layer=0),)) == CacheJudgement()

    def test_changes_are_told_beside_wrong_content(self, judge_port: JudgeCache) -> None:
        found = judge_port(at(LAST, torch.zeros_like), cache_changes=(change(1),)).findings
        assert [finding.mistake for finding in found] == ["cache_not_written", "cache_overwritten"]

    @pytest.mark.parametrize(("shift", "side"), [(1, "behind"), (-1, "before")])
    def test_writing_one_entry_off_is_told(self, judge_port: JudgeCache, shift: int, side: str) -> None:
        told = {"cache_shift": shift, "cache_form": "by position"}
        # A step that writes beside its entry overwrites others: that is no second finding.
        finding = only(judge_port(is_decoding_wrong=True, cache_changes=(change(1),), **told))
        assert (finding.number, finding.mistake) == (1, "cache_one_row_off")
        assert dict(finding.parameters) == {"by": shift}
        assert f"1 entry {side} their token's own (by position), and what they read" in finding.reason
        assert judge_port(**told) == CacheJudgement()

    def test_padding_of_a_bucket_is_no_shift(self, judge_port: JudgeCache) -> None:
        for shift in (0, 2, -2):
            assert judge_port(is_decoding_wrong=True, cache_shift=shift) == CacheJudgement()
