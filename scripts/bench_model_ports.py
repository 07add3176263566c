"""Whole ports with planted mistakes, and right ones, through `mm2-test model`: a table of what it finds.

    python scripts/bench_model_ports.py                        two toy models, both backends of a CPU
    python scripts/bench_model_ports.py --backends cpu --only head_tied bucket_mask

A mistake is *detected* if the verdict is `fail`; *placed* if the first finding is at its pass, layer and site; *named*
if the first finding has its name. A right port with the verdict `fail` is a false alarm.
"""

from __future__ import annotations

import sys
import tempfile
from argparse import ArgumentParser
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import click.testing
import torch
from faults.model_judging import ModelCase, ModelGround, judge_model_port
from faults.model_ports import choose_model_ports

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

# A trained model of another shape than the synthetic one, in the repository.
_TRAINED = Path(__file__).parents[1] / "tests" / "models" / "learned"
_LENGTHS = "28,17,21"
_BACKENDS = ("cpu", "xla-cpu")


def main() -> int:
    """Run all chosen ports and print the table; 1 if a mistake was missed or a right port failed."""
    parser = ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", default=(), metavar="PORT", help="names of ports (default: all)")
    parser.add_argument("--backends", nargs="+", choices=_BACKENDS, default=_BACKENDS)
    parser.add_argument(
        "--models", nargs="+", choices=("synthetic", "trained"), default=("synthetic", "trained")
    )
    parser.add_argument("--lengths", default=_LENGTHS, help="tokens of the prompts (default: %(default)s)")
    arguments = parser.parse_args()
    cases = []
    with tempfile.TemporaryDirectory() as scratch:
        for name in arguments.models:
            ground = make_ground(name, Path(scratch), lengths=arguments.lengths)
            for backend in arguments.backends:
                for plant in choose_model_ports(arguments.only):
                    if backend not in plant.backends:
                        continue
                    directory = Path(scratch) / name / backend / plant.name
                    case = judge_model_port(plant, ground, backend=backend, directory=directory)
                    print(word_case(case), file=sys.stderr, flush=True)
                    cases.append(case)
    print(render_cases(cases))
    missed = [case for case in cases if not case.plant.is_right and not case.is_detected]
    alarms = [case for case in cases if case.plant.is_right and case.verdict in ("fail", "")]
    return 1 if missed or alarms else 0


def make_ground(name: str, scratch: Path, *, lengths: str) -> ModelGround:
    """Make a model, unless it is the trained one, and its golden."""
    model = _TRAINED
    if name == "synthetic":
        model = scratch / "model"
        synthesize(
            model, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=4_000_000, seed=0
        )
    golden = scratch / f"golden_{name}"
    arguments = ["full", "--model", str(model), "--seq-len", lengths, "--max-new-tokens", "4"]
    result = click.testing.CliRunner().invoke(mm2_gpu, [*arguments, "--output-dir", str(golden), "--quiet"])
    if result.exit_code:
        raise SystemExit(f"the golden of {name} could not be made: {result.stderr}")
    return ModelGround(name=name, model=model, golden=golden)


def word_case(case: ModelCase) -> str:
    """Return a case in a line."""
    place = "" if not case.sites else f" pass {case.number}, layer {case.layer}, {'/'.join(case.sites)}"
    found = case.error or f"{case.verdict}{place}: {case.mistake}"
    return f"{case.ground} {case.backend} {case.plant.name}: exit {case.exit_code}, {found}"


def render_cases(cases: Sequence[ModelCase]) -> str:
    """Render a row for each mistake, and one for each right port, in Markdown."""
    wrong: dict[str, list[ModelCase]] = defaultdict(list)
    right: dict[str, list[ModelCase]] = defaultdict(list)
    for case in cases:
        (right if case.plant.is_right else wrong)[case.plant.name].append(case)
    lines = ["| mistake | runs | detected | placed | named |", "|---|---|---|---|---|"]
    rows = {**wrong, "all": [case for group in wrong.values() for case in group]} if wrong else {}
    for name, group in rows.items():
        shares = (
            _share(group, lambda case: case.is_detected),
            _share(group, lambda case: case.is_placed),
            _share(group, lambda case: case.is_named),
        )
        lines.append(f"| `{name}` | {len(group)} | {' | '.join(shares)} |")
    lines += [
        "",
        "| right port | runs | pass | warn | could not be judged | false alarms |",
        "|---|---|---|---|---|---|",
    ]
    rows = {**right, "all": [case for group in right.values() for case in group]} if right else {}
    for name, group in rows.items():
        counts = [
            sum(case.verdict == verdict for case in group) for verdict in ("pass", "warn", "incomparable")
        ]
        alarms = len(group) - sum(counts)
        lines.append(f"| `{name}` | {len(group)} | {' | '.join(map(str, counts))} | {alarms} |")
    return "\n".join(lines)


def _share(cases: Sequence[ModelCase], holds: Callable[[ModelCase], bool]) -> str:
    return f"{sum(map(holds, cases))}/{len(cases)}"


if __name__ == "__main__":
    sys.exit(main())
