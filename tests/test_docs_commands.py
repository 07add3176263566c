"""The commands that the pages show, run in the order of each page.

The tables say which test runs a block, or why none does; `test_docs_blocks.py` demands one of both for every block.
`test_docs.py` checks the options of every command, of excused blocks too.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from minimax_tools.capture.reader import Capture

REPOSITORY = Path(__file__).parents[1]
SKILL = "skills/mm2/SKILL.md"
CHINESE = "README.zh-CN.md"

# Which test runs the blocks of a page.
RUN_BY: Mapping[str, str] = {
    **dict.fromkeys(
        (
            "README.md",
            "docs/command-line.md",
            "docs/diagnosis.md",
            "docs/golden.md",
            "docs/formats.md",
            "docs/machines.md",
            "docs/ports.md",
            "docs/prompts.md",
            "docs/python.md",
            "docs/ranks-and-decoding.md",
            "docs/splitting.md",
            "docs/troubleshooting.md",
            "docs/verdicts.md",
            "docs/whole-ports.md",
        ),
        "test_page_does_what_it_shows",
    ),
    "docs/goldens-travel.md": "test_goldens_travel_as_their_page_shows",
    "docs/other-tools.md": "test_dumps_are_read_as_their_page_shows",
    "docs/walkthrough.md": "test_walkthrough_leads_from_two_mistakes_to_a_right_port",
    SKILL: "test_skill_leads_from_a_wrong_port_to_a_right_one",
    # They are README.md's.
    CHINESE: "test_chinese_readme_says_what_the_english_one_says",
}


class Excuse(NamedTuple):
    """The reason why no test runs the one block of a page that has the phrase."""

    page: str
    phrase: str
    reason: str


HUB = "needs the hub's model: 230 GB; the page does the same on the toy"
EIGHT_GPUS = "needs the hub's model and 8 GPUs; the page does the same on the toy"
TRAINIUM = "needs a Trainium and the hub's model; the page does the same on the toy"
BOXES = "needs torchrun on several boxes; the page does the same on one"
INSTALLS = "installs packages: see tests/test_packaging.py"

EXCUSED = (
    Excuse("README.md", "make demo", "installs mm2; tests/scripts/test_demo.py runs the demo"),
    Excuse("README.md", "pip install .  ", INSTALLS),
    Excuse("docs/golden.md", "pip install '.[golden]'", HUB),
    Excuse("docs/goldens-travel.md", "pip install '.[remote]'", INSTALLS),
    Excuse("docs/machines.md", "--device-map auto --max-memory 77GB\n", EIGHT_GPUS),
    Excuse("docs/machines.md", "MiniMaxAI/MiniMax-M2 --stream on --prefetch\n", HUB),
    Excuse("docs/machines.md", "--prefetch --memory-budget 20GB", HUB),
    Excuse("docs/machines.md", "--node small:memory=120GB", HUB),
    Excuse("docs/machines.md", "check --backend neuron-xla", TRAINIUM),
    Excuse("docs/machines.md", "check --backend neuron --seq-len", TRAINIUM),
    Excuse("docs/ports.md", "--model /data/MiniMax-M2", TRAINIUM),
    Excuse("docs/command-line.md", "pip install 'vl-convert-python", INSTALLS),
    Excuse("docs/splitting.md", "--nnodes 2", BOXES),
)

# What a block that is run must not need.
NOT_HERE = (
    "MiniMaxAI/",
    "hf://",
    "/data/",
    "/shared/",
    "my_port.py",
    "pip install",
    "--nnodes",
    "--backend neuron",
    "cuda:",
)

# The port of most pages is wrong on purpose, so its verdict is `fail`.
WRONG_PORT = "swapped_port.py"
JUDGES_A_RUN = ("mm2-compare", "mm2-diagnose")

# What stands for a reader's own things, page by page.
STAND_INS: Mapping[str, Mapping[str, str]] = {
    "README.md": {
        "MiniMaxAI/MiniMax-M2": "model",
        "my_port.py": f"scripts/examples/{WRONG_PORT}",
        "sweep_0_to_61": "sweep_0_to_7",
        # The tokens of the golden that is there already.
        "--max-memory 70GB": "--max-memory 70GB --seq-len 96,61",
    },
    "docs/formats.md": {"--run sweep_0_to_7": "--run mm2-captures/neuron/sweep_0_to_7"},
    "docs/prompts.md": {
        "MiniMaxAI/MiniMax-M2": "model",
        "my_port.py": "scripts/examples/model_port.py",
        "--wrong": "--wrong --backend cpu",
        '" 42"': '" 42" --backend cpu',
    },
    "docs/splitting.md": {"MiniMaxAI/MiniMax-M2": "model"},
}

# Commands that neither pass nor judge the wrong port, by what their line holds: their exit codes.
EXIT_CODES: Mapping[str, int] = {
    # A pipe ends as jq does.
    "| jq": 0,
    # It asks for a run by hand.
    "mm2-test replacement": 3,
    # A dump of the golden itself is right.
    "their_dump": 0,
    # Caches alone do not show what their layers were fed.
    "accuracy_report/prompt_analysis": 3,
}

# Outputs that their pages show of another run than that of the block before them, by how they begin.
OF_ANOTHER_RUN: Mapping[str, str] = {
    "docs/prompts.md": "FAIL: 2 of 24 prompts",
    "docs/whole-ports.md": "FAIL: prefill, layer 2",
}

# Files of a reader, by name.
READERS_FILES: Mapping[str, Any] = {
    "prompts.json": ["The capital of France is", "def fibonacci(n):"],
    "names.json": {"node_001": {"layer_names": ["model.norm.weight"]}},
    # A line as lm_eval writes it, of a question that was answered wrongly.
    "samples_gsm8k.jsonl": {
        "doc_id": 3,
        "target": "42",
        "arguments": {"gen_args_0": {"arg_0": "6 × 7 =", "arg_1": {"until": ["\n"]}}},
        "resps": [[" 41"]],
        "filtered_resps": ["41"],
        "filter": "strict-match",
        "metrics": ["exact_match"],
        "exact_match": 0.0,
    },
}

# A toy, its golden, and the run of the wrong port: what `golden` and `ports` make, and the other pages take.
CAPTURES = f"""
mm2-split synthesize --output model --num-hidden-layers 8
mm2-gpu extract-all --model model --seq-len 96,61
mm2-test sweep --model model --golden mm2-captures/gpu_reference/full_model \
    --target scripts/examples/{WRONG_PORT}:DecoderLayer --backend cpu
"""

# The same for the page on dumps, with prompts that fit the dump's bucket of 64 tokens.
OF_DUMPS = """
mm2-split synthesize --output model --num-hidden-layers 8
mm2-gpu extract-all --model model --seq-len 48,33
"""

_BLOCK = re.compile(r"^```(?P<language>\w+)\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)


class Block(NamedTuple):
    """A bash block of a page, and the output that the page shows behind it."""

    commands: str
    output: str


def blocks(page: str) -> Iterator[Block]:
    """Yield the blocks of a page that a test runs, stand-ins for what is not here."""
    found = [*_BLOCK.finditer((REPOSITORY / page).read_text()), None]
    for block, following in itertools.pairwise(found):
        assert block is not None
        if block["language"] == "bash" and not excuses(page, block["text"]):
            shown = following["text"] if following is not None and following["language"] == "text" else ""
            yield Block(here(page, block["text"]), "" if is_of_another_run(page, shown) else shown)


def excuses(page: str, commands: str) -> list[Excuse]:
    return [excuse for excuse in EXCUSED if excuse.page == page and excuse.phrase in commands]


def here(page: str, commands: str) -> str:
    for named, stand_in in STAND_INS.get(page, {}).items():
        commands = commands.replace(named, stand_in)
    return commands


def is_of_another_run(page: str, shown: str) -> bool:
    return page in OF_ANOTHER_RUN and shown.startswith(OF_ANOTHER_RUN[page])


def bash_blocks(text: str) -> list[str]:
    return [block["text"] for block in _BLOCK.finditer(text) if block["language"] == "bash"]


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
    for named, code in EXIT_CODES.items():
        if named in line:
            return code
    is_judged = WRONG_PORT in line or line.startswith(JUDGES_A_RUN)
    # With its mistake undone the wrong port is right.
    return int(is_judged and not {"--list", "--undo"} & set(shlex.split(line)))


def run_page(page: str, folder: Path) -> None:
    """Run the blocks of a page in their order; demand their exit codes, and what the page shows of their output."""
    for block in blocks(page):
        printed = ""
        for line in command_lines(block.commands):
            done = run(line, folder)
            printed += done.stdout
            assert done.returncode == expected_code(line), f"{line}\n{done.stdout}{done.stderr}"
        for shown in block.output.splitlines():
            assert words(shown) in words(printed), f"{block.commands}\nshows {shown!r}, printed\n{printed}"


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("reader")
    for name in ("scripts", "tests"):
        (folder / name).symlink_to(REPOSITORY / name)
    for line in command_lines(CAPTURES):
        done = run(line, folder)
        assert done.returncode == expected_code(line), done.stderr
    (folder / "full_model").symlink_to("mm2-captures/gpu_reference/full_model")
    for name, content in READERS_FILES.items():
        (folder / name).write_text(json.dumps(content))
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page, test in RUN_BY.items() if test.startswith("test_page_")])
def test_page_does_what_it_shows(page: str, captures: Path, tmp_path: Path) -> None:
    if "| jq" in (REPOSITORY / page).read_text() and shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    folder = shutil.copytree(captures, tmp_path / "reader", symlinks=True)
    # A page that makes the model itself begins without one.
    if any("mm2-split synthesize" in block.commands for block in blocks(page)):
        shutil.rmtree(folder / "model")
        shutil.rmtree(folder / "mm2-captures")
    assert list(blocks(page))
    run_page(page, folder)


@pytest.mark.slow
def test_dumps_are_read_as_their_page_shows(load_module: Any, tmp_path: Path) -> None:
    if shutil.which("jq") is None:
        pytest.skip("jq is not installed")
    dumps = load_module(Path(__file__).parent / "foreign_dumps.py")
    (tmp_path / "prompts.json").write_text(json.dumps(READERS_FILES["prompts.json"]))
    for line in command_lines(OF_DUMPS):
        assert run(line, tmp_path).returncode == 0
    golden = tmp_path / "mm2-captures" / "gpu_reference" / "full_model"
    dumps.write_nxdi(tmp_path / "their_dump", Capture.open(golden))
    run_page("docs/other-tools.md", tmp_path)


@pytest.mark.slow
def test_goldens_travel_as_their_page_shows(s3: object, tmp_path: Path) -> None:
    (tmp_path / "scripts").symlink_to(REPOSITORY / "scripts")
    lines = [line for block in blocks("docs/goldens-travel.md") for line in command_lines(block.commands)]
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
    lines = [line for block in blocks(SKILL) for line in command_lines(block.commands)]
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


def words(text: str) -> str:
    """Leave out figures, which change with the machine, and spaces, which change with the figures."""
    return re.sub(r"[\d\s.,×%]|e[+-]\d+", "", text)
