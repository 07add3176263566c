"""Plan: which ports run on which stages, before any of them does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from faults.plant import Plant
from faults.planted import choose_plants
from faults.runs import PlannedRun, plan_clean, plan_decoding, plan_plants
from faults.scene import Stage

_SHORT = (96, 61, 7)
_QUICK = ("gate_up_swapped", "router_bias_missing", "tile_twice", "weights_bfloat16")
# Of what makes a golden; one that is right by one must be right by the other.
_IMPLEMENTATIONS = (("sdpa", "grouped_mm"), ("eager", "eager"))
_RANKS = (2, 4)


def plan_quickly() -> Iterator[PlannedRun]:
    """A few mistakes on a small model: seconds."""
    stage = Stage(name="quick", seed=0, lengths=(24, 7), num_layers=2)
    return plan_plants(stage, choose_plants(_QUICK), backend="cpu")


def plan_mistakes(
    plants: tuple[Plant, ...], *, seeds: Sequence[int], backends: tuple[str, ...]
) -> Iterator[PlannedRun]:
    """Every backend, decoded rows and a long prompt on models of the first seed; padding on the left on the others'.

    Early, middle and last layers are wrong on the CPU; elsewhere as many layers as there are, which are fewer.
    """
    first, *others = seeds
    for backend in backends:
        is_cpu = backend == "cpu"
        short = Stage(
            name=f"{'short' if is_cpu else backend}-{first}",
            seed=first,
            lengths=_SHORT,
            num_layers=4 if is_cpu else 1,
        )
        yield from plan_plants(short, plants, backend=backend, names=is_cpu)
    # Prompts of nearly one length: decoding starts where the shortest one has that many rows left.
    decoded = Stage(name=f"decode-{first}", seed=first, lengths=(70, 69, 67), num_layers=4)
    yield from plan_decoding(decoded, plants)
    for seed in others:
        attention, experts = _IMPLEMENTATIONS[1]
        left = Stage(
            name=f"left-{seed}",
            seed=seed,
            lengths=(80, 33, 7),
            padding_side="left",
            num_layers=2,
            attention=attention,
            experts=experts,
        )
        yield from plan_plants(left, plants, backend="cpu")
    long = Stage(name=f"long-{first}", seed=first + 100, lengths=(512,), num_layers=1)
    yield from plan_plants(long, plants, backend="cpu")


def plan_right_ports(*, num_seeds: int, backends: tuple[str, ...]) -> Iterator[PlannedRun]:
    """Ports that are right, on models of 16 layers and goldens of two implementations and padding sides."""
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
        yield from plan_clean(stage, backends=backends, ranks=_RANKS)
