"""Plan: which ports run on which synthetic stages, before any of them does; for learned models see `model_plan`."""

from __future__ import annotations

from collections.abc import Iterator

from faults.dump_runs import PlannedDump, plan_dumps
from faults.pairs import pair_plants
from faults.plant import Plant
from faults.planted import choose_plants
from faults.right_ports import plan_right_ports
from faults.runs import PlannedRun, plan_decoding, plan_plants
from faults.scene import Stage
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import default_rows

_SHORT = (96, 61, 7)
_QUICK = ("gate_up_swapped", "router_bias_missing", "tile_twice", "weights_bfloat16")
# Of what makes a golden; one that is right by one must be right by the other.
_IMPLEMENTATIONS = (("sdpa", "grouped_mm"), ("eager", "eager"))
_RANKS = (2, 4)
_BACKENDS = ("cpu", "xla-cpu")

AnyRun = PlannedRun | PlannedDump

# Early, middle and last layers of a model with short prompts; XLA; decoded rows; padding on the left; one long prompt;
# few tokens; the rows of a golden for which nobody names any, far positions among them; two mistakes in one port; dumps
# of whole models; and ports that are right.
PARTS = ("short", "xla", "decode", "left", "long", "few", "far", "pairs", "dumps", "clean")
# Tokens of each of the stages of `few`.
FEW = ((1,), (4,), (24,))


def plan_quickly() -> Iterator[AnyRun]:
    """A few mistakes on a small model: seconds."""
    stage = Stage(name="quick", seed=0, lengths=(24, 7), num_layers=2)
    yield from plan_plants(stage, choose_plants(_QUICK), backend="cpu")


def plan_part(
    part: str, plants: tuple[Plant, ...], *, seed: int, num_clean_seeds: int, asks_names: bool
) -> Iterator[AnyRun]:
    """The runs of one of `PARTS`.

    Args:
        part: Which.
        plants: What is planted.
        seed: Of the models that mistakes are planted in.
        num_clean_seeds: How many models the right ports run on.
        asks_names: Whether the diagnosis is asked for names, which takes longer than all else; of `short` alone.
    """
    if part == "clean":
        yield from _plan_right_ports(num_clean_seeds)
    elif part == "pairs":
        stage = Stage(name=part, seed=seed + 3, lengths=_SHORT, num_layers=4)
        yield from plan_plants(stage, tuple(pair_plants(plants, seed=seed)), backend="cpu")
    elif part == "decode":
        # Prompts of nearly one length: decoding starts where the shortest one has that many rows left.
        yield from plan_decoding(Stage(name=part, seed=seed, lengths=(70, 69, 67), num_layers=4), plants)
    elif part == "short":
        stage = Stage(name=part, seed=seed, lengths=_SHORT, num_layers=4)
        yield from plan_plants(stage, plants, backend="cpu", names=asks_names)
    elif part == "left":
        attention, experts = _IMPLEMENTATIONS[1]
        stage = Stage(
            name=part,
            seed=seed + 1,
            lengths=(80, 33, 7),
            padding_side="left",
            num_layers=2,
            attention=attention,
            experts=experts,
        )
        yield from plan_plants(stage, plants, backend="cpu")
    elif part == "few":
        for place, lengths in enumerate(FEW):
            attention, experts = _IMPLEMENTATIONS[place % 2]
            stage = Stage(
                name=f"few-{sum(lengths)}",
                seed=seed + 4 + place,
                lengths=lengths,
                num_layers=1,
                attention=attention,
                experts=experts,
            )
            yield from plan_plants(stage, plants, backend="cpu")
    elif part == "dumps":
        yield from plan_dumps(Stage(name=part, seed=seed + 7, lengths=_SHORT, num_layers=5), plants)
    elif part == "long":
        stage = Stage(name=part, seed=seed + 2, lengths=(512,), num_layers=1)
        yield from plan_plants(stage, plants, backend="cpu")
    elif part == "far":
        stage = _far_stage(part, seed=seed + 4, num_layers=2)
        yield from plan_plants(stage, plants, backend="cpu", names=asks_names)
    else:
        stage = Stage(name=part, seed=seed, lengths=_SHORT, num_layers=1)
        yield from plan_plants(stage, plants, backend="xla-cpu")


def _far_stage(name: str, *, seed: int, num_layers: int) -> Stage:
    rows = default_rows(SyntheticModel().spec().max_position_embeddings)
    return Stage(
        name=name,
        seed=seed,
        lengths=tuple(row.length for row in rows),
        start_positions=tuple(row.start_position for row in rows),
        num_layers=num_layers,
    )


def _plan_right_ports(num_seeds: int) -> Iterator[PlannedRun]:
    """Ports that are right, on models of 16 layers and goldens of two implementations and paddings, and far out."""
    for seed in range(num_seeds):
        attention, experts = _IMPLEMENTATIONS[seed % 2]
        stage = Stage(
            name=f"clean-{seed}",
            seed=1000 + seed,
            lengths=_SHORT,
            padding_side=("right", "left")[seed % 2],
            num_layers=16,
            attention=attention,
            experts=experts,
        )
        yield from plan_right_ports(stage, backends=_BACKENDS, ranks=_RANKS)
        far = _far_stage(f"clean-far-{seed}", seed=2000 + seed, num_layers=4)
        yield from plan_right_ports(far, backends=_BACKENDS, ranks=_RANKS)
