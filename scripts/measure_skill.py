"""Write ten planted ports for a measurement of skills/mm2, and judge a repaired one.

    python scripts/measure_skill.py write --output FOLDER      # cases, and what the evaluator keeps to himself
    python scripts/measure_skill.py judge --output FOLDER 3    # exits with 0 if case 3 is repaired

An agent gets one folder, `FOLDER/case_3`: a checkpoint, its golden, and `port.py` with one mistake. It works in that
folder, with `FOLDER/bin` first in its PATH: there are mm2's commands, which are counted. It must not see the other
cases, since their differences tell the mistakes, nor `FOLDER/evaluator`: the key, and a golden of other tokens by which
a repaired port is judged. A repaired port lies where the wrong one lay.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).parent))

from skill_ports.cases import CASES, right_source
from skill_ports.command_log import read_commands, write_commands
from skill_ports.judging import GOLDEN, HIDDEN_GOLDEN, MODEL, PORT, judge_repair, make_material

_EVALUATOR, _MATERIAL, _KEY, _LOG = "evaluator", "material", "key.json", "commands.tsv"
_output_option = click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder of all cases."
)


@click.group()
def main() -> None:
    """Write planted ports, and judge repaired ones."""


@main.command("write")
@_output_option
def write_command(output: Path) -> None:
    """Write ten cases, a checkpoint with a golden for each, and the evaluator's key."""
    evaluator = output / _EVALUATOR
    evaluator.mkdir(parents=True)
    write_commands(output / "bin", evaluator / _LOG)
    make_material(evaluator / _MATERIAL, evaluator)
    for number, case in enumerate(CASES, start=1):
        folder = output / f"case_{number}"
        folder.mkdir()
        (folder / PORT).write_text(case.source, encoding="utf-8")
        for name in (MODEL, GOLDEN):
            shutil.copytree(evaluator / _MATERIAL / name, folder / name)
    (evaluator / "right_port.py").write_text(right_source(), encoding="utf-8")
    (evaluator / _KEY).write_text(json.dumps(list(_key()), indent=2) + "\n", encoding="utf-8")
    click.echo(f"{output}: {len(CASES)} cases; the key is {evaluator / _KEY}")


@main.command("judge")
@_output_option
@click.argument("number", type=click.IntRange(1, len(CASES)))
def judge_command(output: Path, number: int) -> None:
    """Judge the port of a case on tokens that the agent has not seen. Exits with 0 if it is repaired, else with 1."""
    evaluator = output / _EVALUATOR
    with tempfile.TemporaryDirectory(prefix="mm2-judge-") as directory:
        judged = judge_repair(
            output / f"case_{number}" / PORT,
            # The evaluator's own copy: an agent may have changed the other.
            model=evaluator / _MATERIAL / MODEL,
            golden=evaluator / HIDDEN_GOLDEN,
            directory=Path(directory) / "run",
        )
    state = "repaired" if judged.is_repaired else "not repaired"
    error = f" ({judged.error})" if judged.error else ""
    commands = len(read_commands(output / f"case_{number}", evaluator / _LOG))
    click.echo(
        f"case {number}: {state}: {judged.verdict}, {judged.compared} of {judged.of} sites, "
        f"{commands} commands of mm2{error}"
    )
    sys.exit(0 if judged.is_repaired else 1)


def _key() -> Iterator[dict[str, Any]]:
    for number, case in enumerate(CASES, start=1):
        yield {
            "case": number,
            "what": case.what,
            "mistake": case.mistake or None,
            "wrong": case.wrong,
            "repair": case.right,
        }


if __name__ == "__main__":
    main()
