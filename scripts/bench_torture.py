"""Killed commands, great sizes and many runs: what mm2 promises of each, tried many times.

Every part keeps one promise. It makes what it needs, damages it, runs the commands, and counts the checks and those
that broke the promise. Each broken check is told on stderr. Parts: see `torture/`.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from figures import Figure, benchmark_parser, print_figures
from torture.deaths import run_deaths
from torture.memory import run_memory
from torture.soak import run_soak
from torture.tally import Tally

# A part takes an empty folder and a seed.
PARTS: Mapping[str, Callable[[Path, int], Tally]] = {
    "deaths": run_deaths,
    "memory": run_memory,
    "soak": run_soak,
}


def main() -> int:
    """Run the parts and print their counts; return 1 if a promise was broken, else 0."""
    parser = benchmark_parser(__doc__, scratch="room for large files")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=tuple(PARTS), help="default: all")
    parser.add_argument("--seed", type=int, default=0, help="of everything that is drawn (default: 0)")
    arguments = parser.parse_args()
    figures = []
    for name in arguments.parts:
        with tempfile.TemporaryDirectory(prefix=f"mm2-{name}-", dir=arguments.scratch) as folder:
            tally = PARTS[name](Path(folder), arguments.seed)
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
