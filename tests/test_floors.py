"""The floors of the design: who may import whom, where device libraries load, and what no file may do.

`find_violations` reads the sources only; `import_all` imports them where the optional libraries are missing.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
FLOORS: dict[str, frozenset[str]] = {
    "minimax_tools": frozenset(),
    "reports": frozenset({"minimax_tools"}),
    "gpu_reference": frozenset({"reports", "minimax_tools"}),
    "compare": frozenset({"reports", "minimax_tools"}),
    "neuron": frozenset({"compare", "reports", "minimax_tools"}),
    "mm2": frozenset({"neuron", "compare", "reports", "minimax_tools"}),
}
EXTRA_FLOORS = {"minimax_tools/cli.py": frozenset({"reports"})}
NOT_IMPORTED = frozenset({"scripts", "tests"})
DEVICE_LIBRARIES = frozenset(
    {
        "torch_xla",
        "torch_neuronx",
        "neuronx_distributed",
        "neuronx_distributed_inference",
        "libneuronxla",
        "vllm",
        "vllm_neuron",
    }
)
GOLDEN_LIBRARIES = frozenset({"transformers", "accelerate"})
HOMES = {
    **dict.fromkeys(DEVICE_LIBRARIES, ("neuron/",)),
    **dict.fromkeys(
        GOLDEN_LIBRARIES,
        ("gpu_reference/", "minimax_tools/reference/", "minimax_tools/split/"),
    ),
}
NAMELESS = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """An import statement at any depth; `names` holds every module that it may mean, the longest first."""

    names: tuple[str, ...]
    line: int
    level: int
    in_function: bool
    type_only: bool

    @property
    def top(self) -> str:
        return self.names[0].partition(".")[0]


def find_violations(root: Path) -> list[str]:
    """Return every place under `root` that breaks a floor, as `path:line: what`."""
    files = {path.relative_to(root).as_posix(): path for path in _source_files(root)}
    trees = {name: ast.parse(path.read_text(encoding="utf-8"), name) for name, path in files.items()}
    imports = {name: list(_imports(tree)) for name, tree in trees.items()}
    found = [f"{name}: {Path(name).stem} names nothing" for name in files if NAMELESS & _words(name)]
    found += [
        f"{name}:{one.line}: {text}" for name in files for one in imports[name] for text in _judge(name, one)
    ]
    found += [f"{name}:{line}: print outside cli.py" for name in files for line in _prints(name, trees[name])]
    found += [
        f"{name}:{line}: SystemExit is no verdict" for name in files for line in _exits(name, trees[name])
    ]
    return found + _cycles(imports)


def _source_files(root: Path) -> Iterator[Path]:
    for folder in (*FLOORS, *sorted(NOT_IMPORTED)):
        yield from sorted((root / folder).rglob("*.py"))


def _words(name: str) -> set[str]:
    return {part.strip("_") for part in Path(name).with_suffix("").parts}


def _imports(tree: ast.AST, *, in_function: bool = False, type_only: bool = False) -> Iterator[Import]:
    for node in ast.iter_child_nodes(tree):
        names: list[tuple[str, ...]] = []
        if isinstance(node, ast.Import):
            names = [(alias.name,) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            names = [(f"{module}.{alias.name}", module) for alias in node.names]
        elif isinstance(node, ast.Call) and (module := _dynamic_import(node)):
            names = [(module,)]
        level = node.level if isinstance(node, ast.ImportFrom) else 0
        for modules in names:
            yield Import(
                names=modules, line=node.lineno, level=level, in_function=in_function, type_only=type_only
            )
        is_function = isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and _is_type_checking(node.test):
            for part in node.body:
                yield from _imports(ast.Module([part], []), in_function=in_function, type_only=True)
            for part in node.orelse:
                yield from _imports(ast.Module([part], []), in_function=in_function, type_only=type_only)
        else:
            yield from _imports(node, in_function=in_function or is_function, type_only=type_only)


def _dynamic_import(call: ast.Call) -> str | None:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", None)
    argument = call.args[0] if call.args else None
    if name in {"import_module", "__import__"} and isinstance(argument, ast.Constant):
        return str(argument.value)
    return None


def _is_type_checking(test: ast.expr) -> bool:
    name = test.attr if isinstance(test, ast.Attribute) else getattr(test, "id", None)
    return name == "TYPE_CHECKING"


def _judge(name: str, one: Import) -> Iterator[str]:
    package = name.partition("/")[0]
    if one.level:
        yield f"relative import of {one.names[-1] or '.'}"
    elif one.top in NOT_IMPORTED:
        yield f"nobody imports {one.top}"
    elif package not in FLOORS:
        return
    elif one.top in FLOORS and one.top not in {package} | FLOORS[package] | EXTRA_FLOORS.get(
        name, frozenset()
    ):
        yield f"{package} imports {one.top}, which is not below it"
    elif one.top in HOMES:
        yield from _judge_library(name, one)


def _judge_library(name: str, one: Import) -> Iterator[str]:
    if not name.startswith(HOMES[one.top]):
        yield f"{one.top} belongs in {' or '.join(HOMES[one.top])}"
    elif not one.in_function and not (one.type_only and one.top in GOLDEN_LIBRARIES):
        yield f"{one.top} is imported outside a function"


def _prints(name: str, tree: ast.Module) -> Iterator[int]:
    if name.partition("/")[0] in FLOORS and Path(name).name != "cli.py":
        calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
        yield from (
            call.lineno for call in calls if isinstance(call.func, ast.Name) and call.func.id == "print"
        )


def _exits(name: str, tree: ast.Module) -> Iterator[int]:
    """Lines that raise SystemExit, as code of a port may too; a command of mm2's ends by `end_command`."""
    if name.partition("/")[0] in FLOORS:
        for node in ast.walk(tree):
            if isinstance(node, ast.Raise) and node.exc is not None:
                raised = node.exc.func if isinstance(node.exc, ast.Call) else node.exc
                if isinstance(raised, ast.Name) and raised.id == "SystemExit":
                    yield node.lineno


def _cycles(imports: dict[str, list[Import]]) -> list[str]:
    """Yield each circle of modules once, from its first module by name; local and type-only imports count."""
    modules = {name.removesuffix(".py").removesuffix("/__init__").replace("/", "."): name for name in imports}
    edges = {
        module: sorted(
            {target for one in imports[name] for target in _target(one, modules) if target != module}
        )
        for module, name in modules.items()
    }
    return [
        f"{modules[start]}: circular import {' -> '.join(path)}"
        for start in sorted(edges)
        if (path := _way_back(start, edges)) and start == min(path)
    ]


def _target(one: Import, modules: dict[str, str]) -> list[str]:
    return [name for name in one.names if name in modules][:1]


def _way_back(start: str, edges: dict[str, list[str]]) -> list[str] | None:
    paths, seen = [[start]], set()
    for path in paths:
        for target in edges[path[-1]]:
            if target == start:
                return [*path, start]
            if target not in seen:
                seen.add(target)
                paths.append([*path, target])
    return None


_IMPORT_ALL = """
import importlib, sys
missing = set(sys.argv[2].split(","))

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in missing:
            raise ImportError(f"{name} is not installed")

sys.meta_path.insert(0, Missing())
sys.path.insert(0, sys.argv[1])
for module in sys.argv[3:]:
    try:
        importlib.import_module(module)
    except ImportError as error:
        sys.exit(f"{module}: {error}")
"""


def import_all(root: Path, *, missing: frozenset[str]) -> str:
    """Import every module of the packages in a fresh interpreter; what failed, empty if nothing."""
    files = [path.relative_to(root) for path in _source_files(root)]
    modules = [
        ".".join(file.with_suffix("").parts).removesuffix(".__init__")
        for file in files
        if file.parts[0] in FLOORS
    ]
    command = [sys.executable, "-c", _IMPORT_ALL, str(root), ",".join(sorted(missing)), *modules]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stderr if done.returncode else ""


def plant(root: Path, name: str, text: str) -> Path:
    for folder in (root / name).relative_to(root).parents:
        (root / folder).mkdir(parents=True, exist_ok=True)
        if folder.parts:
            (root / folder / "__init__.py").touch()
    (root / name).write_text(text)
    return root


def test_repository_keeps_its_floors() -> None:
    assert find_violations(REPOSITORY) == []


def test_every_package_is_looked_at() -> None:
    seen = {path.relative_to(REPOSITORY).parts[0] for path in _source_files(REPOSITORY)}
    assert set(FLOORS) <= seen


@pytest.mark.parametrize(
    ("name", "text", "violation"),
    [
        ("minimax_tools/model/span.py", "import reports.page", "span.py:1: minimax_tools imports reports"),
        ("compare/noise.py", "def f():\n    import neuron.runs", "noise.py:2: compare imports neuron"),
        ("compare/noise.py", "from gpu_reference.golden import golden", "compare imports gpu_reference"),
        ("gpu_reference/golden/golden.py", "import compare", "gpu_reference imports compare"),
        ("reports/page.py", "if TYPE_CHECKING:\n    import neuron.runs", "page.py:2: reports imports neuron"),
        ("reports/page.py", "importlib.import_module('neuron.runs')", "page.py:1: reports imports neuron"),
        ("neuron/runs/runner.py", "from scripts.demo import main", "runner.py:1: nobody imports scripts"),
        ("neuron/runs/runner.py", "from .layer import Layer", "runner.py:1: relative import of layer"),
        ("compare/noise.py", "def f():\n    import torch_xla", "noise.py:2: torch_xla belongs in neuron/"),
        (
            "neuron/devices/runtime.py",
            "import torch_xla",
            "runtime.py:1: torch_xla is imported outside a function",
        ),
        ("minimax_tools/model/spec.py", "def f():\n    import transformers", "belongs in gpu_reference/"),
        ("gpu_reference/golden/golden.py", "from transformers import AutoModel", "is imported outside"),
        ("compare/utils.py", "", "compare/utils.py: utils names nothing"),
        ("compare/noise.py", "def f():\n    print(1)", "noise.py:2: print outside cli.py"),
        ("compare/cli.py", "def f():\n    raise SystemExit(1)", "cli.py:2: SystemExit is no verdict"),
    ],
)
def test_planted_violation_is_named(tmp_path: Path, name: str, text: str, violation: str) -> None:
    assert any(violation in found for found in find_violations(plant(tmp_path, name, text)))


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("minimax_tools/cli.py", "import reports.page\nprint(1)"),
        ("neuron/runs/runner.py", "import compare.noise, reports.page, minimax_tools.model.span"),
        ("neuron/devices/runtime.py", "def f():\n    import torch_xla.core"),
        ("gpu_reference/golden/golden.py", "def f():\n    import transformers, accelerate"),
        ("minimax_tools/reference/modules.py", "if typing.TYPE_CHECKING:\n    import transformers"),
        ("mm2/recording.py", "import neuron.ports.exposure, compare.noise"),
        ("scripts/demo.py", "import torch_xla, neuron.runs.runner\nprint(1)"),
    ],
)
def test_what_the_design_allows_passes(tmp_path: Path, name: str, text: str) -> None:
    assert find_violations(plant(tmp_path, name, text)) == []


def test_circle_of_modules_is_named_once(tmp_path: Path) -> None:
    plant(tmp_path, "compare/noise.py", "from compare import routing")
    plant(tmp_path, "compare/routing.py", "def f():\n    from compare.blame import Blame")
    plant(tmp_path, "compare/blame.py", "if TYPE_CHECKING:\n    import compare.noise")
    circle = "compare.blame -> compare.noise -> compare.routing -> compare.blame"
    assert find_violations(tmp_path) == [f"compare/blame.py: circular import {circle}"]


def test_every_module_imports_without_the_optional_libraries() -> None:
    assert import_all(REPOSITORY, missing=DEVICE_LIBRARIES | GOLDEN_LIBRARIES) == ""


def test_module_that_needs_a_missing_library_is_named(tmp_path: Path) -> None:
    plant(tmp_path, "reports/page.py", "import json")
    plant(tmp_path, "neuron/devices/runtime.py", "import torch_xla.core")
    failure = import_all(tmp_path, missing=DEVICE_LIBRARIES)
    assert "neuron.devices.runtime: torch_xla is not installed" in failure
