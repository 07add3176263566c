"""Whole ports searched by `mm2-test bisect --whole`: right ones, and ones with a mistake in one layer.

    python scripts/bench_replacement.py                                 the trained model of the tests
    python scripts/bench_replacement.py --model MODEL --mistakes 20     another checkpoint, fewer mistakes

A right port is searched at every layer, since each run may raise a false alarm. A mistake is planted in a layer drawn
at random, and searched by bisection; if that sees nothing, at every layer. It is *found* if its layer is named, alone
or among several suspects, *misplaced* if other parts are, and *unseen* if the search passes.
"""

from __future__ import annotations

import random
import sys
import tempfile
from argparse import Namespace
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench_logits import Ground, draw_rows
from faults.model_ports import LAYER_VARIABLE, MISTAKE_VARIABLE, PORTS, RIGHT_MODELS
from faults.plant import Plant
from faults.planted import MISTAKES
from figures import Figure, benchmark_parser, print_figures

from minimax_tools.model.spec import ModelSpec
from minimax_tools.text_enum import TextEnum

_TRAINED = Path(__file__).parents[1] / "tests" / "models" / "learned"
_NUM_ROWS, _LENGTHS = 3, (12, 60)
# Not searched: ports whose layers are not called as modules, and a cache in FP8, whose error is no rounding of BF16.
_LEFT_OUT = {
    "traced_black_box",
    "transformers_black_box",
    "compiled_eager",
    "compiled_aot_eager",
    "cache_fp8_with_scales",
}
_RIGHT = tuple(port.target for port in RIGHT_MODELS if port.num_ranks == 1 and port.name not in _LEFT_OUT)


class Outcome(TextEnum):
    """Answer of a search to a planted mistake."""

    FOUND = "found"
    FOUND_AT_EVERY_LAYER = "found at every layer"
    AMONG_OTHERS = "found among several suspects"
    MISPLACED = "misplaced"
    UNSEEN = "unseen"


def main() -> int:
    """Search all ports and print the figures; 1 if a goal is missed."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--model", type=Path, default=_TRAINED, help="checkpoint (default: the tests' model)")
    parser.add_argument("--seeds", type=int, default=2, help="number of goldens (default: %(default)s)")
    parser.add_argument(
        "--mistakes", type=int, default=60, help="mistakes, drawn at random (default: %(default)s)"
    )
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        grounds = [
            Ground.of_rows(
                arguments.model,
                Path(scratch),
                draw_rows(arguments.model, seed, number=_NUM_ROWS, lengths=_LENGTHS),
                seed=seed,
            )
            for seed in range(arguments.seeds)
        ]
        figures = [*right_figures(grounds), *wrong_figures(grounds[0], arguments)]
    return print_figures("replacement", figures, as_json=arguments.json)


def right_figures(grounds: list[Ground]) -> Iterator[Figure]:
    """Search right ports at every layer of every golden."""
    shares, blamed = [], 0
    for ground in grounds:
        for target in _RIGHT:
            record = _search(ground, target, "--exhaustive", name=Path(target).name.replace(":", "_"))
            blamed += record["verdict"] == "fail"
            shares += [run["error_of_limit"] for run in record["runs"]]
            _tell(f"{Path(target).name}: {record['verdict']}, up to {max(shares):.3f}")
    yield Figure.plain("right ports: searches", len(grounds) * len(_RIGHT))
    yield Figure.plain("right ports: runs", len(shares))
    yield Figure.at_most("right ports: searches that blame a part", blamed, 0)
    for name, share in (("largest", max(shares)), ("second largest", sorted(shares)[-2])):
        yield Figure.plain(f"right ports: {name} share of a run's limit", share)


def wrong_figures(ground: Ground, arguments: Namespace) -> Iterator[Figure]:
    """Search mistakes, each in a layer drawn at random."""
    draw = random.Random(0)
    num_layers = ModelSpec.from_folder(ground.model).num_hidden_layers
    shown = [plant for plant in MISTAKES if _shows(plant)]
    outcomes: Counter[Outcome] = Counter()
    for plant in draw.sample(shown, min(arguments.mistakes, len(shown))):
        layer = draw.randrange(num_layers)
        outcome = search_mistake(ground, plant, layer)
        outcomes[outcome] += 1
        _tell(f"{plant} in layer {layer}: {outcome}")
    total = outcomes.total()
    yield Figure.plain("mistakes", total)
    for outcome in Outcome:
        if outcome is Outcome.MISPLACED:
            yield Figure.at_most(f"mistakes {outcome}", outcomes[outcome], 0)
        else:
            yield Figure.plain(f"mistakes {outcome}", outcomes[outcome])


def search_mistake(ground: Ground, plant: Plant, layer: int) -> Outcome:
    """Search a mistake by bisection and, if that sees nothing, at every layer."""
    variables = {MISTAKE_VARIABLE: str(plant), LAYER_VARIABLE: str(layer)}
    for words, outcome in (
        ((), Outcome.FOUND),
        (("--exhaustive",), Outcome.FOUND_AT_EVERY_LAYER),
    ):
        name = f"{plant}_{layer}{''.join(words)}".replace("/", "_")
        target = f"{PORTS / 'layers.py'}:WrongLayer"
        record = _search(ground, target, *words, name=name, variables=variables)
        if record["verdict"] == "fail":
            blamed = [blame["layer"] for blame in record["blame"]]
            if layer not in blamed:
                return Outcome.MISPLACED
            return outcome if len(blamed) == 1 else Outcome.AMONG_OTHERS
    return Outcome.UNSEEN


def _search(
    ground: Ground, target: str, *words: str, name: str, variables: dict[str, str] | None = None
) -> Any:
    directory = ground.scratch / f"{ground.golden.name}_{name}"
    return ground.run(
        "bisect", target, "--whole", "--output-dir", str(directory), *words, variables=variables
    )


def _shows(plant: Plant) -> bool:
    """True for a mistake that short prompts without padding on the left can show."""
    needs = (plant.needs_left_padding, plant.needs_far_positions, plant.needs_fp8)
    return plant.prefills and not any(needs)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
