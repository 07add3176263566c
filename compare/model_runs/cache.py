"""The cache of a whole port, judged by the right keys and values on the port's own input of the layer.

A right port may keep its cache in a form that mm2 does not know: one that is alike wrong in all passes is a finding
only if decoding is wrong too. B prompts, K kv heads, S columns, D head_dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from compare.catalogue.cache import (
    CACHE_MISTAKES,
    CacheContent,
    holds_scaled_bits,
    is_before_rope,
    noise_of,
    word_places,
)
from compare.catalogue.candidates import NO_PARAMETERS, Parameters
from compare.catalogue.words import Place
from compare.judging.layer_judge import LayerJudge
from compare.model_runs.findings import named_finding
from compare.model_runs.passes import PassSplit
from compare.sides.captured_input import CapturedInput
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.passes import CacheChange, CachePair
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import format_count
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.float32_stages import split_heads
from minimax_tools.results.results import ModelFinding, SiteStatus

CACHE = "cache"
_KINDS = {Site.K_ROPE: "keys", Site.V_PROJ: "values"}
# Entries by which a step may miss its own; a larger distance is the padding of a bucket.
_MOST_SHIFT = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheJudgement:
    """Judgement of one layer's cache."""

    findings: tuple[ModelFinding, ...] = ()
    note: str = ""  # form of a cache that was not judged, or is right in another form; empty if there is none
    # Whether it holds the right keys and values in fewer bits with scales: decoding is then as wrong as these make it
    holds_fewer_bits: bool = False


def judge_cache(
    sides: Sides,
    layer: int,
    *,
    split: PassSplit,
    is_decoding_wrong: bool,
) -> CacheJudgement:
    """Judge the cache of a layer after the prefill and after each step.

    Args:
        sides: Both captures of a whole port's run; the golden has this layer on the port's own input.
        layer: The layer.
        split: The tokens by pass.
        is_decoding_wrong: Whether the layer's decoded tokens are wrong.

    Raises:
        CheckpointError: The weights cannot be read.
    """
    pair = sides.target.read_cache(layer)
    if pair is None:
        return CacheJudgement()
    golden = sides.reference
    right = _read_pair(golden, layer)
    if any(part.shape != expected.shape for part, expected in zip(pair, right, strict=True)):
        return CacheJudgement(
            note=f"its shape {list(pair[0].shape)} is not that of the keys, {list(right[0].shape)}"
        )
    cached = pair[0].float(), pair[1].float()
    own = _own_pair(sides.target, layer, right)
    mask = golden.read_inputs().attention_mask.bool()
    shift = _judge_shift(sides.target, layer, is_decoding_wrong=is_decoding_wrong)
    # Steps that write beside their entries overwrite others: no second finding.
    changes = shift or _judge_changes(sides.target, layer, split)
    if own is not None and _is_cast(pair, own, mask):
        # The port's own keys and values are judged as sites.
        return CacheJudgement(findings=changes)
    wrong = _find_wrong_passes(sides, layer, pair, split)
    if not wrong:
        return CacheJudgement(findings=changes)
    content = CacheContent(
        cached=cached,
        right=right if own is None else own,
        noise=_noise(golden, layer, right, mask),
        tokens=mask,
        others=lambda: _other_pairs(sides.target, layer),
        unrotated=_unrotated(sides.target if own is not None else golden, layer, right),
        real=mask,
    )
    if is_before_rope(content):
        return CacheJudgement(findings=changes, note="it holds keys before rotary embedding")
    num_passes = 1 + len(split.steps)
    is_alike = len(wrong) == num_passes
    in_question = content.at(torch.isin(split.numbers, torch.tensor(list(wrong))) & mask)
    in_question = in_question.at(in_question.wrong_tokens())
    named = next(
        ((name, found) for name, find in CACHE_MISTAKES.items() if (found := find(in_question)) is not None),
        None,
    )
    if named is None and holds_scaled_bits(content):
        return CacheJudgement(
            findings=changes,
            note="it holds keys and values in fewer bits, with scales",
            holds_fewer_bits=True,
        )
    if is_alike and not is_decoding_wrong:
        return CacheJudgement(note="it is kept in a form that mm2 does not know; decoding from it is right")
    number = min(wrong)
    reason = _describe(in_question, wrong, split, is_shown=own is not None)
    if named is None:
        finding = ModelFinding(
            number=number,
            layer=layer,
            sites=(CACHE,),
            reason=reason,
            look_at="how the cache is written and read",
        )
    else:
        mistake, parameters = named
        finding = _of_cache(mistake, number, layer, reason=reason, parameters=parameters)
    return CacheJudgement(findings=(finding, *changes))


class _CachedAsSites(Capture):
    """A port's capture in which a layer's cached keys and values stand for its own, and nothing else is shown."""

    def __init__(self, target: CaptureSource, manifest: Manifest, pair: CachePair) -> None:
        super().__init__(target.directory, manifest)
        self._cached: dict[Site | ModelSite, torch.Tensor] = {
            Site.K_ROPE: pair[0],
            Site.V_PROJ: pair[1].transpose(1, 2).flatten(2),
        }

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the two sites that a cache holds."""
        return (Site.K_ROPE, Site.V_PROJ)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read what the cache holds of a site."""
        return self._cached[site]


def _find_wrong_passes(
    sides: Sides, layer: int, pair: CachePair, split: PassSplit
) -> dict[int, tuple[str, ...]]:
    """Return what is wrong, `keys` or `values`, by pass; steps that are only wrong together count as all steps."""
    target = _CachedAsSites(sides.target, sides.target.manifest, pair)
    # Twice as many figures are judged as without the cache.
    criteria = replace(sides.criteria, num_figures=2 * sides.criteria.num_figures)
    sides = replace(sides, target=target, criteria=criteria)

    def judge(batch: Batch) -> tuple[str, ...]:
        judge_site = LayerJudge(
            replace(sides, batch=batch), layer=layer, layer_input=CapturedInput(known=(Site.INPUT,))
        ).judge
        return tuple(kind for site, kind in _KINDS.items() if judge_site(site).status is SiteStatus.FAIL)

    passes = (split.prefill, *split.steps)
    wrong = {number: kinds for number, batch in enumerate(passes) if (kinds := judge(batch))}
    together = judge(split.decoded) if split.decoded is not None else ()
    if together and not any(number > 0 for number in wrong):
        wrong |= dict.fromkeys(range(1, len(passes)), together)
    return wrong


def _read_pair(source: CaptureSource, layer: int) -> CachePair:
    """Read rotated keys and values as heads, float32 [B,K,S,D] each."""
    keys = source.read(layer, Site.K_ROPE).float()
    return keys, split_heads(source.read(layer, Site.V_PROJ).float(), keys.shape[-1])


def _shows_both(target: CaptureSource, layer: int) -> bool:
    return set(target.sites(layer)).issuperset(_KINDS)


def _own_pair(target: CaptureSource, layer: int, right: CachePair) -> CachePair | None:
    if not _shows_both(target, layer):
        return None
    if target.read(layer, Site.K_ROPE).shape != right[0].shape:
        return None
    return _read_pair(target, layer)


def _is_cast(pair: CachePair, own: CachePair, mask: torch.Tensor) -> bool:
    """Decide whether the cache holds the port's own keys and values on real tokens [B,S], cast to its dtype."""
    return all(
        torch.equal(cached.transpose(1, 2)[mask], shown.to(cached.dtype).transpose(1, 2)[mask])
        for cached, shown in zip(pair, own, strict=True)
    )


def _noise(golden: CaptureSource, layer: int, rounded: CachePair, mask: torch.Tensor) -> CachePair:
    twins = golden.read_twin(layer, Site.K_ROPE), golden.read_twin(layer, Site.V_PROJ)
    exact_keys, exact_values = (
        part if twin is None else _as_heads(twin, part) for twin, part in zip(twins, rounded, strict=True)
    )
    keys, values = rounded
    return noise_of(exact_keys, keys, mask), noise_of(exact_values, values, mask)


def _unrotated(source: CaptureSource, layer: int, right: CachePair) -> torch.Tensor | None:
    unrotated = source.graph.unrotated(Site.K_ROPE)
    if unrotated not in source.sites(layer):
        return None
    keys, _ = right
    return _as_heads(source.read(layer, unrotated), keys)


def _as_heads(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return keys or values as heads, float32 [B,K,S,D]; they may be [B,S,K·D]."""
    return tensor.float() if tensor.ndim == like.ndim else split_heads(tensor.float(), like.shape[-1])


def _other_pairs(target: CaptureSource, layer: int) -> Iterator[tuple[int, CachePair]]:
    """Yield the content of other layers, as they show it or as their caches hold it; the nearest first."""
    for other in sorted(target.layers, key=lambda index: abs(index - layer)):
        if other == layer:
            continue
        if _shows_both(target, other):
            yield other, _read_pair(target, other)
        elif (pair := target.read_cache(other)) is not None:
            yield other, (pair[0].float(), pair[1].float())


def _describe(
    content: CacheContent, wrong: dict[int, tuple[str, ...]], split: PassSplit, *, is_shown: bool
) -> str:
    kinds = sorted({kind for of_pass in wrong.values() for kind in of_pass})
    heads, places = content.wrong_heads(), content.tokens.nonzero()
    beside = (
        "; the port's own keys and values are other ones: the cache is wrong, not the projections"
        if is_shown
        else ""
    )
    number, num_wrong = min(wrong), format_count(len(places), "token")
    since = f"from {split.name(number)} on" if number or split.is_chunked else "from the prefill on"
    return (
        f"{since} the cached {' and '.join(kinds)} of kv heads {', '.join(map(str, heads))} are off by "
        f"{content.rho(content.right):.3g} times the noise at {num_wrong} ({word_places(places)}){beside}"
    )


def _judge_changes(target: CaptureSource, layer: int, split: PassSplit) -> tuple[ModelFinding, ...]:
    """Find entries of earlier tokens that a later pass changed; the first pass of a layer counts."""
    passes = target.read_passes()
    changes = [] if passes is None else [change for change in passes.cache_changes if change.layer == layer]
    if not changes:
        return ()
    first = min(changes, key=lambda change: change.number)
    return (_of_cache("cache_overwritten", first.number, layer, reason=_describe_change(first, split)),)


def _judge_shift(target: CaptureSource, layer: int, *, is_decoding_wrong: bool) -> tuple[ModelFinding, ...]:
    """Find steps that write beside their token's entry; by itself this may be a bucket's padding, and right."""
    passes = target.read_passes()
    if passes is None or not is_decoding_wrong or not 0 < abs(passes.cache_shift) <= _MOST_SHIFT:
        return ()
    side = "behind" if passes.cache_shift > 0 else "before"
    reason = (
        f"steps write their keys and values {abs(passes.cache_shift)} entry {side} their token's own "
        f"({passes.cache_form}), and what they read is wrong"
    )
    return (_of_cache("cache_one_row_off", 1, layer, reason=reason, parameters={"by": passes.cache_shift}),)


def _of_cache(
    mistake: str, number: int, layer: int, *, reason: str, parameters: Parameters = NO_PARAMETERS
) -> ModelFinding:
    return named_finding(
        mistake,
        number=number,
        layer=layer,
        site=CACHE,
        reason=reason,
        parameters=parameters,
        place=Place.CACHE,
    )


def _describe_change(change: CacheChange, split: PassSplit) -> str:
    places = ", ".join(f"row {row}, token {column}" for row, column in change.places)
    heads = ", ".join(map(str, change.heads))
    return (
        f"{split.name(change.number)} changed the cached {change.kind} of {change.num_tokens} earlier tokens "
        f"({places}) in kv heads {heads}"
    )
