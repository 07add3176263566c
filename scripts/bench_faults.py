"""Planted mistakes that mm2 finds and places, its false alarms, and the answers of other tools' rules.

- Mistakes of real ports, and others, are planted in a plain PyTorch port: in early, middle and last layers, in all
  tokens or in decoded ones alone. Right ports, and changes that are no mistakes, run beside them.
- Ports run against goldens of synthetic models, and of the trained models of `--model`, on text not used in training.
- Each run is judged with all sites shown, by its output alone, and chained as other tools dump a whole model.
  A `Case` is a judged layer of a run, a `DumpCase` a judged dump.
- The effect of a mistake is its change in float32, over the noise floor of the golden at the same site.

    python scripts/bench_faults.py --model models/a models/b --no-synthetic --journal runs.jsonl --json
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from faults.baseline import Baseline, TrainedModel, open_baseline
from faults.cases import Case, DumpCase
from faults.dump_runs import PlannedDump, carry_out_dump
from faults.journal import Journal
from faults.plan import PARTS, AnyRun, name_left_out, plan_part, plan_part_on_model, plan_quickly
from faults.planted import choose_plants
from faults.runs import carry_out
from faults.tally import dump_misses, give_dump_figures, give_figures, give_pass_figures, misses
from figures import benchmark_parser, print_figures

from minimax_tools.errors import Mm2Error
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from neuron.devices.runtime import open_runtime

AnyCase = Case | DumpCase


def main() -> int:
    """Run what the journal lacks, and print; return 1 if a goal is missed, 3 if a run could not start, else 0."""
    arguments = _parse_arguments()
    try:
        all_cases = run_all(
            list(_plan(arguments)), journal=Journal[AnyCase](arguments.journal, Case, DumpCase)
        )
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    cases = [case for case in all_cases if isinstance(case, Case)]
    dumps = [case for case in all_cases if isinstance(case, DumpCase)]
    _print_misses(cases, dumps)
    figures = [*give_figures(cases), *give_dump_figures(dumps), *give_pass_figures(cases, dumps)]
    return print_figures("faults", figures, as_json=arguments.json)


def run_all(plan: Sequence[AnyRun], *, journal: Journal[AnyCase]) -> list[AnyCase]:
    """Return the cases of all runs; those that the journal lacks run here, baseline by baseline, backend by backend.

    A baseline is a model with its golden. The plan lists the runs of a baseline, and of a backend, one after the other.
    """
    cases: list[AnyCase] = []
    for request, on_baseline in itertools.groupby(plan, key=lambda planned: planned.request):
        runs = list(on_baseline)
        cases += [case for planned in runs for case in journal.find(repr(planned)) or ()]
        pending = [planned for planned in runs if journal.find(repr(planned)) is None]
        if not pending:
            continue
        with (
            tempfile.TemporaryDirectory(prefix="mm2-faults-") as scratch,
            open_baseline(request, Path(scratch)) as baseline,
        ):
            cases += _run_on_baseline(pending, baseline, journal=journal, directory=Path(scratch) / "run")
    return cases


def _run_on_baseline(
    pending: Sequence[AnyRun], baseline: Baseline, *, journal: Journal[AnyCase], directory: Path
) -> Iterator[AnyCase]:
    for backend, on_backend in itertools.groupby(pending, key=lambda planned: planned.backend):
        with open_runtime(backend) as runtime:
            for planned in on_backend:
                started_s = time.perf_counter()
                cases: tuple[AnyCase, ...]
                if isinstance(planned, PlannedDump):
                    cases = carry_out_dump(planned, baseline, runtime=runtime, directory=directory)
                else:
                    cases = carry_out(planned, baseline, runtime=runtime, directory=directory)
                journal.add(repr(planned), cases)
                took_s = time.perf_counter() - started_s
                verdicts = ", ".join("found" if case.is_detected else "-" for case in cases)
                print(f"{planned}: {verdicts} ({took_s:.1f} s)", file=sys.stderr)
                yield from cases


def _print_misses(cases: Sequence[Case], dumps: Sequence[DumpCase]) -> None:
    all_misses: list[tuple[str, AnyCase]] = [*misses(cases), *dump_misses(dumps)]
    for kind, case in all_misses:
        print(
            f"{kind}: {case}: effect {case.effect:.3g}, verdict {case.verdict}, blamed {case.blamed} "
            f"{case.reason}",
            file=sys.stderr,
        )


def _plan(arguments: argparse.Namespace) -> Iterator[AnyRun]:
    if arguments.quick:
        yield from plan_quickly()
        return
    plants = choose_plants(arguments.mistakes)
    if arguments.synthetic:
        family = FAMILIES[arguments.family]
        for part in arguments.parts:
            yield from plan_part(part, plants, family=family, asks_names=arguments.names)
    for folder in arguments.model:
        model = TrainedModel.open(folder)
        left_out = name_left_out(plants, model)
        if left_out:
            print(f"{model.name} is stored in BF16: left out are {', '.join(left_out)}", file=sys.stderr)
        for part in arguments.parts:
            yield from plan_part_on_model(part, plants, model, asks_names=arguments.names)


def _parse_arguments() -> argparse.Namespace:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="a few mistakes on a small model: seconds")
    parser.add_argument(
        "--mistakes", nargs="*", default=(), metavar="NAME", help="mistakes to plant (default: all)"
    )
    parser.add_argument(
        "--parts", nargs="+", choices=PARTS, default=PARTS, help="parts to run (default: all)"
    )
    parser.add_argument(
        "--model",
        nargs="+",
        type=Path,
        default=(),
        metavar="DIR",
        help="folders of trained models with held_out.txt, on which all parts run too (default: none)",
    )
    parser.add_argument(
        "--synthetic",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="run on synthetic models; --no-synthetic runs on the models of --model alone",
    )
    parser.add_argument(
        "--family",
        choices=FAMILIES,
        default=MINIMAX_M2.model_type,
        help="model type of the synthetic models (default: %(default)s)",
    )
    parser.add_argument(
        "--names",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="ask the diagnosis for the name of the mistake, which takes longer than all else",
    )
    parser.add_argument(
        "--journal", type=Path, help="file of finished runs; a later call goes on from there (default: none)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
