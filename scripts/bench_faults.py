"""How many planted mistakes mm2 finds and places, how often it cries wolf, and what other tools' rules say of the same.

Mistakes that real ports had, and others, are planted in a plain PyTorch port, in early, middle and last layers, in all
rows or in decoded rows alone; each port goes through the device runner against a golden of a synthetic model, and is
judged with all sites shown and by its output alone. Beside them run ports that are right, and changes that are no
mistakes. An effect is what a mistake changes in float32, over what BF16 costs the golden at the same site.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from faults.cases import Case, Journal
from faults.plan import PARTS, plan_part, plan_quickly
from faults.planted import PLANTS, choose_plants
from faults.runs import PlannedRun, carry_out
from faults.scene import Scene, open_scene
from faults.table import render_table
from faults.tally import give_figures, misses
from figures import print_figures

from minimax_tools.errors import Mm2Error
from neuron.devices.runtime import open_runtime


def main() -> int:
    """Run what the journal lacks, and print; the exit code is 1 where a goal is missed, 3 if it could not run."""
    arguments = _parse_arguments()
    try:
        cases = run_all(list(_plan(arguments)), journal=Journal(arguments.journal))
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    for word, case in misses(cases):
        print(
            f"{word}: {case}: effect {case.effect:.3g}, blamed {case.blamed} {case.reason}", file=sys.stderr
        )
    if arguments.table:
        print(render_table(cases))
        return 0
    return print_figures("faults", list(give_figures(cases)), as_json=arguments.json)


def run_all(plan: Sequence[PlannedRun], *, journal: Journal) -> list[Case]:
    """The cases of all runs, stage by stage and backend by backend, in this process."""
    cases: list[Case] = []
    for stage, on_stage in itertools.groupby(plan, key=lambda planned: planned.stage):
        runs = list(on_stage)
        cases += [case for planned in runs for case in journal.find(repr(planned)) or ()]
        pending = [planned for planned in runs if journal.find(repr(planned)) is None]
        if not pending:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="mm2-faults-") as scratch,
            open_scene(stage, Path(scratch)) as scene,
        ):
            cases += _run_stage(pending, scene, journal=journal, directory=Path(scratch) / "run")
    return cases


def _run_stage(
    pending: Sequence[PlannedRun], scene: Scene, *, journal: Journal, directory: Path
) -> Iterator[Case]:
    for backend, on_backend in itertools.groupby(pending, key=lambda planned: planned.backend):
        with open_runtime(backend) as runtime:
            for planned in on_backend:
                started_s = time.perf_counter()
                found = carry_out(planned, scene, runtime=runtime, directory=directory)
                journal.add(repr(planned), found)
                took_s = time.perf_counter() - started_s
                verdicts = ", ".join("found" if case.is_detected else "-" for case in found)
                print(f"{planned}: {verdicts} ({took_s:.1f} s)", file=sys.stderr)
                yield from found


def _plan(arguments: argparse.Namespace) -> Iterator[PlannedRun]:
    if arguments.quick:
        yield from plan_quickly()
        return
    plants = choose_plants(arguments.mistakes)
    for part in arguments.parts:
        yield from plan_part(
            part,
            plants,
            seed=arguments.seed,
            num_clean_seeds=arguments.clean_seeds,
            asks_names=arguments.names,
        )


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--table", action="store_true", help="print a table in Markdown instead of the figures"
    )
    parser.add_argument("--quick", action="store_true", help="a few mistakes on a small model: seconds")
    parser.add_argument(
        "--mistakes", nargs="*", default=(), metavar="NAME", help="plant these alone; all by default"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="what to run; all by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the models that mistakes are planted in")
    parser.add_argument("--clean-seeds", type=int, default=5, help="models that right ports run on")
    parser.add_argument(
        "--names",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the diagnosis for the mistake's name, which takes longer than all else",
    )
    parser.add_argument(
        "--journal", type=Path, help="a file of finished runs, which a later run goes on with"
    )
    arguments = parser.parse_args()
    unknown = set(arguments.mistakes) - {plant.name for plant in PLANTS}
    if unknown:
        parser.error(f"nothing of the name {', '.join(sorted(unknown))} is planted")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
