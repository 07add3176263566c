"""Damaged captures that mm2 judges as if they were whole.

A golden and a device run of a right port are damaged in each way of `damage.damages`: twins, floors, values and
inputs, with and without new digests in the manifest. The golden is certified or not.

- `wrong_things`: comparisons of a damaged capture. Each should end in exit code 3.
- `false_passes`, `blamed_ports`, `other_exits`: those that ended in exit code 0, in 1, and in another than 0, 1 or 3.
- `damage_not_named`: refusals that lack a word of `Damage.named`, such as file and layer.
- `refused_whole`: whole captures that were refused.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from damage.captures import STATES, CommandOutcome, make_captures
from damage.damages import DAMAGES, Damage
from faults.tally import PASSED, TRIED
from figures import Figure, benchmark_parser, print_figures


def main() -> int:
    """Damage, compare and print; return 1 if a goal is missed, else 0."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--states", nargs="+", choices=STATES, default=STATES, help="states of the golden (default: all)"
    )
    parser.add_argument("--damages", nargs="*", metavar="NAME", help="damages (default: all)")
    arguments = parser.parse_args()
    codes, num_refused_whole, num_unnamed = [], 0, 0
    with tempfile.TemporaryDirectory(prefix="mm2-damage-") as folder:
        captures, scratch = make_captures(Path(folder)), Path(folder, "scratch")
        for state in arguments.states:
            num_refused_whole += captures.judge(state, None, scratch).exit_code != 0
            for damage in DAMAGES:
                if arguments.damages and damage.name not in arguments.damages:
                    continue
                outcome = captures.judge(state, damage, scratch)
                codes.append(outcome.exit_code)
                is_named = _is_named(damage, outcome)
                num_unnamed += outcome.exit_code == 3 and not is_named
                if outcome.exit_code != 3 or not is_named:
                    print(f"{state}: {damage.name}: exit code {outcome.exit_code}", file=sys.stderr)
                    print(outcome.text if outcome.exit_code == 3 else "", file=sys.stderr)
    figures = [
        Figure.plain(TRIED, len(codes)),
        Figure.exactly(PASSED, codes.count(0), 0),
        Figure.exactly("blamed_ports", codes.count(1), 0),
        Figure.exactly("other_exits", sum(code not in (0, 1, 3) for code in codes), 0),
        Figure.exactly("damage_not_named", num_unnamed, 0),
        Figure.exactly("refused_whole", num_refused_whole, 0),
    ]
    return print_figures("damage", figures, as_json=arguments.json)


def _is_named(damage: Damage, outcome: CommandOutcome) -> bool:
    """Decide whether a refusal contains the words that the damage asks for."""
    # Without line breaks, which fall anywhere.
    text = " ".join(outcome.text.split())
    return all(word in text for word in damage.named)


if __name__ == "__main__":
    sys.exit(main())
