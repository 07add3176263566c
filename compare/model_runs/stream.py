"""Stream: whether each layer of a whole port ran in its turn, and is given what the layer before gave.

B prompts, S columns, T real tokens, H hidden, w columns of a pass.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import torch

from compare.limits.limits import computes_in_float32
from compare.model_runs.findings import named_finding
from compare.noise.rows import TINY_FLOAT32
from compare.sides.golden_weights import HeadWeights
from compare.sides.sides import Sides, exchanged_tokens
from minimax_tools.capture.passes import pass_name
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import list_names
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.rounding import Float32Head
from minimax_tools.results.results import ModelFinding

ORDER = "layer_order"
LAYER_SKIPPED = "layer_skipped"
_NORM_INPUT = "final_norm_input"
_LOOK_AT = "the loop over the layers in the model's forward, and the list that it runs over"
# Layers that a finding names.
_MOST_NAMED = 4
# Largest error of a stream that is a given tensor, relative to each channel: that of one or two roundings.
_MOST_ROUNDED, _MOST_IN_FLOAT32 = 1e-2, 1e-4
# What it is must be nearer than what it should be by this factor.
_NEARER = 4.0


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Candidate:
    """Candidate for what a layer or the final norm is given in place of the stream before it."""

    states: torch.Tensor  # [T,H]; NaN at tokens that it does not tell
    words: str
    mistake: str
    other: int | None = None  # the layer whose output it is, -1 for the embedding; None for something else
    skipped: tuple[int, ...] = ()  # layers whose result is passed by
    parameters: dict[str, Any] = field(default_factory=dict)


def judge_stream(sides: Sides, num_layers: int) -> tuple[ModelFinding, ...]:
    """Find the first layer whose input is not what the layer before it, or the embedding, gave."""
    target, is_real = sides.target, sides.reference.read_kept_mask()
    for layer in range(num_layers):
        given, before = _read_input(target, layer), _read_output(target, layer - 1)
        if given is None or before is None or _is_same(given, before, is_real):
            continue
        source = _find_source(sides, given, before, layer=layer, num_layers=num_layers)
        expected = f"layer {layer - 1}" if layer else "the embedding"
        place = f"the input of layer {layer}" if source is not None and source.skipped else "its input"
        reason = f"{place} is not what {expected} gave: "
        number = _first_pass(sides, given, before)
        if source is None:
            return (
                ModelFinding(
                    number=number,
                    layer=layer,
                    sites=(str(Site.INPUT),),
                    reason=f"{reason}something in between changed it",
                    look_at=_LOOK_AT,
                ),
            )
        return (_of_source(number, layer, str(Site.INPUT), reason, source),)
    return ()


def judge_norm_input(
    sides: Sides, weights: HeadWeights, *, last_layer: int, number: int
) -> ModelFinding | None:
    """Find out whether a final norm that is wrong is right on something else than the last layer's output.

    Args:
        sides: Both captures; the port holds the last layer's output and the final norm.
        weights: The weights behind the last layer.
        last_layer: The last layer.
        number: The first pass in which the norm is wrong.
    """
    target = sides.target
    before, normed = _read_output(target, last_layer), target.read(None, ModelSite.FINAL_NORM)
    if before is None or normed.shape != before.shape:
        return None
    head = Float32Head(weights.norm, weights.lm_head, spec=weights.spec)
    port = sides.batch.rows(normed, ModelSite.FINAL_NORM).float()
    # A norm cannot see a scale.
    candidates = (
        (candidate, _error(port, head.normalise(candidate.states)))
        for candidate in _candidates(sides, before, layer=last_layer + 1, num_layers=last_layer + 1)
    )
    best, error = min(candidates, key=lambda pair: pair[1], default=(None, torch.inf))
    right = _error(port, head.normalise(sides.batch.rows(before, Site.OUTPUT)))
    if best is None or error > _most(sides) or error * _NEARER > right:
        return None
    reason = f"the final norm's input is not what layer {last_layer} gave: "
    return _of_source(number, None, _NORM_INPUT, reason, _name_left_out(sides, best, layer=last_layer + 1))


def _find_source(
    sides: Sides, given: torch.Tensor, before: torch.Tensor, *, layer: int, num_layers: int
) -> _Candidate | None:
    """Find what a layer is given; None if it is nothing known."""
    mask = sides.reference.read_attention_mask()
    if given.shape != before.shape or (mask is not None and given.shape[:2] != mask.shape):
        return None
    given_th, right_th = (sides.batch.rows(tensor, Site.INPUT).float() for tensor in (given, before))
    is_finite = (given_th.isfinite() & right_th.isfinite()).all(dim=-1)
    products = (given_th * right_th)[is_finite].sum()
    scale = float(products / right_th[is_finite].square().sum().clamp(min=TINY_FLOAT32))
    scaled = _Candidate(
        states=scale * right_th,
        words=f"it is that, × {scale:.4g}",
        mistake="stream_scaled",
        parameters={"factor": round(scale, 5)},
    )
    candidates = chain(_candidates(sides, before, layer=layer, num_layers=num_layers), [scaled])
    judged = ((candidate, _error(given_th, candidate.states)) for candidate in candidates)
    best, error = min(judged, key=lambda pair: pair[1])
    is_near = error <= _most(sides) and error * _NEARER < _error(given_th, right_th)
    return _name_left_out(sides, best, layer=layer) if is_near else None


def _candidates(sides: Sides, before: torch.Tensor, *, layer: int, num_layers: int) -> Iterator[_Candidate]:
    """Yield what layer `layer`, or the final norm behind the last, may be given in place of `before`."""
    target, batch = sides.target, sides.batch
    for other in range(-1, num_layers):
        output = _read_output(target, other)
        if output is not None and other != layer - 1 and output.shape == before.shape:
            yield _Candidate(
                states=batch.rows(output, Site.OUTPUT).float(),
                words=f"it is the output of layer {other}" if other >= 0 else "it is the embedding",
                mistake="layers_out_of_order",
                other=other,
            )
    passes, mask = target.read_passes(), sides.reference.read_attention_mask()
    if layer:
        yield from _parts(sides, layer - 1)
    if passes is not None and mask is not None and before.shape[:2] == mask.shape:
        flat = before.flatten(0, 1).float()
        for words, places in exchanged_tokens(passes, mask):
            of_token = batch.tokens(places)
            states = torch.where(of_token[:, None] < 0, torch.nan, flat[of_token])
            yield _Candidate(
                states=states,
                words=f"it is that of other tokens of the pass, {words}",
                mistake="tokens_exchanged",
                parameters={"order": words},
            )


def _name_left_out(sides: Sides, found: _Candidate, *, layer: int) -> _Candidate:
    """Say of what another layer gave that those between are left out, if nobody takes their results."""
    between = () if found.other is None else tuple(range(found.other + 1, layer))
    if not between or any(_is_taken(sides, skipped, but=(*between, layer)) for skipped in between):
        return found
    names = list_names([str(number) for number in between], most=4)
    are = "s {} are" if len(between) > 1 else " {} is"
    return replace(
        found,
        words=f"{found.words}; layer{are.format(names)} left out",
        mistake="layer_left_out",
        skipped=between,
    )


def _is_taken(sides: Sides, layer: int, *, but: Collection[int]) -> bool:
    """Decide whether a layer's output is the input of another one than those in `but`."""
    output, is_real = _read_output(sides.target, layer), sides.reference.read_kept_mask()
    inputs = (_read_input(sides.target, other) for other in sides.target.layers if other not in but)
    return output is not None and any(
        given is not None and _is_same(given, output, is_real) for given in inputs
    )


def _parts(sides: Sides, layer: int) -> Iterator[_Candidate]:
    """Yield sums that lack a part of a layer's output, or have one twice, as far as the port shows the parts."""
    delta = sides.reference.graph.layer(layer).last_delta
    shown: dict[Site, torch.Tensor] = {
        site: sides.batch.rows(sides.target.read(layer, site), site).float()
        for site in (Site.INPUT, Site.ATTN_DELTA, Site.ATTN_RESIDUAL, delta, Site.OUTPUT)
        if site in sides.target.sites(layer)
    }
    sums: tuple[tuple[str, str, tuple[Site, ...]], ...] = (
        ("residual_lost", "what its experts added, without the residual", (delta,)),
        ("residual_lost", "what its attention added, without the residual", (Site.ATTN_DELTA,)),
        ("addend_lost", "its stream without what its experts added", (Site.ATTN_RESIDUAL,)),
        ("addend_lost", "its stream without what its attention added", (Site.INPUT, delta)),
        ("residual_twice", "its output with the residual added twice", (Site.OUTPUT, Site.ATTN_RESIDUAL)),
        ("addend_twice", "its output with what its experts added twice", (Site.OUTPUT, delta)),
    )
    for mistake, words, sites in sums:
        if all(site in shown and shown[site].shape == shown[sites[0]].shape for site in sites):
            yield _Candidate(
                states=torch.stack([shown[site] for site in sites]).sum(dim=0),
                words=f"it is {words}",
                mistake=mistake,
            )


def _of_source(
    number: int | None, layer: int | None, site: str, reason: str, source: _Candidate
) -> ModelFinding:
    """Return the finding of a stream that is something else; a layer that is left out is its place."""
    if source.skipped:
        layer, site = source.skipped[0], ORDER
    return named_finding(
        source.mistake,
        number=number,
        layer=layer,
        site=site,
        reason=reason + source.words,
        parameters=source.parameters,
    )


def _first_pass(sides: Sides, given: torch.Tensor, before: torch.Tensor) -> int | None:
    """Return the first pass in which two streams [B,S,H] differ; None if the passes of their tokens are not known."""
    passes, mask = sides.target.read_passes(), sides.reference.read_attention_mask()
    if passes is None or mask is None or given.shape != before.shape or given.shape[:2] != mask.shape:
        return None
    differs = (given.float() != before.float()).any(-1) & mask.bool()
    numbers = passes.number_tokens(mask)[differs]
    return int(numbers.min()) if len(numbers) else None


def _most(sides: Sides) -> float:
    return _MOST_IN_FLOAT32 if computes_in_float32(sides.reference) else _MOST_ROUNDED


def _error(given: torch.Tensor, states: torch.Tensor) -> float:
    """Return the error of [T,H] against a candidate, relative to each channel: a massive one hides no other."""
    if given.shape != states.shape:
        return torch.inf
    is_told = (states.isfinite() & given.isfinite()).all(dim=-1)
    given, states = given[is_told].double(), states[is_told].double()
    if not len(given):
        return torch.inf
    squares = (given - states).square().sum(0) / given.square().sum(0).clamp(min=TINY_FLOAT32)
    error = float(squares.mean().sqrt())
    return error if error == error else torch.inf


def _read_input(target: CaptureSource, layer: int) -> torch.Tensor | None:
    return target.read(layer, Site.INPUT) if Site.INPUT in target.sites(layer) else None


def _read_output(target: CaptureSource, layer: int) -> torch.Tensor | None:
    """Return a layer's output [B,S,H], the embedding for layer -1; None if it is not held."""
    if layer < 0:
        is_held = ModelSite.EMBEDDING in target.model_sites()
        return target.read(None, ModelSite.EMBEDDING) if is_held else None
    return target.read(layer, Site.OUTPUT) if Site.OUTPUT in target.sites(layer) else None


def _is_same(given: torch.Tensor, before: torch.Tensor, is_real: torch.Tensor | None) -> bool:
    """Decide whether two tensors [B,S,H] have the same values on real tokens, in the coarser of their dtypes."""
    if given.shape != before.shape:
        return False
    if is_real is not None and given.shape[:2] == is_real.shape:
        given, before = given[is_real], before[is_real]
    coarser = min((given.dtype, before.dtype), key=lambda dtype: dtype.itemsize)
    given, before = given.to(coarser), before.to(coarser)
    return bool(((given == before) | (given.isnan() & before.isnan())).all())


def judge_layer_order(sides: Sides, num_layers: int) -> tuple[ModelFinding, ...]:
    """Judge the order in which a whole port called its layers; if that is in order, the stream between them."""
    passes = sides.target.read_passes()
    if passes is None:
        return ()
    for number, calls in enumerate(passes.layer_calls):
        # Without a single call, calls cannot be seen: the port is a compiled graph.
        where = f"in the {pass_name(number, is_chunk=bool(passes.chunks))}"
        finding = _judge_calls(number, calls, num_layers, where=where) if calls else None
        if finding is not None:
            return (finding,)
    return judge_stream(sides, num_layers)


def _judge_calls(number: int, calls: Sequence[int], num_layers: int, *, where: str) -> ModelFinding | None:
    """Judge the calls of one pass; None if they are those of a right model."""
    counts = Counter(calls)
    skipped = [layer for layer in range(num_layers) if not counts[layer]]
    repeated = [layer for layer, count in sorted(counts.items()) if count > 1]
    misplaced = [layer for layer, called in enumerate(calls) if layer != called]
    if skipped:
        mistake, layers, reason = LAYER_SKIPPED, skipped, f"{_name(skipped)} never ran {where}"
    elif repeated:
        times = counts[repeated[0]]
        mistake, layers, reason = "layer_twice", repeated, f"{_name(repeated)} ran {times} times {where}"
    elif misplaced:
        order = ", ".join(map(str, calls))
        mistake, layers = "layers_out_of_order", misplaced
        reason = f"the layers ran in the order {order} {where}"
    else:
        return None
    return named_finding(mistake, number=number, layer=layers[0], site=ORDER, reason=reason)


def _name(layers: Sequence[int]) -> str:
    named = ", ".join(str(layer) for layer in layers[:_MOST_NAMED])
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return f"layer{'s' if len(layers) > 1 else ''} {named}{more}"
