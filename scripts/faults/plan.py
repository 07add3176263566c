"""Plan: the ports to run, and the baselines that they run against: models with prompts and a golden."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from clean_ports import clean_ports
from cpu_golden import IMPLEMENTATIONS
from port_runs import EXAMPLES

from faults.baseline import BaselineRequest, TrainedModel
from faults.dump_runs import PlannedDump, plan_dumps
from faults.plant import Plant, fit_plants, pair_plants
from faults.planted import choose_plants
from faults.runs import RANKS_PREFIX, PlannedRun, may_show, plan_decoding, plan_plants
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import default_rows

AnyRun = PlannedRun | PlannedDump

PARTS = (
    "short",  # short prompts
    "xla",  # the same on XLA
    "decode",  # mistakes in decoded tokens alone
    "left",  # padding on the left
    "long",  # one long prompt
    "few",  # few tokens
    "far",  # mm2's default prompts, most of which begin far from position 0
    "pairs",  # two mistakes in one port
    "dumps",  # chained runs of whole models
    "clean",  # right ports
)
# Numbers of tokens, by prompt.
_SHORT = (96, 61, 7)
# Prompts of nearly one length: decoding starts at the last tokens of the shortest one, for all of them.
_DECODED = (70, 69, 67)
_LEFT = (80, 33, 7)
# Each is the only prompt of a baseline.
_FEW = (1, 4, 24)


class _Prompts(NamedTuple):
    """Prompts of one baseline of a part, with its model and golden."""

    seed: int  # of a synthetic model, and of the tokens
    lengths: tuple[int, ...]  # number of tokens of each prompt
    num_layers: int = 4  # layers of a synthetic model
    implementation: int = 0  # index into `IMPLEMENTATIONS` of the golden; in "few" they take turns


# Baselines by part.
_ON_SYNTHETIC = {
    "short": (_Prompts(0, _SHORT),),
    "xla": (_Prompts(0, _SHORT, num_layers=1),),
    "decode": (_Prompts(0, _DECODED),),
    "left": (_Prompts(1, _LEFT, num_layers=2, implementation=1),),
    "long": (_Prompts(2, (512,), num_layers=1),),
    "few": tuple(_Prompts(4 + n, (length,), 1, n % 2) for n, length in enumerate(_FEW)),
    "pairs": (_Prompts(3, _SHORT),),
    "dumps": (_Prompts(7, _SHORT, num_layers=5),),
}
_ON_TRAINED = {
    "short": (_Prompts(0, _SHORT),),
    "decode": (_Prompts(1, _DECODED),),
    "left": (_Prompts(2, _LEFT, implementation=1),),
    "long": (_Prompts(3, (500,)),),
    "few": tuple(_Prompts(4 + n, (length,), implementation=(n + 1) % 2) for n, length in enumerate(_FEW)),
    "pairs": (_Prompts(7, _SHORT, implementation=1),),
    "dumps": (_Prompts(8, _SHORT),),
}
_QUICK = ("gate_up_swapped", "router_bias_missing", "tile_twice", "weights_bfloat16")
_BACKENDS = ("cpu", "xla-cpu")
_PLAIN_PORTS = (
    f"{EXAMPLES / 'port.py'}:DecoderLayer",
    f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer",
)  # of MiniMax-M2 alone
_NUM_CLEAN_SEEDS = 5  # synthetic models that right ports run on
# Prompts of the right ports on a trained model.
_CLEAN = ((1,), (4,), (24, 7), _SHORT, (500,))
# Numbers of ranks, by prompts. Ranks are processes, and flex attention is compiled for each length, which takes half a
# minute: few prompts have them.
_NUM_RANKS = {(4,): (2,), _SHORT: (2, 4)}
_LATER = f"{EXAMPLES / 'transformers_port.py'}:LaterPositions"
_FLEX = f"{EXAMPLES / 'transformers_port.py'}:FlexAttention"


def plan_quickly() -> Iterator[AnyRun]:
    """Plan a few mistakes on a small model; they run in seconds."""
    request = BaselineRequest(name="quick", seed=0, lengths=(24, 7), num_layers=2)
    yield from plan_plants(request, fit_plants(choose_plants(_QUICK), ModelGraph()), backend="cpu")


def plan_part(part: str, plants: Sequence[Plant], *, family: Family, asks_names: bool) -> Iterator[AnyRun]:
    """Plan one of `PARTS` on synthetic models of a family.

    In `short` and `far` the diagnosis may be asked for names, which takes longer than all else.
    """
    graph = SyntheticModel.toy(family).spec().graph
    if part == "clean":
        yield from _plan_clean_synthetic(family, graph)
    if not _can_run(part, graph):
        return
    for request in _on_synthetic(part):
        of_family = _of_family(request, family)
        yield from _plan_on(of_family, part, fit_plants(plants, graph), asks_names=asks_names)


def _can_run(part: str, graph: ModelGraph) -> bool:
    """Decide whether rows of a part may be given to models: where blocks of keys are chosen, rows begin at 0."""
    return graph.most_keys is None or part not in ("left", "far")


def _of_family(request: BaselineRequest, family: Family) -> BaselineRequest:
    """Return the request with a synthetic model of a family."""
    if family is MINIMAX_M2:
        return request
    model = SyntheticModel.toy(family).resized(num_hidden_layers=max(request.num_layers, 2))
    return replace(
        request,
        name=f"{family.toy_preset}-{request.name}",
        shape=model,
        num_layers=model.num_hidden_layers,
        padding_side=request.padding_side if _can_run("left", model.spec().graph) else "right",
    )


def plan_part_on_model(
    part: str, plants: Sequence[Plant], model: TrainedModel, *, asks_names: bool
) -> Iterator[AnyRun]:
    """Plan one of `PARTS` on a trained model. On XLA only right ports run, in the part `clean`.

    Plants that cannot show are left out. In `short` the diagnosis may be asked for names.
    """
    graph = ModelSpec.from_folder(Path(model.folder)).graph
    if part == "clean":
        yield from _plan_clean_trained(model, graph)
    if not _can_run(part, graph):
        return
    for request in _on_trained(part, model):
        yield from _plan_on(request, part, fit_plants(plants, graph), asks_names=asks_names)


def name_left_out(plants: Sequence[Plant], model: TrainedModel) -> tuple[str, ...]:
    """Name the plants that cannot show on a model: mistakes in reading FP8, if it is stored in BF16."""
    left_out = (plant.name for plant in plants if plant.needs_fp8 and not model.is_fp8)
    return tuple(dict.fromkeys(left_out))


def _plan_on(
    request: BaselineRequest, part: str, plants: Sequence[Plant], *, asks_names: bool
) -> Iterator[AnyRun]:
    """Plan the plants of a part on one of its baselines."""
    shown = tuple(plant for plant in plants if may_show(plant, request))
    if part == "decode":
        yield from plan_decoding(request, shown)
    elif part == "dumps":
        yield from plan_dumps(request, shown)
    elif part == "pairs":
        yield from plan_plants(request, tuple(pair_plants(shown, seed=0)), backend="cpu")
    else:
        backend = "xla-cpu" if part == "xla" else "cpu"
        yield from plan_plants(
            request, shown, backend=backend, asks_name=asks_names and part in ("short", "far")
        )


def _on_synthetic(part: str) -> Iterator[BaselineRequest]:
    """Yield the baselines of a part on synthetic models."""
    if part == "far":
        yield _far(part, seed=4, num_layers=2)
    # "far" was planned above, and "clean" has baselines of its own.
    for prompts in _ON_SYNTHETIC.get(part, ()):
        yield BaselineRequest(
            name=f"few-{prompts.lengths[0]}" if part == "few" else part,
            seed=prompts.seed,
            lengths=prompts.lengths,
            padding_side="left" if part == "left" else "right",
            num_layers=prompts.num_layers,
        ).on_implementation(prompts.implementation)


def _on_trained(part: str, model: TrainedModel) -> Iterator[BaselineRequest]:
    """Yield the baselines of a part on a trained model; there are none for `xla` and `far`."""
    for prompts in _ON_TRAINED.get(part, ()):
        yield _trained(part, model, prompts.lengths, seed=prompts.seed, implementation=prompts.implementation)


def _far(name: str, *, seed: int, num_layers: int) -> BaselineRequest:
    """Request a synthetic baseline with mm2's default prompts."""
    *rows, _ = default_rows(SyntheticModel().spec())
    return BaselineRequest(
        name=name,
        seed=seed,
        lengths=tuple(row.length for row in rows),
        start_positions=tuple(row.start_position for row in rows),
        num_layers=num_layers,
    )


def _trained(
    part: str, model: TrainedModel, lengths: tuple[int, ...], *, seed: int, implementation: int
) -> BaselineRequest:
    """Request a baseline on a trained model; its name tells its prompts and its golden apart."""
    attention, _ = IMPLEMENTATIONS[implementation]
    return BaselineRequest(
        name=f"{model.name}-{part}-{'-'.join(map(str, lengths))}-{attention}",
        seed=seed,
        lengths=lengths,
        padding_side="left" if part == "left" else "right",
        num_layers=model.num_layers,
        trained=model,
    ).on_implementation(implementation)


def _plan_clean_synthetic(family: Family, graph: ModelGraph) -> Iterator[PlannedRun]:
    """Plan right ports on models of 16 layers, goldens of either implementation and padding, and far positions."""
    # No other part has seeds from 1000 and 2000 on.
    for seed in range(_NUM_CLEAN_SEEDS):
        request = BaselineRequest(
            name=f"clean-{seed}",
            seed=1000 + seed,
            lengths=_SHORT,
            padding_side=("right", "left")[seed % 2],
            num_layers=16,
        ).on_implementation(seed % 2)
        requests = [request]
        if _can_run("far", graph):
            requests.append(_far(f"clean-far-{seed}", seed=2000 + seed, num_layers=4))
        for each in requests:
            of_family = _of_family(each, family)
            yield from _plan_right_ports(of_family, graph=graph, backends=_BACKENDS, ranks=(2, 4))


def _plan_clean_trained(model: TrainedModel, graph: ModelGraph) -> Iterator[PlannedRun]:
    """Plan right ports at every number of tokens, on goldens of either implementation; XLA on one of them."""
    for number, lengths in enumerate(_CLEAN):
        for implementation in range(len(IMPLEMENTATIONS)):
            yield from _plan_right_ports(
                _trained("clean", model, lengths, seed=20 + number, implementation=implementation),
                graph=graph,
                backends=_BACKENDS if (number + implementation) % 2 == 0 else ("cpu",),
                ranks=_NUM_RANKS.get(lengths, ()),
                with_flex=lengths == _SHORT,
            )


def _plan_right_ports(
    request: BaselineRequest,
    *,
    graph: ModelGraph,
    backends: tuple[str, ...],
    ranks: tuple[int, ...],
    with_flex: bool = False,
) -> Iterator[PlannedRun]:
    """Plan all right ports against a baseline, backend by backend.

    - mm2's own layers, on one rank or several
    - the example ports, and the port that mistakes are planted in
    - transformers' layer in all of its implementations, on the CPU alone
    """
    ports = clean_ports(backends, tp_degrees=ranks)
    for backend in backends:
        names = [
            f"{RANKS_PREFIX}{port.tp_degree}" if port.tp_degree > 1 else port.target
            for port in ports
            if port.backend == backend
        ]
        names.append("planted")
        names += _PLAIN_PORTS if graph == ModelGraph() else ()
        names += [_FLEX] if with_flex and backend == "cpu" else []
        for name in names:
            # Where blocks of keys are chosen, positions count from 0.
            if graph.most_keys is None or name != _LATER:
                yield PlannedRun(request=request, port=name, backend=backend)
