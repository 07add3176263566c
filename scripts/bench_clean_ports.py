"""Right ports, judged: each verdict other than `pass` is a false alarm, printed with its blame.

scripts/calibrate.py fits the limits to right ports too. So choose other seeds and prompts than it had.
"""

from __future__ import annotations

import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

from clean_ports import CleanModel, add_options, clean_ports, combine_settings, parse_lengths
from figures import Figure, benchmark_parser, print_figures

from compare.comparer import compare_captures
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.results.results import Comparison, Verdict


def port_figures(name: str, comparisons: Sequence[Comparison]) -> list[Figure]:
    """Return the distance of one kind of right port to its limits, and its false alarms."""
    sites = [site for comparison in comparisons for site in comparison.sites]
    routings = [site.routing for site in sites if site.routing is not None]
    num_tokens = sum(routing.num_tokens for routing in routings)
    flipped = sum(routing.num_flipped for routing in routings) / max(num_tokens, 1)
    unexplained = sum(routing.num_unexplained for routing in routings)
    alarms = sum(comparison.verdict is not Verdict.PASS for comparison in comparisons)
    return [
        Figure.plain(f"{name}: layers judged", sum(len(comparison.layers) for comparison in comparisons)),
        Figure.plain(f"{name}: largest ρ", max(site.noise.whole for site in sites if site.noise)),
        Figure.at_most(
            f"{name}: largest share of a limit", max(s.nearest.excess for s in sites if s.nearest), 1.0
        ),
        Figure.plain(f"{name}: tokens with flipped experts, %", 100 * flipped),
        Figure.exactly(f"{name}: flips not explained", unexplained, wanted=0),
        Figure.exactly(f"{name}: false alarms of {len(comparisons)}", alarms, wanted=0),
    ]


def main() -> int:
    """Measure and print."""
    parser = benchmark_parser(__doc__)
    add_options(parser, seeds=[10, 11, 12], tp_degrees=[])
    parser.add_argument(
        "--lengths",
        type=parse_lengths,
        default=(),
        help="tokens of the prompts (default: mm2's default rows)",
    )
    arguments = parser.parse_args()
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    ports = clean_ports(arguments.backends, tp_degrees=arguments.tp_degrees)
    comparisons: dict[str, list[Comparison]] = defaultdict(list)  # by port and mode, isolated or chained
    settings = combine_settings(arguments.shapes, arguments.seeds, [arguments.lengths])
    for setting in settings:
        with tempfile.TemporaryDirectory() as scratch:
            clean = CleanModel.build(setting, Path(scratch))
            for port, mode, run in clean.run_ports(ports, Path(scratch) / "run"):
                comparison = compare_captures(
                    clean.golden,
                    run,
                    criteria=criteria,
                    layer_pattern="layer_*",
                    weights=CheckpointWeights(model=str(clean.folder)),
                )
                comparisons[f"{port}, {mode}"].append(comparison)
                print(f"{setting}: {port}, {mode}: {comparison.verdict} {comparison.blame}", file=sys.stderr)
    figures = [figure for name in sorted(comparisons) for figure in port_figures(name, comparisons[name])]
    return print_figures("clean_ports", figures, as_json=arguments.json)


if __name__ == "__main__":
    sys.exit(main())
