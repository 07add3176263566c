"""Layer order: whether each layer of a whole port ran once, in its turn, on what the layer before it gave.

B prompts, S columns, H hidden.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from compare.model_runs.passes import real_tokens
from compare.sides.sides import Sides
from minimax_tools.capture.passes import pass_name
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.model_findings import ModelFinding

_SITE = "layer_order"
# Names of mistakes.
LAYER_SKIPPED, _LAYER_TWICE, _OUT_OF_ORDER = "layer_skipped", "layer_twice", "layers_out_of_order"
_LOOK_AT = "the loop over the layers in the model's forward, and the list that it runs over"
# Layers that a finding names.
_MOST_NAMED = 4


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
    return _judge_stream(sides, num_layers)


def _judge_calls(number: int, calls: Sequence[int], num_layers: int, *, where: str) -> ModelFinding | None:
    """Judge the calls of one pass; None if they are those of a right model."""
    counts = Counter(calls)
    skipped = [layer for layer in range(num_layers) if not counts[layer]]
    repeated = [layer for layer, count in sorted(counts.items()) if count > 1]
    if skipped:
        return _finding(
            number,
            skipped[0],
            mistake=LAYER_SKIPPED,
            what="A layer never runs.",
            reason=f"{_name(skipped)} never ran {where}",
        )
    if repeated:
        return _finding(
            number,
            repeated[0],
            mistake=_LAYER_TWICE,
            what="A layer runs more than once in a pass.",
            reason=f"{_name(repeated)} ran {counts[repeated[0]]} times {where}",
        )
    misplaced = [layer for layer, called in enumerate(calls) if layer != called]
    if misplaced:
        order = ", ".join(str(layer) for layer in calls)
        return _finding(
            number,
            misplaced[0],
            mistake=_OUT_OF_ORDER,
            what="Layers run in another order.",
            reason=f"the layers ran in the order {order} {where}",
        )
    return None


def _judge_stream(sides: Sides, num_layers: int) -> tuple[ModelFinding, ...]:
    """Find the first layer whose input is not what the layer before it, or the embedding, gave."""
    target, is_real = sides.target, real_tokens(sides)
    for layer in range(num_layers):
        given, before = _read_input(target, layer), _read_output(target, layer - 1)
        if given is None or before is None or _is_same(given, before, is_real):
            continue
        source = next(
            (
                other
                for other in range(-1, num_layers)
                if other != layer - 1
                and (output := _read_output(target, other)) is not None
                and _is_same(given, output, is_real)
            ),
            None,
        )
        expected = f"layer {layer - 1}" if layer else "the embedding"
        if source is None:
            found = "something in between changed it"
        else:
            found = f"it is the output of layer {source}" if source >= 0 else "it is the embedding"
        return (
            ModelFinding(
                number=None,
                layer=layer,
                sites=(str(Site.INPUT),),
                reason=f"its input is not what {expected} gave: {found}",
                mistake=None if source is None else _OUT_OF_ORDER,
                what="" if source is None else "Layers run in another order.",
                look_at=_LOOK_AT,
            ),
        )
    return ()


def _read_input(target: CaptureSource, layer: int) -> torch.Tensor | None:
    return target.read(layer, Site.INPUT) if Site.INPUT in target.sites(layer) else None


def _read_output(target: CaptureSource, layer: int) -> torch.Tensor | None:
    """Return a layer's output [B,S,H], the embedding for layer -1; None if it is not held."""
    if layer < 0:
        is_held = ModelSite.EMBEDDING in target.model_sites()
        return target.read_model(ModelSite.EMBEDDING) if is_held else None
    return target.read(layer, Site.OUTPUT) if Site.OUTPUT in target.sites(layer) else None


def _is_same(given: torch.Tensor, before: torch.Tensor, is_real: torch.Tensor | None) -> bool:
    """Decide whether two tensors [B,S,H] have the same values on real tokens, in the coarser of their dtypes.

    NaN equals NaN.
    """
    if given.shape != before.shape:
        return False
    if is_real is not None and given.shape[:2] == is_real.shape:
        given, before = given[is_real], before[is_real]
    coarser = min((given.dtype, before.dtype), key=lambda dtype: dtype.itemsize)
    given, before = given.to(coarser), before.to(coarser)
    return bool(((given == before) | (given.isnan() & before.isnan())).all())


def _finding(number: int, layer: int, *, mistake: str, what: str, reason: str) -> ModelFinding:
    return ModelFinding(
        number=number,
        layer=layer,
        sites=(_SITE,),
        reason=reason,
        mistake=mistake,
        what=what,
        look_at=_LOOK_AT,
    )


def _name(layers: Sequence[int]) -> str:
    named = ", ".join(str(layer) for layer in layers[:_MOST_NAMED])
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return f"layer{'s' if len(layers) > 1 else ''} {named}{more}"
