"""Hostile files, killed processes, odd streams and strange machines: what mm2 promises of each, tried many times.

Every part keeps one promise. It makes what it needs, damages it, runs the commands, and counts the checks and those
that broke the promise. Each broken check is told on stderr. Parts: see `torture/`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

from figures import Figure, benchmark_parser, print_figures
from torture.deaths import run_deaths
from torture.dying_ranks import run_dying_ranks
from torture.hostile_json import run_hostile_json
from torture.hostile_pickles import run_hostile_pickles
from torture.hostile_text import run_hostile_text
from torture.memory import run_memory
from torture.power_loss import run_power_loss
from torture.soak import run_soak
from torture.stops import run_stops
from torture.streams import run_streams
from torture.tally import Tally
from torture.transfers import run_transfers
from torture.unreadable_dumps import run_unreadable_dumps

# A part takes an empty folder and a seed.
PARTS: Mapping[str, Callable[[Path, int], Tally]] = {
    "json": run_hostile_json,
    "pickles": run_hostile_pickles,
    "dumps": run_unreadable_dumps,
    "text": run_hostile_text,
    "transfers": run_transfers,
    "streams": run_streams,
    "stops": run_stops,
    "deaths": run_deaths,
    "ranks": run_dying_ranks,
    "power_loss": run_power_loss,
    "memory": run_memory,
    "soak": run_soak,
}


def main() -> int:
    """Run the parts and print their counts; return 1 if a promise was broken, else 0."""
    parser = benchmark_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    parser.add_argument("--scratch", type=Path, help="folder for large files (default: the system's)")
    arguments = parser.parse_args()
    figures = []
    for name in arguments.parts:
        # A process for each: parts fork, and threads that an earlier part left do not outlive a fork.
        with (
            tempfile.TemporaryDirectory(prefix=f"mm2-{name}-", dir=arguments.scratch) as folder,
            ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool,
        ):
            tally = pool.submit(PARTS[name], Path(folder), arguments.seed).result()
        for line in tally.broken:
            print(f"{name}: {line}", file=sys.stderr)
        figures += [
            Figure.plain(f"{name}_checks", tally.num_checks),
            Figure.exactly(f"{name}_broken", len(tally.broken), 0),
            *(Figure.plain(f"{name}_{figure}", value) for figure, value in tally.figures.items()),
        ]
    return print_figures("torture", figures, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
