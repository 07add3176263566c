"""Plan: which ports run on which models, before any of them does."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clean_ports import clean_ports
from cpu_golden import IMPLEMENTATIONS
from port_runs import EXAMPLES

from faults.dump_runs import PlannedDump, plan_dumps
from faults.pairs import pair_plants
from faults.plant import Plant
from faults.planted import choose_plants
from faults.runs import RANKS, PlannedRun, plan_decoding, plan_plants, shows_on
from faults.scene import SceneRequest, TrainedModel
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.prompts import default_rows

AnyRun = PlannedRun | PlannedDump

# short: short prompts; xla: the same on XLA; decode: decoded rows; left: padding on the left; long: one long prompt.
# few: few tokens; far: default rows, with far positions; pairs: two mistakes in one port.
# dumps: chained runs of whole models; clean: right ports.
PARTS = ("short", "xla", "decode", "left", "long", "few", "far", "pairs", "dumps", "clean")
_SHORT = (96, 61, 7)
# Prompts of nearly one length: decoding starts where the shortest one has so many rows left.
_DECODED = (70, 69, 67)
_LEFT = (80, 33, 7)
# Offset of the seed, prompts, layers, and number of the golden's implementation, of parts with one synthetic model.
_SYNTHETIC = {
    "short": (0, _SHORT, 4, 0),
    "xla": (0, _SHORT, 1, 0),
    "decode": (0, _DECODED, 4, 0),
    "left": (1, _LEFT, 2, 1),
    "long": (2, (512,), 1, 0),
    "pairs": (3, _SHORT, 4, 0),
    "dumps": (7, _SHORT, 5, 0),
}
# Offset of the seed, prompts, and number of the golden's implementation, of parts with one trained model.
_TRAINED = {
    "short": (0, _SHORT, 0),
    "decode": (1, _DECODED, 0),
    "left": (2, _LEFT, 1),
    "long": (3, (500,), 0),
    "pairs": (7, _SHORT, 1),
    "dumps": (8, _SHORT, 0),
}
_FEW = ((1,), (4,), (24,))
_QUICK = ("gate_up_swapped", "router_bias_missing", "tile_twice", "weights_bfloat16")
_BACKENDS = ("cpu", "xla-cpu")
_PLAIN = ("planted", f"{EXAMPLES / 'port.py'}:DecoderLayer", f"{EXAMPLES / 'minimal_port.py'}:DecoderLayer")
# Rows of the right ports of a trained model.
_CLEAN = ((1,), (4,), (24, 7), _SHORT, (500,))
# Ranks are processes, and flex attention is compiled for each length, half a minute at a time: few rows have them.
_RANKS = {(4,): (2,), _SHORT: (2, 4)}
_FLEX = f"{EXAMPLES / 'transformers_port.py'}:FlexAttention"


def plan_quickly() -> Iterator[AnyRun]:
    """Plan a few mistakes on a small model; they run in seconds."""
    request = SceneRequest(name="quick", seed=0, lengths=(24, 7), num_layers=2)
    yield from plan_plants(request, choose_plants(_QUICK), backend="cpu")


def plan_part(
    part: str, plants: Sequence[Plant], *, seed: int, num_clean_seeds: int, asks_names: bool
) -> Iterator[AnyRun]:
    """Plan one of `PARTS` on synthetic models.

    Right ports run on `num_clean_seeds` models. In `short` and `far` the diagnosis may be asked for names, which takes
    longer than all else.
    """
    if part == "clean":
        yield from _plan_clean_synthetic(num_clean_seeds)
    for request in _synthetic(part, seed):
        yield from _plan_on(request, part, plants, seed=seed, asks_names=asks_names)


def plan_part_on_model(
    part: str, plants: Sequence[Plant], model: TrainedModel, *, seed: int, asks_names: bool
) -> Iterator[AnyRun]:
    """Plan one of `PARTS` on a trained model; XLA runs its right ports alone.

    Plants that cannot show are left out. In `short` the diagnosis may be asked for names.
    """
    if part == "clean":
        yield from _plan_clean_trained(model, seed=seed)
    for request in _on_model(part, model, seed):
        yield from _plan_on(request, part, plants, seed=seed, asks_names=asks_names)


def name_left_out(plants: Sequence[Plant], model: TrainedModel) -> tuple[str, ...]:
    """Name the plants that cannot show on a model: mistakes in reading FP8, where it is stored in BF16."""
    left = (plant.name for plant in plants if plant.needs_fp8 and not model.is_fp8)
    return tuple(dict.fromkeys(left))


def _plan_on(
    request: SceneRequest, part: str, plants: Sequence[Plant], *, seed: int, asks_names: bool
) -> Iterator[AnyRun]:
    shown = tuple(plant for plant in plants if shows_on(plant, request))
    if part == "decode":
        yield from plan_decoding(request, shown)
    elif part == "dumps":
        yield from plan_dumps(request, shown)
    elif part == "pairs":
        yield from plan_plants(request, tuple(pair_plants(shown, seed=seed)), backend="cpu")
    else:
        backend = "xla-cpu" if part == "xla" else "cpu"
        yield from plan_plants(request, shown, backend=backend, names=asks_names and part in ("short", "far"))


def _synthetic(part: str, seed: int) -> Iterator[SceneRequest]:
    """Yield the synthetic models of a part."""
    if part in _SYNTHETIC:
        offset, lengths, num_layers, golden = _SYNTHETIC[part]
        side = "left" if part == "left" else "right"
        one = SceneRequest(name=part, seed=seed + offset, lengths=lengths, num_layers=num_layers)
        yield one.changed(golden=golden, padding_side=side)
    elif part == "few":
        for place, lengths in enumerate(_FEW):
            one = SceneRequest(
                name=f"few-{sum(lengths)}", seed=seed + 4 + place, lengths=lengths, num_layers=1
            )
            yield one.changed(golden=place % 2)
    elif part == "far":
        yield _far(part, seed=seed + 4, num_layers=2)


def _on_model(part: str, model: TrainedModel, seed: int) -> Iterator[SceneRequest]:
    """Yield the rows of a part on a trained model."""
    if part in _TRAINED:
        offset, lengths, golden = _TRAINED[part]
        side = "left" if part == "left" else "right"
        yield _trained(part, model, lengths, seed=seed + offset, golden=golden, padding_side=side)
    elif part == "few":
        for place, lengths in enumerate(_FEW):
            yield _trained(part, model, lengths, seed=seed + 4 + place, golden=(place + 1) % 2)


def _far(name: str, *, seed: int, num_layers: int) -> SceneRequest:
    rows = default_rows(SyntheticModel().spec().max_position_embeddings)
    return SceneRequest(
        name=name,
        seed=seed,
        lengths=tuple(row.length for row in rows),
        start_positions=tuple(row.start_position for row in rows),
        num_layers=num_layers,
    )


def _trained(
    part: str,
    model: TrainedModel,
    lengths: tuple[int, ...],
    *,
    seed: int,
    golden: int = 0,
    padding_side: str = "right",
) -> SceneRequest:
    return SceneRequest(
        name=f"{model.name}-{part}-{'-'.join(map(str, lengths))}-{IMPLEMENTATIONS[golden][0]}",
        seed=seed,
        lengths=lengths,
        padding_side=padding_side,
        num_layers=model.num_layers,
        trained=model,
    ).changed(golden=golden)


def _plan_clean_synthetic(num_seeds: int) -> Iterator[PlannedRun]:
    """Plan right ports on models of 16 layers, on goldens of either implementation and padding, and far out."""
    for seed in range(num_seeds):
        request = SceneRequest(
            name=f"clean-{seed}",
            seed=1000 + seed,
            lengths=_SHORT,
            padding_side=("right", "left")[seed % 2],
            num_layers=16,
        ).changed(golden=seed % 2)
        yield from _plan_right_ports(request, backends=_BACKENDS, ranks=(2, 4))
        far = _far(f"clean-far-{seed}", seed=2000 + seed, num_layers=4)
        yield from _plan_right_ports(far, backends=_BACKENDS, ranks=(2, 4))


def _plan_clean_trained(model: TrainedModel, *, seed: int) -> Iterator[PlannedRun]:
    """Plan right ports at every number of tokens, on goldens of either implementation; XLA on one of them."""
    for place, lengths in enumerate(_CLEAN):
        for golden in range(len(IMPLEMENTATIONS)):
            yield from _plan_right_ports(
                _trained("clean", model, lengths, seed=seed + 20 + place, golden=golden),
                backends=_BACKENDS if (place + golden) % 2 == 0 else _BACKENDS[:1],
                ranks=_RANKS.get(lengths, ()),
                with_flex=lengths == _SHORT,
            )


def _plan_right_ports(
    request: SceneRequest, *, backends: tuple[str, ...], ranks: tuple[int, ...], with_flex: bool = False
) -> Iterator[PlannedRun]:
    """Plan all right ports on a scene, backend by backend.

    - mm2's own layers, on one rank or several
    - the example ports, and the port that mistakes are planted in
    - transformers' layer in all of its implementations, on the CPU alone
    """
    ports = clean_ports(backends, tp_degrees=ranks)
    for backend in backends:
        names = [
            f"{RANKS}{port.tp_degree}" if port.tp_degree > 1 else port.target
            for port in ports
            if port.backend == backend
        ]
        names += _PLAIN
        names += [_FLEX] if with_flex and backend == "cpu" else []
        for name in names:
            yield PlannedRun(request=request, port=name, backend=backend)
