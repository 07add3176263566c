"""The house: each room has a map, tests mirror the rooms, names and docstrings keep their rules.

`find_faults` reads files only. See tests/test_floors.py for who may import whom.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PACKAGES = ("minimax_tools", "reports", "gpu_reference", "compare", "neuron", "mm2")
SOURCES = (*PACKAGES, "scripts")
MOST_LINES = 600

# A docstring says what a thing is or does: it begins with a noun or a verb.
NO_OPENING = frozenset(
    (
        *("What", "How", "Where", "Which", "Whether", "When", "Why", "Who", "Whose"),
        *("It", "They", "Those", "These", "This", "That", "Them", "Its", "Their"),
        *(
            "Of",
            "Same",
            "Nothing",
            "Something",
            "One",
            "Several",
            "Each",
            "All",
            "Every",
            "Some",
            "Any",
            "Both",
        ),
    )
)
ARTICLES = frozenset(("The", "A", "An"))
UNBOUNDED = frozenset(
    ("json.load", "json.loads", "yaml.load", "yaml.safe_load", "yaml.compose", "yaml.parse")
)
READERS = (
    *(f"minimax_tools/machine/{kind}_file.py" for kind in ("json", "yaml")),
    "neuron/process/record.py",  # what a process says of itself, read while it writes
)
# Words that had several meanings, and the word that the glossary has instead.
OLD_WORDS = {
    "refeed": "recompute",
    "refed": "recomputed",
    "handed on": "inherited",
    "crew": "ranks",
    "errand": "background call",
    "whereabouts": "regions",
}


def find_faults(root: Path) -> list[str]:
    """Return every place under `root` that breaks a rule of the house, as `path: what`."""
    files = [path for folder in SOURCES for path in sorted((root / folder).rglob("*.py"))]
    trees = _parse(root, files)
    tests = _parse(root, sorted((root / "tests").rglob("*.py")))
    return [
        *_long_files(root, files),
        *_missing_on_maps(root),
        *_tests_out_of_place(root),
        *_classes_of_one_name(trees),
        *(fault for name, tree in trees.items() for fault in _other_readers(name, tree)),
        *(fault for name, tree in (trees | tests).items() for fault in _docstring_faults(name, tree)),
        *(fault for path in files for fault in _old_words(root, path)),
    ]


def _parse(root: Path, files: list[Path]) -> dict[str, ast.Module]:
    return {path.relative_to(root).as_posix(): ast.parse(path.read_text(encoding="utf-8")) for path in files}


def _long_files(root: Path, files: list[Path]) -> Iterator[str]:
    for path in files:
        num_lines = len(path.read_text(encoding="utf-8").splitlines())
        if num_lines > MOST_LINES:
            yield f"{path.relative_to(root)}: {num_lines} lines, more than {MOST_LINES}"


def _missing_on_maps(root: Path) -> Iterator[str]:
    """A package's docstring names every file and folder beside it, in backticks."""
    for package in SOURCES:
        for path in sorted((root / package).rglob("__init__.py")):
            text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
            named = set(re.findall(r"`(\w+)/?`", text))
            beside = {one.stem for one in path.parent.glob("*.py")} | {
                one.name for one in path.parent.iterdir() if (one / "__init__.py").exists()
            }
            missing = sorted(beside - named - {"__init__", "__main__"})
            if missing:
                yield f"{path.relative_to(root)}: its map does not name {', '.join(missing)}"


def _tests_out_of_place(root: Path) -> Iterator[str]:
    """A test named after a module lies where the module lies; no other folder of tests is a package's."""
    modules: dict[tuple[str, str], set[str]] = defaultdict(set)
    for package in PACKAGES:
        for path in (root / package).rglob("*.py"):
            modules[package, path.stem].add(path.parent.relative_to(root).as_posix())
    for package in PACKAGES:
        for path in sorted((root / "tests" / package).rglob("test_*.py")):
            folder = path.parent.relative_to(root / "tests").as_posix()
            homes = modules.get((package, path.stem.removeprefix("test_")), set())
            if not (root / folder).is_dir():
                yield f"{path.relative_to(root)}: there is no {folder}"
            elif homes and folder not in homes:
                yield f"{path.relative_to(root)}: its module lies in {' and '.join(sorted(homes))}"


def _classes_of_one_name(trees: dict[str, ast.Module]) -> Iterator[str]:
    places = defaultdict(list)
    for name, tree in trees.items():
        if not name.startswith("scripts/"):
            for node in tree.body:
                if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                    places[node.name].append(name)
    for name, files in places.items():
        if len(files) > 1:
            yield f"{files[0]}: another class is called {name}, in {', '.join(files[1:])}"


def _other_readers(name: str, tree: ast.Module) -> Iterator[str]:
    """JSON and YAML have one reader each, which is bounded. Messages between mm2's own processes need none."""
    if name.startswith(("scripts/", "minimax_tools/ranks/")) or name in READERS:
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            call = f"{node.value.id}.{node.attr}"
            if call in UNBOUNDED:
                yield f"{name}:{node.lineno}: {call} is unbounded; json_file and yaml_file read within bounds"


def _docstring_faults(name: str, tree: ast.Module) -> Iterator[str]:
    """Yield docstrings with a forbidden first word. A test's fixture may begin with an article: it names a thing."""
    is_test = name.startswith("tests/")
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            text = ast.get_docstring(node) or ""
            match = re.match(r"[`'\"(]*([A-Za-z]+)", text)
            word = match[1] if match else ""
            is_verb_wanted = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and not any(
                "property" in ast.dump(decorator) for decorator in node.decorator_list
            )
            if word in NO_OPENING:
                yield f"{name}:{getattr(node, 'lineno', 1)}: the docstring begins with {word!r}"
            elif is_verb_wanted and not is_test and word in ARTICLES:
                yield f"{name}:{getattr(node, 'lineno', 1)}: a function's docstring begins with a verb, not {word!r}"


def _old_words(root: Path, path: Path) -> Iterator[str]:
    text = path.read_text(encoding="utf-8").lower()
    for old, new in OLD_WORDS.items():
        if re.search(rf"\b{old}\b", text):
            yield f"{path.relative_to(root)}: says {old!r}; the glossary's word is {new!r}"


def test_house_keeps_its_rules() -> None:
    assert find_faults(REPOSITORY) == []


def plant(root: Path, name: str, text: str) -> Path:
    path = root / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return root


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("compare/noise.py", "x = 1\n" * 601, "compare/noise.py: 601 lines, more than 600"),
        ("compare/__init__.py", '"""- `cli`: the command"""', "its map does not name judging, noise"),
        ("compare/noise.py", '"""What is left."""', "compare/noise.py:1: the docstring begins with 'What'"),
        (
            "compare/noise.py",
            'class A:\n    """Of two."""',
            "compare/noise.py:1: the docstring begins with 'Of'",
        ),
        (
            "compare/noise.py",
            'def f():\n    """The ratio."""',
            "a function's docstring begins with a verb, not 'The'",
        ),
        ("tests/compare/test_noise.py", '"""How noise is judged."""', "the docstring begins with 'How'"),
        ("neuron/noise.py", "class Layer:\n    pass", "another class is called Layer, in neuron/noise.py"),
        ("compare/noise.py", "import json\njson.loads(text)", "compare/noise.py:2: json.loads is unbounded"),
        ("compare/noise.py", "yaml.safe_load(text)", "compare/noise.py:1: yaml.safe_load is unbounded"),
        ("compare/noise.py", "# a refeed of rows", "says 'refeed'; the glossary's word is 'recompute'"),
        ("tests/compare/nowhere/test_x.py", "", "test_x.py: there is no compare/nowhere"),
        ("tests/compare/judging/test_noise.py", "", "test_noise.py: its module lies in compare"),
    ],
)
def test_planted_fault_is_named(tmp_path: Path, name: str, text: str, fault: str) -> None:
    plant(tmp_path, "compare/__init__.py", '"""- `noise`: the noise\n- `judging`: the judges"""')
    plant(tmp_path, "compare/judging/__init__.py", '"""Judges."""')
    plant(tmp_path, "reports/layer.py", "class Layer:\n    pass")
    plant(tmp_path, "compare/noise.py", '"""Noise."""')
    assert any(fault in found for found in find_faults(plant(tmp_path, name, text)))


def test_what_the_house_allows_passes(tmp_path: Path) -> None:
    plant(tmp_path, "compare/__init__.py", '"""The comparison.\n\n- `noise`: the noise\n"""')
    plant(
        tmp_path,
        "compare/noise.py",
        '"""Noise of BF16."""\n\n\nclass Noise:\n    """The noise."""\n\n    @property\n    def size(self):\n'
        '        """The size."""\n\n\ndef measure():\n    """Measure the noise."""\n',
    )
    plant(tmp_path, "tests/compare/test_noise.py", "")
    assert find_faults(tmp_path) == []
