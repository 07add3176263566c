"""The figures of the page `machines` that a command computes, to the digit."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.machine.size import format_size
from minimax_tools.synthetic.toy_model import PRESETS
from minimax_tools.synthetic.toy_tokenizer import TokenIds

PAGE = Path(__file__).parents[1] / "docs" / "machines.md"
_CHECK = re.compile(
    r"^```bash\n(?P<command>mm2-gpu check --gpus .*)\n```\n+```text\n(?P<output>[^`]*)", re.MULTILINE
)
_SHOWN_APART = re.compile(r"^```bash\n(?P<command>mm2-gpu check --gpus .*)\n```$", re.MULTILINE)


def test_figures_of_machines_are_computed(command: Any) -> None:
    shown = list(_CHECK.finditer(PAGE.read_text()))
    assert len(shown) == len(_SHOWN_APART.findall(PAGE.read_text())) == 3
    for block in shown:
        assert lines_not_printed(block["command"], block["output"], command) == []
        wrong = block["output"].replace("3:49", "3:48")
        assert len(lines_not_printed(block["command"], wrong, command)) == 1


@pytest.mark.slow
def test_sizes_of_machines_are_computed(command: Any, tmp_path: Path) -> None:
    text = PAGE.read_text()
    config = PRESETS["m2"].config(
        dtype=torch.float8_e4m3fn, token_ids=TokenIds(bos_token_id=0, eos_token_id=1)
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = json.loads(command(mm2_split, "memory", "--model", tmp_path, "--json", "--quiet").stdout)
    for part in (memory["total"], memory["parts"]["layer_0"]):
        assert f"{format_size(part['bfloat16_bytes'])} in BF16" in text
        assert f"{format_size(part['float32_bytes'])} in float32" in text
    assert f"{format_size(memory['total']['stored_bytes'])} in FP8" in text


def lines_not_printed(line: str, output: str, command: Any) -> list[str]:
    """Return the lines of the output that `mm2-gpu check` does not print."""
    _, *words = shlex.split(line)
    printed = command(mm2_gpu, *words).stdout
    return [shown for shown in output.splitlines() if shown not in printed]
