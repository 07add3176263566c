"""The commands that the pages show for the toy, run in the order of each page."""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.machine.size import format_size
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Verdict
from minimax_tools.synthetic.toy_model import PRESETS, TokenIds

REPOSITORY = Path(__file__).parents[1]

SKILL = REPOSITORY / "skills" / "mm2" / "SKILL.md"
PAGES = (
    "golden",
    "machines",
    "ports",
    "torch-neuron",
    "verdicts",
    "report",
    "diagnosis",
    "ranks-and-decoding",
    "several-boxes",
    "troubleshooting",
    "command-line",
)

# Blocks of a page that need what is not on this machine: the hub, the reader's own files, an installation.
NOT_HERE = ("MiniMaxAI/", "hf://", "/data/", "my_port.py", "their_dump", "pip install")

# The port that these pages run is wrong on purpose, so its verdict is `fail`.
WRONG_PORT = "swapped_port.py"
JUDGES_A_RUN = ("mm2-compare", "mm2-diagnose")

# A toy, its golden, and the run of the wrong port: what `golden` and `ports` make, and the other pages take.
CAPTURES = f"""
mm2-split synthesize --output model --num-hidden-layers 8
mm2-gpu extract-all --model model --seq-len 96,61
mm2-test sweep --model model --golden mm2-captures/gpu_reference/full_model \
    --target scripts/examples/{WRONG_PORT}:DecoderLayer --backend cpu
"""

_BLOCK = re.compile(r"^```(?P<language>bash|text)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A bash block of a page, and the output that the page shows behind it."""

    commands: str
    output: str


def blocks(page: str) -> Iterator[Block]:
    text = (SKILL if page == "skill" else REPOSITORY / "docs" / f"{page}.md").read_text()
    found = [*_BLOCK.finditer(text), None]
    for block, following in itertools.pairwise(found):
        assert block is not None
        if block["language"] == "bash" and not any(word in block["text"] for word in NOT_HERE):
            shown = following["text"] if following is not None and following["language"] == "text" else ""
            yield Block(block["text"], shown)


def outputs(text: str) -> Iterator[Block]:
    """Yield each bash block of a page with all the output that the page shows before its next one."""
    _, *parts = re.split(r"^```bash\n", text, flags=re.MULTILINE)
    for part in parts:
        commands, _, behind = part.partition("```\n")
        shown = [block["text"] for block in _BLOCK.finditer(behind) if block["language"] == "text"]
        yield Block(commands, "".join(shown))


def command_lines(text: str) -> list[str]:
    return [line for line in text.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def run(line: str, folder: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    return subprocess.run(
        ["bash", "-c", line], cwd=folder, env=environment, capture_output=True, text=True, timeout=900
    )


def expected_code(line: str) -> int:
    is_judged = WRONG_PORT in line or line.startswith(JUDGES_A_RUN)
    # With its mistake undone the wrong port is right.
    return int(is_judged and not {"--list", "--undo"} & set(shlex.split(line)))


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    (folder / "scripts").symlink_to(REPOSITORY / "scripts")
    for line in command_lines(CAPTURES):
        done = run(line, folder)
        assert done.returncode == expected_code(line), done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_page_does_what_it_shows(page: str, captures: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(captures, tmp_path / "reader", symlinks=True)
    # A page that makes the model itself begins without one.
    if any("mm2-split synthesize" in block.commands for block in blocks(page)):
        shutil.rmtree(folder / "model")
        shutil.rmtree(folder / "mm2-captures")
    assert list(blocks(page))
    for block in blocks(page):
        printed = ""
        for line in command_lines(block.commands):
            done = run(line, folder)
            printed += done.stdout
            assert done.returncode == expected_code(line), f"{line}\n{done.stdout}{done.stderr}"
        for shown in block.output.splitlines():
            assert words(shown) in words(printed), f"{block.commands}\nshows {shown!r}, printed\n{printed}"


@pytest.mark.slow
def test_goldens_travel_as_their_page_shows(s3: object, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    lines = [line for block in blocks("goldens-travel") for line in command_lines(block.commands)]
    assert {"publish", "show", "single-layer", "sweep", "mm2-compare", "cache"} <= set(
        " ".join(lines).split()
    )
    for line in lines:
        done = run(line, tmp_path)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_skill_leads_from_a_wrong_port_to_a_right_one(tmp_path: Path) -> None:
    right = (REPOSITORY / "scripts" / "skill_ports" / "layer.py").read_text()
    wrong = right.replace("self.base = config.rope_theta", "self.base = 10000.0")
    assert wrong != right
    (tmp_path / "port.py").write_text(wrong)
    lines = [line for block in blocks("skill") for line in command_lines(block.commands)]
    programs = {line.split("--")[0].strip() for line in lines}
    assert {"mm2-test weights", "mm2-test sweep", "mm2-diagnose", "mm2-test full"} <= programs
    for line in lines:
        done = run(line, tmp_path)
        # mm2-test weights sees no wrong weight: it only warns that the forward differs.
        judges = ("port.py" in line and "weights" not in line) or line.startswith("mm2-diagnose")
        assert done.returncode == int(judges), f"{line}\n{done.stdout}{done.stderr}"
    named = run(next(line for line in lines if line.startswith("mm2-diagnose")), tmp_path)
    assert "rope_theta" in named.stdout
    (tmp_path / "port.py").write_text(right)
    for line in lines:
        if "port.py" in line:
            done = run(line, tmp_path)
            assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"


@pytest.mark.slow
def test_walkthrough_leads_from_two_mistakes_to_a_right_port(tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    page = REPOSITORY / "docs" / "walkthrough.md"
    codes = []
    for block in outputs(page.read_text()):
        printed = ""
        for line in command_lines(block.commands):
            done = run(line, tmp_path)
            printed += done.stdout
            codes += [done.returncode] if line.startswith("mm2-test port") else []
            assert done.returncode == 0 or line.startswith("mm2-test port"), f"{line}\n{done.stderr}"
        for shown in block.output.splitlines():
            assert words(shown) in words(printed), f"{block.commands}\nshows {shown!r}, printed\n{printed}"
    # Both mistakes, one of them, none.
    assert codes == [1, 1, 0]


def test_outputs_are_those_shown_before_the_next_commands() -> None:
    shown = "```bash\na\n```\nso\n```text\nb\n```\nand\n```text\nc\n```\n```bash\nd\n```\n"
    assert list(outputs(shown)) == [Block("a\n", "b\nc\n"), Block("d\n", "")]


def test_figures_of_machines_are_computed(command: Any) -> None:
    shown = [block for block in blocks("machines") if "--gpus" in block.commands]
    assert len(shown) == 3
    for block in shown:
        assert lines_not_printed(block, command) == []
        wrong = block._replace(output=block.output.replace("3:49", "3:48"))
        assert len(lines_not_printed(wrong, command)) == 1


@pytest.mark.slow
def test_sizes_of_machines_are_computed(command: Any, tmp_path: Path) -> None:
    text = (REPOSITORY / "docs" / "machines.md").read_text()
    config = PRESETS["m2"].config(
        dtype=torch.float8_e4m3fn, token_ids=TokenIds(bos_token_id=0, eos_token_id=1)
    )
    (tmp_path / "config.json").write_text(json.dumps(config))
    memory = json.loads(command(mm2_split, "memory", "--model", tmp_path, "--json", "--quiet").stdout)
    for part in (memory["total"], memory["parts"]["layer_0"]):
        assert f"{format_size(part['bfloat16_bytes'])} in BF16" in text
        assert f"{format_size(part['float32_bytes'])} in float32" in text
    assert f"{format_size(memory['total']['stored_bytes'])} in FP8" in text


def lines_not_printed(block: Block, command: Any) -> list[str]:
    """Return the lines of a block's output that `mm2-gpu check` does not print, to the digit."""
    (line,) = command_lines(block.commands)
    _, *words_of_line = shlex.split(line)
    printed = command(mm2_gpu, *words_of_line).stdout
    return [shown for shown in block.output.splitlines() if shown not in printed]


def test_skill_says_what_it_is_for_and_names_every_verdict() -> None:
    _, front, body = SKILL.read_text().split("---\n", 2)
    matter = yaml.safe_load(front)
    assert set(matter) == {"name", "description"}
    assert matter["name"] == SKILL.parent.name
    assert 0 < len(matter["description"]) <= 1024
    for verdict in Verdict:
        assert f"`{verdict}`" in body
    for site in Site:
        assert f"`{site}`" in body


def words(text: str) -> str:
    """Leave out figures, which change with the machine, and spaces, which change with the figures."""
    return re.sub(r"[\d\s.,×%]|e[+-]\d+", "", text)
