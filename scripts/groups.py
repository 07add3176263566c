"""Groups of figures: a benchmark whose groups are files of one folder, each with a function `measure(scale)`."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from figures import Figure, benchmark_parser, names_among, print_figures

from minimax_tools.errors import Mm2Error


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedBenchmark:
    """A benchmark and its groups.

    Args:
        name: Name of the benchmark and of its folder.
        description: Text of its help.
        groups: Figures by group; a group may yield others beside them.
    """

    name: str
    description: str
    groups: Mapping[str, tuple[str, ...]]

    def main(self) -> int:
        """Measure and print; the exit code is 1 where a goal is missed, 3 where it could not run."""
        arguments = self._parse_arguments()
        try:
            figures = list(self._measure(arguments.only, arguments.scale))
        except Mm2Error as error:
            print(f"Error: {error}", file=sys.stderr)
            return 3
        return print_figures(self.name, figures, as_json=arguments.json)

    def _measure(self, only: set[str] | None, scale: str) -> Iterator[Figure]:
        for group, names in self.groups.items():
            if only is None or only & {group, *names}:
                print(f"{group} …", file=sys.stderr)
                yield from importlib.import_module(f"{self.name}.{group}").measure(scale)

    def _parse_arguments(self) -> argparse.Namespace:
        parser = benchmark_parser(self.description)
        known = {name for group, figures in self.groups.items() for name in (group, *figures)}
        parser.add_argument(
            "--only",
            type=names_among(known),
            metavar="NAME,...",
            help="measure these groups, or the groups of these figures (default: all)",
        )
        parser.add_argument(
            "--scale",
            choices=("full", "toy"),
            default="full",
            help="size of the measurement; toy tries the script out quickly (default: %(default)s)",
        )
        return parser.parse_args()
