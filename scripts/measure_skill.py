"""Write ten planted ports for a measurement of skills/mm2.

    python scripts/measure_skill.py --output FOLDER     # cases, and what the evaluator keeps to himself
    mm2-test sweep --backend cpu --model FOLDER/evaluator/model --golden FOLDER/evaluator/hidden_golden \
        --target FOLDER/case_3/port.py:DecoderLayer     # passes at all sites if case 3 is repaired

An agent gets one folder, `FOLDER/case_3`: a checkpoint, its golden, and `port.py` with one mistake. It works in that
folder. It must not see the other cases, since their differences tell the mistakes, nor `FOLDER/evaluator`: the key, and
a golden of other tokens by which a repaired port is judged. A repaired port lies where the wrong one lay.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path

from peaks import package_environment
from skill_ports.cases import CASES, right_source

# Lengths of the random prompts, in tokens, and their seeds. Those of the hidden golden are others.
_GOLDENS = {"golden": ("48,33", "0"), "hidden_golden": ("61,40", "7")}


def main() -> int:
    """Write ten cases, a checkpoint with a golden for each, and the evaluator's key."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="new folder of all cases")
    output = parser.parse_args().output
    evaluator = output / "evaluator"
    make_material(evaluator)
    for number, case in enumerate(CASES, start=1):
        folder = output / f"case_{number}"
        folder.mkdir()
        (folder / "port.py").write_text(case.source, encoding="utf-8")
        for name in ("model", "golden"):
            shutil.copytree(evaluator / name, folder / name)
    key = [
        {
            "case": number,
            "what": case.what,
            "mistake": case.mistake,
            "wrong": case.wrong,
            "repair": case.right,
        }
        for number, case in enumerate(CASES, start=1)
    ]
    (evaluator / "key.json").write_text(json.dumps(key, indent=2) + "\n", encoding="utf-8")
    (evaluator / "right_port.py").write_text(right_source(), encoding="utf-8")
    print(f"{output}: {len(CASES)} cases; the key is {evaluator / 'key.json'}")
    return 0


def make_material(folder: Path) -> None:
    """Make the toy checkpoint, its golden, and a second golden for the evaluator."""
    folder.mkdir(parents=True)
    commands: list[tuple[str, ...]] = [
        ("minimax_tools", "synthesize", "--output", "model", "--num-hidden-layers", "3")
    ]
    for golden, (lengths, seed) in _GOLDENS.items():
        rows = ("--seq-len", lengths, "--seed", seed, "--output-dir", golden)
        commands.append(("gpu_reference", "extract-all", "--model", "model", *rows, "--certify"))
    for package, *words in commands:
        # In this folder: a golden records its checkpoint as it was named, and must not name another folder.
        subprocess.run(
            [sys.executable, "-m", package, *words, "--quiet"],
            cwd=folder,
            env=package_environment(),
            stdout=subprocess.DEVNULL,
            check=True,
        )


if __name__ == "__main__":
    sys.exit(main())
