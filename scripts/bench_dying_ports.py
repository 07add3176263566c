"""Ports that exit, abort, crash or never end, run by each command that runs a port without a golden.

No such end may read as a pass (exit code 0) or as a port that differs (1). The error must name target and layer, and
the layers before it must be stored. Takes about five minutes on two cores.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from cpu_golden import write_model
from faults.deaths import DEATHS, LAYER, Death
from faults.tally import PASSED, TRIED
from figures import Figure, benchmark_parser, print_figures

from minimax_tools.synthetic.toy_model import SyntheticModel

_LAYER_TIMEOUT_S = 5
_SMALL_MODEL = SyntheticModel(
    hidden_size=64, num_local_experts=8, num_experts_per_tok=2, intermediate_size=64, vocab_size=512
)
_CAPTURING = {
    "multi-layer": ("--layers", f"0:{LAYER + 1}", "--backend", "cpu", "--seq-len", "12,7"),
    "full": ("--backend", "cpu", "--seq-len", "12,7"),
}
_COMMANDS = {
    **_CAPTURING,
    "trace": ("--layer", str(LAYER), "--backend", "cpu", "--seq-len", "12,7"),
    "weights": ("--layer", str(LAYER)),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """A run of a dying port by one command."""

    command: str
    death: Death
    exit_code: int
    says_pass: bool  # True if the output claims a pass
    is_named: bool  # True if the error names the target, the layer and what the port did last
    # True if the layers before the death are stored; None if none ran, or the command stores none.
    keeps_layers: bool | None


def main() -> int:
    """Run each death by each command, and print the figures; misses go to standard error."""
    parser = benchmark_parser(__doc__)
    parser.add_argument(
        "--commands",
        nargs="+",
        choices=_COMMANDS,
        default=list(_COMMANDS),
        help="commands of mm2-test (default: all)",
    )
    parser.add_argument(
        "--deaths", nargs="+", choices=[death.name for death in DEATHS], help="deaths (default: all)"
    )
    arguments = parser.parse_args()
    deaths = [death for death in DEATHS if arguments.deaths is None or death.name in arguments.deaths]
    with tempfile.TemporaryDirectory(prefix="mm2-dying-") as folder:
        model = Path(folder) / "model"
        write_model(model, _SMALL_MODEL, dtype=torch.bfloat16)
        runs = [
            _run(command, death, model=model, folder=Path(folder))
            for command in arguments.commands
            for death in deaths
        ]
    for run in runs:
        if run.exit_code != 3 or run.says_pass or not run.is_named or run.keeps_layers is False:
            print(f"MISSED: {run}", file=sys.stderr)
    return print_figures("dying_ports", give_figures(runs), as_json=arguments.json)


def give_figures(runs: list[_Run]) -> list[Figure]:
    """Return the figures of the runs."""
    kept = [run.keeps_layers for run in runs if run.keeps_layers is not None]
    figures = [
        Figure.plain(TRIED, len(runs)),
        Figure.exactly(PASSED, sum(run.exit_code == 0 or run.says_pass for run in runs), 0),
        Figure.exactly("false_fails", sum(run.exit_code == 1 for run in runs), 0),
        Figure.at_least("layer_named", sum(run.is_named for run in runs) / len(runs), 1.0),
    ]
    if kept:
        figures.append(Figure.at_least("layers_kept", sum(kept) / len(kept), 1.0))
    return figures


def _run(command: str, death: Death, *, model: Path, folder: Path) -> _Run:
    target, output = death.write(folder), folder / command / death.name
    output.parent.mkdir(exist_ok=True)
    output_option = {"trace": ("--output", output), "weights": ()}.get(command, ("--output-dir", output))
    limit = ("--layer-timeout", _LAYER_TIMEOUT_S) if death.is_endless else ()
    words = (command, "--model", model, "--target", target, *limit, *output_option)
    done = subprocess.run(
        [sys.executable, "-m", "neuron", *map(str, words), *_COMMANDS[command], "--json"],
        capture_output=True,
        text=True,
        check=False,
    )
    errors = "".join(line for line in done.stderr.splitlines() if line.startswith("Error: "))
    # A port that dies while it is imported belongs to no layer.
    names_layer = death.place == "imported" or re.search(r"layer \d", errors) is not None
    keeps_layers = None
    if command in _CAPTURING and death.is_in_forward:
        manifest = json.loads((output / "manifest.json").read_text(encoding="utf-8"))
        keeps_layers = manifest["complete_layers"] == list(range(LAYER))
    return _Run(
        command=command,
        death=death,
        exit_code=done.returncode,
        says_pass='"pass"' in done.stdout or "PASS" in done.stdout,
        is_named=names_layer and f"{death.name}.py" in errors and all(word in errors for word in death.words),
        keeps_layers=keeps_layers,
    )


if __name__ == "__main__":
    sys.exit(main())
