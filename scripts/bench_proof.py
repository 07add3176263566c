"""Proofs of planted mistakes: how many named ones are proved, and whether a wrong name ever is.

- Each mistake of the catalogue is planted in a plain PyTorch port, on small synthetic models. What `mm2-diagnose` names
  is undone in the port, as `mm2-diagnose --prove` does.
- Three other names are undone in each port too: two that begin at the sites of the mistake, if there are so many.
- Of two mistakes in one port, each is undone alone, and then both.
- Black boxes are the same ports with nothing shown but the output.

    python scripts/bench_proof.py --json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.plant import Plant, pair_plants
from faults.planted import choose_plants
from faults.proofs import ProofCase, Proofs, can_be_undone
from faults.runs import may_show
from figures import Figure, benchmark_parser, print_figures

from compare.diagnosis.proof import ProofOutcome, ProofWay
from neuron.devices.runtime import Runtime, open_runtime

PARTS = ("single", "pairs", "black-box")
# A plant runs on the first baseline on which it can show.
_BASELINES = (
    BaselineRequest(name="short", seed=0, lengths=(96, 61, 7), num_layers=2),
    BaselineRequest(name="left", seed=1, lengths=(80, 33, 7), padding_side="left", num_layers=2),
    BaselineRequest(
        name="far",
        seed=4,
        lengths=(70, 33),
        padding_side="left",
        start_positions=(0, 4092),
        num_layers=2,
    ),
)


def main() -> int:
    """Run and print; return 1 if a goal is missed, else 0."""
    arguments = _parse_arguments()
    cases: list[ProofCase] = []
    unnamed: list[str] = []
    plants = [plant for plant in choose_plants(arguments.mistakes) if can_be_undone(plant)]
    with tempfile.TemporaryDirectory(prefix="mm2-proofs-") as scratch, open_runtime("cpu") as runtime:
        for request, on_baseline in itertools.groupby(
            sorted(map(_assign, plants), key=_by_baseline), key=lambda assigned: assigned[0]
        ):
            with open_baseline(_BASELINES[request], Path(scratch)) as baseline:
                of_baseline = [plant for _, plant in on_baseline]
                for part in arguments.parts:
                    for found in _run_part(part, of_baseline, baseline, runtime, Path(scratch) / "run"):
                        cases += found
                        unnamed += [] if any(case.kind == "named" for case in found) else ["one"]
    return print_figures("proof", list(give_figures(cases, num_unnamed=len(unnamed))), as_json=arguments.json)


def give_figures(cases: Sequence[ProofCase], *, num_unnamed: int) -> Iterator[Figure]:
    """Yield how the named mistakes were proved, and the number of wrong names that were."""
    for is_black_box in (False, True):
        named = [case for case in cases if case.kind == "named" and case.is_black_box is is_black_box]
        if not named:
            continue
        view = "black boxes: " if is_black_box else ""
        outcomes = Counter(case.proof.outcome for case in named)
        ways = Counter(case.proof.way for case in named if case.proof.is_proved)
        yield Figure.plain(f"{view}named mistakes", len(named))
        yield Figure.plain(f"{view}proved", outcomes[ProofOutcome.PROVED])
        for way in (ProofWay.WEIGHTS, ProofWay.STAGE, ProofWay.WEIGHTS_AND_STAGE):
            yield Figure.plain(f"{view}proved by {way}", ways[way])
        yield Figure.plain(f"{view}not proved", outcomes[ProofOutcome.NOT_PROVED])
        yield Figure.plain(f"{view}not provable", outcomes[ProofOutcome.NOT_PROVABLE])
    if num_unnamed:
        yield Figure.plain("ports that the diagnosis has no name for", num_unnamed)
    for kind, words in (("wrong", "wrong names"), ("half", "halves of two mistakes")):
        tried = [case for case in cases if case.kind == kind]
        if tried:
            yield Figure.plain(f"{words} tried", len(tried))
            yield Figure.exactly(f"{words} proved", sum(case.proof.is_proved for case in tried), 0)
    halves = [case for case in cases if case.kind == "half"]
    if halves:
        yield Figure.plain(
            "halves after which the other is named", sum(bool(case.proof.remaining) for case in halves)
        )


def _run_part(
    part: str, plants: Sequence[Plant], baseline: Baseline, runtime: Runtime, directory: Path
) -> Iterator[list[ProofCase]]:
    """Yield the cases of each port of a part."""
    chosen = pair_plants(plants, seed=0) if part == "pairs" else plants
    for plant in chosen:
        started_s = time.perf_counter()
        proofs = Proofs(
            plant, baseline, runtime=runtime, directory=directory, is_black_box=part == "black-box"
        )
        found = list(proofs.named())
        found += proofs.halves() if part == "pairs" else proofs.wrong(seed=0)
        for case in found:
            print(case, case.proof.reason, file=sys.stderr)
        print(f"  {plant}: {time.perf_counter() - started_s:.1f} s", file=sys.stderr, flush=True)
        yield found


def _assign(plant: Plant) -> tuple[int, Plant]:
    """Return the number of the first baseline on which a plant can show, and the plant."""
    return next(number for number, request in enumerate(_BASELINES) if may_show(plant, request)), plant


def _by_baseline(assigned: tuple[int, Plant]) -> int:
    return assigned[0]


def _parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--mistakes", nargs="*", default=(), metavar="NAME", help="mistakes to plant (default: all)"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
