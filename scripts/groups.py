"""Groups of figures: a benchmark whose groups are files of one folder, each with a function `measure(scale)`."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping

from figures import Figure, benchmark_parser, names_among, print_figures

from minimax_tools.errors import Mm2Error


def run_groups(name: str, description: str | None, groups: Mapping[str, tuple[str, ...]]) -> int:
    """Measure and print; the exit code is 1 where a goal is missed, 3 where it could not run.

    Args:
        name: Name of the benchmark and of its folder.
        description: Text of its help.
        groups: Figures by group; a group may yield others beside them.
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
    found: list[Figure] = []
    try:
        for group, figures in groups.items():
            if arguments.only is None or arguments.only & {group, *figures}:
                print(f"{group} …", file=sys.stderr)
                found += importlib.import_module(f"{name}.{group}").measure(arguments.scale)
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    return print_figures(name, found, as_json=arguments.json)
