"""Layer order: whether each layer of a whole port ran once, in its turn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from compare.model_runs.stream import ORDER, OUT_OF_ORDER, judge_stream
from compare.sides.sides import Sides
from minimax_tools.capture.passes import pass_name
from minimax_tools.results.model_findings import ModelFinding

# Names of mistakes.
LAYER_SKIPPED, _LAYER_TWICE = "layer_skipped", "layer_twice"
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
    return judge_stream(sides, num_layers)


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
            mistake=OUT_OF_ORDER,
            what="Layers run in another order.",
            reason=f"the layers ran in the order {order} {where}",
        )
    return None


def _finding(number: int, layer: int, *, mistake: str, what: str, reason: str) -> ModelFinding:
    return ModelFinding(
        number=number,
        layer=layer,
        sites=(ORDER,),
        reason=reason,
        mistake=mistake,
        what=what,
        look_at=_LOOK_AT,
    )


def _name(layers: Sequence[int]) -> str:
    named = ", ".join(str(layer) for layer in layers[:_MOST_NAMED])
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    return f"layer{'s' if len(layers) > 1 else ''} {named}{more}"
