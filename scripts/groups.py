"""Groups of figures: the main function of a benchmark that has one file for each group.

The files lie in a folder of the benchmark's name. Each has a function `measure(scale)` that yields figures.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

from figures import Figure, benchmark_parser, names_among, print_figures

from minimax_tools.errors import Mm2Error


def run_groups(name: str, description: str | None, groups: Mapping[str, tuple[str, ...]]) -> int:
    """Measure and print; return 1 if a goal is missed, 3 if a measurement could not run, else 0.

    `name` is the benchmark's and its folder's. `description` is its help. `groups` holds names of figures by group, for
    `--only`; a group may yield more figures.
    """
    parser = benchmark_parser(description)
    parser.add_argument(
        "--only",
        type=names_among({name for group, figures in groups.items() for name in (group, *figures)}),
        metavar="NAME,...",
        help="measure these groups, or the groups of these figures (default: all)",
    )
    parser.add_argument(
        "--scale",
        choices=("full", "toy"),
        default="full",
        help="size of the measurement; toy tries the script out quickly (default: %(default)s)",
    )
    arguments = parser.parse_args()
    measured: list[Figure] = []
    try:
        for group, figures in groups.items():
            if arguments.only is None or arguments.only & {group, *figures}:
                print(f"{group} …", file=sys.stderr)
                measured += importlib.import_module(f"{name}.{group}").measure(arguments.scale)
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    return print_figures(name, measured, as_json=arguments.json)
