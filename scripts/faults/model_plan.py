"""Model plan: which ports run on a model that was trained, on text that it was never shown."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clean_ports import GOLDENS

from faults.dump_runs import plan_dumps
from faults.learned import LearnedModel
from faults.pairs import pair_plants
from faults.plan import FEW, AnyRun
from faults.plant import Plant
from faults.right_ports import plan_right_ports
from faults.runs import plan_decoding, plan_plants, shows_on
from faults.scene import Stage

_SHORT = (96, 61, 7)
_CLEAN = ((1,), (4,), (24, 7), _SHORT, (500,))
_BACKENDS = ("cpu", "xla-cpu")
# Processes of their own and compiled attention take long: at these rows alone.
_RANKS = {(4,): (2,), _SHORT: (2, 4)}


def plan_part_on_model(
    part: str, plants: Sequence[Plant], model: LearnedModel, *, seed: int, asks_names: bool
) -> Iterator[AnyRun]:
    """Plan one of the benchmark's parts on a model; XLA runs its right ports alone.

    Args:
        part: Which of `PARTS`.
        plants: What is planted; what a stage cannot show is left out.
        model: The model.
        seed: Of the text's cuts.
        asks_names: Whether the diagnosis is asked for names, of `short` alone.
    """
    shown = tuple(plant for plant in plants if model.is_fp8 or not plant.needs_fp8)
    if part == "short":
        stage = _stage(part, model, _SHORT, seed=seed)
        yield from plan_plants(stage, shown, backend="cpu", names=asks_names)
    elif part == "decode":
        yield from plan_decoding(_stage(part, model, (70, 69, 67), seed=seed + 1), shown)
    elif part == "left":
        stage = _stage(part, model, (80, 33, 7), seed=seed + 2, golden=1, padding_side="left")
        yield from plan_plants(stage, shown, backend="cpu")
    elif part == "long":
        yield from plan_plants(_stage(part, model, (500,), seed=seed + 3), shown, backend="cpu")
    elif part == "few":
        for place, lengths in enumerate(FEW):
            stage = _stage(part, model, lengths, seed=seed + 4 + place, golden=(place + 1) % 2)
            yield from plan_plants(stage, shown, backend="cpu")
    elif part == "pairs":
        stage = _stage(part, model, _SHORT, seed=seed + 7, golden=1)
        pairs = pair_plants([plant for plant in shown if shows_on(plant, stage)], seed=seed)
        yield from plan_plants(stage, tuple(pairs), backend="cpu")
    elif part == "dumps":
        yield from plan_dumps(_stage(part, model, _SHORT, seed=seed + 8), shown)
    elif part == "clean":
        yield from _plan_right_ports(model, seed=seed)


def name_left_out(plants: Sequence[Plant], model: LearnedModel) -> tuple[str, ...]:
    """The plants that a model cannot show: mistakes in reading FP8, on one that is stored in BF16."""
    left = (plant.name for plant in plants if plant.needs_fp8 and not model.is_fp8)
    return tuple(dict.fromkeys(left))


def _plan_right_ports(model: LearnedModel, *, seed: int) -> Iterator[AnyRun]:
    """Every right port at every number of tokens, against a golden of each implementation; XLA against one of them."""
    for place, lengths in enumerate(_CLEAN):
        for golden in range(len(GOLDENS)):
            stage = _stage("clean", model, lengths, seed=seed + 20 + place, golden=golden)
            yield from plan_right_ports(
                stage,
                backends=_BACKENDS if (place + golden) % 2 == 0 else _BACKENDS[:1],
                ranks=_RANKS.get(lengths, ()),
                with_flex=lengths == _SHORT,
            )


def _stage(
    part: str,
    model: LearnedModel,
    lengths: tuple[int, ...],
    *,
    seed: int,
    golden: int = 0,
    padding_side: str = "right",
) -> Stage:
    attention, experts = GOLDENS[golden]
    return Stage(
        name=f"{model.name}-{part}-{'-'.join(map(str, lengths))}-{attention}",
        seed=seed,
        lengths=lengths,
        padding_side=padding_side,
        num_layers=model.num_layers,
        attention=attention,
        experts=experts,
        learned=model,
    )
