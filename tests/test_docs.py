from __future__ import annotations

import re
import shlex
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
import yaml

import minimax_tools.machine.memory  # noqa: F401 - it adds an error to the tree
from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.errors import CannotRunError, Mm2Error, UsageError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Verdict
from neuron.cli import main as mm2_test

REPOSITORY = Path(__file__).parents[1]
PAPERS = ("README.md", "README.zh-CN.md", "DECISIONS.md", "CHANGELOG.md", "BENCHMARKS.md", "CONTRIBUTING.md")
MAX_LINE, MAX_README, MAX_PAGE = 120, 120, 200

COMMANDS: dict[str, click.Command] = {
    "mm2-compare": mm2_compare,
    "mm2-diagnose": mm2_diagnose,
    "mm2-gpu": mm2_gpu,
    "mm2-split": mm2_split,
    "mm2-test": mm2_test,
}
# torchrun runs a module, which is one of the commands.
MODULES = {"gpu_reference": "mm2-gpu", "neuron": "mm2-test"}
# Options of torchrun, of scripts and of the pytest plugin, which the pages name too.
OTHER_OPTIONS = {"--backends", "--help", "--nproc-per-node", "--recursive"} | {
    "--mm2-golden",
    "--mm2-model",
    "--mm2-layers",
}
# Files that a reader writes.
READERS_FILES = {"my_port.py", "PATH.py", "port.py"}

GLOSSARY = """site, golden, port, reference, target, isolated run, chained run, noise floor, ρ, float32 twin,
massive channel, row, variant, flip, replay, blame, verdict, shard, slice, probe, dump"""

_LINK = re.compile(r"\[[^\]]+\]\((?P<target>[^)\s]+)\)")
_PACKAGES = "compare|docs|gpu_reference|minimax_tools|mm2|neuron|reports|scripts|tests"
_PATH = re.compile(rf"(?<![\w/.-])(?:{_PACKAGES})/[\w./-]*\w")
_FILE = re.compile(r"(?<![\w/.-])[\w-]+\.(?:py|sh)\b")
_BLOCK = re.compile(r"^```bash\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`(?P<text>[^`\n]+)`")
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_STOPS = {"|", "||", ">", ">>", "<", "&", "&&", ";"}
_VARIABLE = re.compile(r"[A-Z_][A-Z0-9_]*=")


def pages(root: Path) -> list[Path]:
    return [
        *sorted(root.glob("README*.md")),
        *sorted((root / "docs").glob("*.md")),
        *sorted(root.glob("skills/*/SKILL.md")),
    ]


def papers(root: Path) -> list[Path]:
    others = (root / paper for paper in PAPERS if not paper.startswith("README"))
    return [*pages(root), *others, *sorted((root / "benchmarks").glob("*.md"))]


def long_lines(root: Path) -> Iterator[str]:
    for page in pages(root):
        lines = page.read_text().splitlines()
        for number, line in enumerate(lines, start=1):
            if len(line) > MAX_LINE:
                yield f"{page.name}:{number}: {len(line)} characters"
        limit = MAX_README if page.name.startswith("README") else MAX_PAGE
        if len(lines) > limit:
            yield f"{page.name}: {len(lines)} lines"


def dead_links(root: Path) -> Iterator[str]:
    for page in papers(root):
        for link in _LINK.finditer(page.read_text()):
            target, _, anchor = link["target"].partition("#")
            if "://" in target:
                continue
            file = (page.parent / target).resolve() if target else page
            if not file.exists():
                yield f"{page.name}: {link['target']} leads nowhere"
            elif anchor and anchor not in set(anchors(file)):
                yield f"{page.name}: {link['target']} has no such heading"


def anchors(page: Path) -> Iterator[str]:
    """GitHub's names of the page's headings."""
    for line in page.read_text().splitlines():
        if line.startswith("#"):
            kept = re.sub(r"[^\w\s-]", "", line.lstrip("#").strip().lower())
            yield kept.replace(" ", "-")


def missing_files(root: Path) -> Iterator[str]:
    names = {file.name for folder in ("scripts", "tests") for file in (REPOSITORY / folder).rglob("*.*")}
    for page in papers(root):
        text = page.read_text()
        for path in sorted({found.group() for found in _PATH.finditer(text)}):
            if not (REPOSITORY / path).exists():
                yield f"{page.name}: there is no {path}"
        for name in sorted({found.group() for found in _FILE.finditer(text)} - names - READERS_FILES):
            yield f"{page.name}: there is no file {name}"


def wrong_commands(root: Path) -> Iterator[str]:
    for page in pages(root):
        for words in command_lines(page.read_text()):
            try:
                parse(words)
            except click.UsageError as error:
                yield f"{page.name}: {shlex.join(words)}: {error.format_message()}"


def command_lines(text: str) -> Iterator[list[str]]:
    """The words of each command of mm2 in the text's bash blocks, and in spans of a sentence."""
    for block in _BLOCK.finditer(text):
        for line in block["text"].replace("\\\n", " ").splitlines():
            yield from one_command(shlex.split(line, comments=True))
    for span in _SPAN.finditer(text):
        if span["text"].startswith("mm2-") and "…" not in span["text"]:
            yield from one_command(shlex.split(span["text"]))


def one_command(words: list[str]) -> Iterator[list[str]]:
    """The words of each command of mm2 in a line, which may hold several."""
    start = 0
    for end in (*(place for place, word in enumerate(words) if word in _STOPS), len(words)):
        command = words[start:end]
        start = end + 1
        # Variables that are set for the command alone stand before it.
        while command and _VARIABLE.match(command[0]):
            command = command[1:]
        if "torchrun" in command:
            place = command.index("-m")
            yield [MODULES[command[place + 1]], *command[place + 2 :]]
        elif command and command[0].startswith("mm2-") and not command[0].startswith("mm2-captures"):
            yield command


def parse(words: list[str]) -> None:
    """Let click split the words into options and arguments; nothing runs and no callback is called."""
    name, *arguments = words
    command = COMMANDS.get(name)
    if command is None:
        raise click.UsageError(f"no command {name}")
    while isinstance(command, click.Group) and arguments:
        name, *arguments = arguments
        known = command.get_command(click.Context(command), name)
        if known is None:
            raise click.UsageError(f"no command {name}")
        command = known
    context = click.Context(command)
    values, extra, _ = command.make_parser(context).parse_args(arguments)
    if extra:
        raise click.UsageError(f"unexpected {' '.join(extra)}")
    for option in command.params:
        value = values.get(option.name or "")
        if isinstance(option.type, click.Choice) and isinstance(value, str):
            option.type.convert(value, option, context)


def unknown_options(root: Path) -> Iterator[str]:
    known = OTHER_OPTIONS | {name for command in COMMANDS.values() for name in all_options(command)}
    for page in pages(root):
        spans = (span["text"] for span in _SPAN.finditer(page.read_text()))
        for option in sorted({name for span in spans for name in _OPTION.findall(span)} - known):
            yield f"{page.name}: no command has {option}"


def all_options(command: click.Command) -> Iterator[str]:
    for parameter in command.params:
        yield from (*parameter.opts, *parameter.secondary_opts)
    if isinstance(command, click.Group):
        for below in (
            command.get_command(click.Context(command), name)
            for name in command.list_commands(click.Context(command))
        ):
            yield from all_options(below)


def wrong_exit_codes(root: Path) -> Iterator[str]:
    told = dict(rows((root / "README.md").read_text(), "exit code"))
    said = [
        (Verdict.PASS.exit_code, "pass"),
        (Verdict.WARN.exit_code, "warnings"),
        (Verdict.FAIL.exit_code, "differs"),
        (Verdict.INCOMPARABLE.exit_code, "must not be compared"),
        (UsageError.exit_code, "wrong usage"),
        (CannotRunError.exit_code, "could not run"),
    ]
    if set(told) != {str(code) for code, _ in said} | {str(code) for code in error_codes(Mm2Error)}:
        yield f"README.md: the exit codes are {', '.join(told)}"
    for code, words in said:
        if words not in told.get(str(code), ""):
            yield f"README.md: exit code {code} is not '{words}'"
    verdicts = dict(rows((root / "docs" / "verdicts.md").read_text(), "verdict"))
    for verdict in Verdict:
        if verdicts.get(f"`{verdict}`") != str(verdict.exit_code):
            yield f"verdicts.md: {verdict} does not end with {verdict.exit_code}"


def rows(text: str, heading: str) -> Iterator[tuple[str, str]]:
    """The first two cells of each row of the table whose first heading it is."""
    lines = text.splitlines()
    start = next(place for place, line in enumerate(lines) if line.startswith(f"| {heading} |"))
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            return
        first, second, *_ = (cell.strip() for cell in line.strip("|").split("|"))
        yield first, second


def error_codes(error: type[Mm2Error]) -> set[int]:
    return {error.exit_code}.union(*(error_codes(below) for below in error.__subclasses__()))


def wrong_words(root: Path) -> Iterator[str]:
    first_cells = [word for word, _ in rows((root / "docs" / "sites.md").read_text(), "word")]
    found = Counter(word.strip("* ") for cell in first_cells for word in cell.split(","))
    for word in (word.strip() for word in GLOSSARY.split(",")):
        if found[word] != 1:
            yield f"sites.md: {word} stands there {found[word]} times"
    named = {span["text"] for page in pages(root) for span in _SPAN.finditer(page.read_text())}
    for site in (*Site, *ModelSite):
        if str(site) not in named:
            yield f"docs: no page names the site {site}"


def wrong_walks(root: Path) -> Iterator[str]:
    """Rooms that the map leaves out, and walks through the source that are too long for one sitting."""
    text = (root / "docs" / "architecture.md").read_text()
    for package in _PACKAGES.split("|"):
        for room in sorted((REPOSITORY / package).glob("*/__init__.py")):
            name = f"`{package}/{room.parent.name}/`"
            if package not in ("scripts", "tests") and name not in text:
                yield f"architecture.md: the room {name} is missing"
    for start, limit in (("## A weight", 12), ("## An activation", 12), ("## A mistake", 15)):
        walk = text.partition(f"\n{start}")[2].partition("\n## ")[0]
        files = _PATH.findall(walk)
        if not 0 < len(set(files)) <= limit:
            yield f"architecture.md: {start} goes through {len(set(files))} files"


# More than one sitting's.
MANY_FILES = " ".join(f"docs/{page.name}" for page in pages(REPOSITORY)) + " | a layer is a"
Check = Callable[[Path], Iterator[str]]
CHECKS: tuple[Check, ...] = (
    long_lines,
    dead_links,
    missing_files,
    wrong_commands,
    unknown_options,
    wrong_exit_codes,
    wrong_words,
    wrong_walks,
)


@pytest.mark.parametrize("check", CHECKS)
def test_papers_keep_to(check: Check) -> None:
    assert list(check(REPOSITORY)) == []


def test_commands_of_every_page_are_looked_at() -> None:
    shown = [words for page in pages(REPOSITORY) for words in command_lines(page.read_text())]
    assert {words[0] for words in shown} == set(COMMANDS)
    assert len(shown) > 60
    with_options = {words[0] for words in shown if any(word.startswith("--") for word in words)}
    assert with_options == set(COMMANDS)


def plant(folder: Path, page: str, old: str, new: str) -> Path:
    """A copy of all papers in which one place is another."""
    for pages_folder in ("benchmarks", "docs", "skills"):
        shutil.copytree(REPOSITORY / pages_folder, folder / pages_folder)
    for paper in (*PAPERS, "LICENSE"):
        shutil.copy(REPOSITORY / paper, folder)
    text = (folder / page).read_text()
    assert old in text
    (folder / page).write_text(text.replace(old, new, 1))
    return folder


@pytest.mark.parametrize(
    ("check", "page", "old", "new", "fault"),
    [
        (long_lines, "docs/golden.md", "# Make", "# " + "Make" * 30, "golden.md:1: 1"),
        (dead_links, "docs/ports.md", "#which-tokens", "#tokens", "golden.md#tokens has no such heading"),
        (missing_files, "docs/ports.md", "`cached_port.py`", "`kept_port.py`", "no file kept_port.py"),
        (wrong_commands, "README.md", "mm2-test sweep --model", "mm2-test swep --model", "no command swep"),
        (wrong_commands, "docs/golden.md", "--max-memory 70GB", "--max-mem 70GB", "--max-mem"),
        (unknown_options, "docs/golden.md", "`--chat`", "`--chatty`", "no command has --chatty"),
        (wrong_exit_codes, "README.md", "| 2 | wrong usage |", "| 4 | wrong usage |", "exit code 2 is not"),
        (wrong_words, "docs/sites.md", "| **flip** |", "| **golden** |", "flip stands there 0 times"),
        (wrong_walks, "docs/architecture.md", "| a layer is a", MANY_FILES, "A weight goes through"),
    ],
)
def test_planted_mistake_is_named(
    tmp_path: Path, check: Check, page: str, old: str, new: str, fault: str
) -> None:
    assert any(fault in found for found in check(plant(tmp_path, page, old, new)))


def test_skill_says_what_it_is_for_and_names_every_verdict() -> None:
    (skill,) = REPOSITORY.glob("skills/*/SKILL.md")
    _, front, body = skill.read_text().split("---\n", 2)
    matter = yaml.safe_load(front)
    assert set(matter) == {"name", "description"}
    assert matter["name"] == skill.parent.name
    assert 0 < len(matter["description"]) <= 1024
    for verdict in Verdict:
        assert f"`{verdict}`" in body
    for site in Site:
        assert f"`{site}`" in body
