"""Steps: what every rank of a run has to do, of what is not stored yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from minimax_tools.partition.planners import Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What a rank has to do, of what is not stored yet.

    Args:
        layers: The layers to run; may be none.
        runs_head: Whether the final norm and the lm_head run.
        source: Where the first layer's input comes from: `tokens`, `stored`, or `rank` for the rank before.
        passes_on: Whether the rank behind needs its output.
    """

    layers: range
    runs_head: bool
    source: str
    passes_on: bool

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.layers or self.runs_head or self.passes_on)


def plan_steps(
    stages: Sequence[Stage], complete: Sequence[int], *, has_model_sites: bool
) -> tuple[Step, ...]:
    """What every rank has to do; all ranks find the same.

    Args:
        stages: One for each rank, in the order in which a token passes them.
        complete: Layers that are stored whole.
        has_model_sites: Whether the sites outside the layers are stored.
    """
    steps: list[Step] = []
    needed_behind = False
    for stage in reversed(stages):
        pending = [layer for layer in stage.layers if layer not in complete]
        first = pending[0] if pending else stage.layers.stop
        is_begun = first == 0 and stage.has_embedding
        source = "tokens" if is_begun else "stored" if first - 1 in complete else "rank"
        step = Step(
            layers=range(first, stage.layers.stop),
            runs_head=stage.has_head and not has_model_sites,
            source=source,
            passes_on=needed_behind,
        )
        needed_behind = not step.is_idle and source == "rank"
        steps.append(step)
    return tuple(reversed(steps))
