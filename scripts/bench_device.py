"""The device side: graphs and time of a sweep, regrouping against memcpy, and how many runs a bisection takes.

| group | what it measures |
|---|---|
| sweeping | graphs of 62 layers, compiles after the first, and a sweep's time over a bare loop's |

Exit code 1 where a goal is missed, 2 for wrong usage, 3 where it could not run.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator, Mapping
from types import MappingProxyType

from figures import Figure, print_figures

from minimax_tools.errors import Mm2Error

# Each group is the file of its name in device/, and gives these figures and some beside them.
GROUPS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "sweeping": ("graphs_for_62_layers", "compiles_after_first_layer", "sweep_over_bare"),
    }
)


def main() -> int:
    """Measure, print, and end with 1 if a goal is missed."""
    arguments = _parse_arguments()
    try:
        figures = list(_measure(arguments.only, arguments.scale))
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    return print_figures("device", figures, as_json=arguments.json)


def _measure(only: set[str] | None, scale: str) -> Iterator[Figure]:
    for group, names in GROUPS.items():
        if only is None or only & {group, *names}:
            print(f"{group} …", file=sys.stderr)
            yield from importlib.import_module(f"device.{group}").measure(scale)


def _parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--only",
        type=_parse_only,
        metavar="NAME,...",
        help="measure these groups, or what gives these figures",
    )
    parser.add_argument(
        "--scale", choices=("full", "toy"), default="full", help="toy tries the script out in seconds"
    )
    return parser.parse_args()


def _parse_only(text: str) -> set[str]:
    names = {name for name in text.split(",") if name}
    known = {name for group, figures in GROUPS.items() for name in (group, *figures)}
    unknown = names - known
    if unknown:
        raise argparse.ArgumentTypeError(
            f"no figure {', '.join(sorted(unknown))}: choose of {', '.join(sorted(known))}"
        )
    return names


if __name__ == "__main__":
    sys.exit(main())
