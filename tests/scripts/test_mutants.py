"""Small faults planted one by one: what is planted, where it takes effect, and what is said of the tests."""

from __future__ import annotations

import ast
import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.insert(0, str(SCRIPTS))

try:
    from mutants.changes import changed_lines
    from mutants.excuses import FILE, read_excuses
    from mutants.graft import NotGraftedError, graft
    from mutants.mutant import find_mutants
    from mutants.rooms import find_sources, find_tests
except ModuleNotFoundError as error:
    if error.name not in ("coverage", "libcst", "mutmut"):
        raise
    pytest.skip(f"{error.name} is not installed: it is in the extra dev", allow_module_level=True)

SOURCE = '''
"""Sums."""
from __future__ import annotations

import functools
import time
from dataclasses import dataclass, field

MOST = 3
SHARE = 0.5
FEW, MANY = 4, 7


@dataclass(frozen=True, slots=True)
class Pair:
    first: int
    second: int = 2
    third: int = field(default=6, repr=False)

    @property
    def total(self) -> int | None:
        return self.first + self.second


def clip(value: int, *, least: int = 0) -> int:
    if value > MOST:
        return MOST
    if not value:
        raise ValueError("none of 1" + str(1))
    return max(value, least)


@functools.cache
def double(value: int) -> int:
    return 2 * value


def is_large(share: float) -> bool:
    return share > SHARE


def count(number: int) -> int:
    done = 0
    while done < number:
        time.sleep(0.01)
        done += 1
    return done


def never_called() -> bool:
    return True
'''

TESTS = """
from sums_under_test import Pair, clip, count, double, is_large

def test_clip(): assert (clip(5), clip(2)) == (3, 2)
def test_total(): assert Pair(1).total == 3
def test_double(): assert double(4) == 8
def test_large(): assert is_large(0.7)
def test_default(): assert Pair(1).third == 6
def test_count(): assert count(3) == 3
"""

RUN = """
import sys
from pathlib import Path
sys.path[:0] = [{scripts!r}, "."]
import pytest
from mutants.coverage_map import CoverageMap
from mutants.mutant import find_mutants
from mutants.trial import Trials
root = Path.cwd()
(root / "scratch").mkdir(exist_ok=True)
mutants = {{str(mutant).partition(": ")[2]: mutant for mutant in find_mutants(root, Path("sums_under_test.py"))}}

def run(chosen, patience_s):
    coverage_map = CoverageMap(root, [Path("sums_under_test.py")], kept=root / "kept" / "coverage.json")
    limits = dict(most_seconds=9.0, patience_s=patience_s)
    trials = Trials(root, chosen, coverage_map=coverage_map, scratch=root / "scratch", tell=print, **limits)
    options = ["-q", "-p", "no:cacheprovider", "--basetemp=scratch", "--rootdir=.", "-c", "pytest.ini"]
    pytest.main([*options, *{files!r}], plugins=[trials])
    for trial in trials.trials:
        print("RESULT", trial.outcome.value, trial.mutant, sep="|")

for names, patience_s, changed in {rounds!r}:
    for file, text in changed.items():
        Path(file).write_text(text)
        sys.modules.pop(Path(file).stem, None)
    run([mutants[name] for name in names], patience_s)
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "sums_under_test.py"
    path.write_text(SOURCE)
    return path


@pytest.fixture
def sums(file: Path) -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("sums_under_test", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["sums_under_test"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["sums_under_test"]


def changes(file: Path) -> list[str]:
    return [f"{mutant.before} -> {mutant.after}" for mutant in find_mutants(file.parent, Path(file.name))]


class TestMutants:
    def test_numbers_operators_and_conditions_are_changed(self, file: Path) -> None:
        found = changes(file)
        for change in (
            "3 -> 4",
            "2 -> 3",
            "self.first + self.second -> self.first - self.second",
            "> MOST -> >= MOST",
            "> MOST -> <= MOST",
            "not value -> value",
            "True -> False",
        ):
            assert change in found, change

    def test_texts_annotations_decorators_and_raised_errors_are_left_alone(self, file: Path) -> None:
        found = changes(file)
        assert not [change for change in found if "None" in change or "frozen" in change or "str(" in change]

    def test_a_number_with_a_fraction_is_never_met_exactly(self, file: Path) -> None:
        assert "> SHARE -> <= SHARE" in changes(file)
        assert "> SHARE -> >= SHARE" not in changes(file)

    def test_a_number_may_have_its_fraction_from_an_annotation_or_another_file(self, tmp_path: Path) -> None:
        (tmp_path / "limits.py").write_text("LIMIT = 0.5\nMOST = 3\n")
        text = (
            "from limits import LIMIT, MOST\ndef f(x, y: float | None, z: int): return x > LIMIT, x > MOST, "
        )
        (tmp_path / "sums.py").write_text(text + "x > y, x > z\n")
        found = changes(tmp_path / "sums.py")
        assert {"> MOST -> >= MOST", "> z -> >= z", "> y -> <= y", "> LIMIT -> <= LIMIT"} <= {*found}
        assert not {"> LIMIT -> >= LIMIT", "> y -> >= y"} & {*found}

    def test_the_last_dimension_is_never_named_in_another_way(self, tmp_path: Path) -> None:
        (tmp_path / "rows.py").write_text(
            "def f(x): return x.sort(dim=-1), x.sum(dim=-1), x.shape[-1], x[-1]\n"
        )
        found = changes(tmp_path / "rows.py")
        assert {"1 -> 2", "x.sum(dim=-1) -> x.sum()", "-1 -> +1"} <= {*found}
        assert "x.sort(dim=-1) -> x.sort()" not in found
        # The last of the four is no dimension.
        assert (found.count("-1 -> +1"), found.count("1 -> 2")) == (1, 4)

    def test_lines_are_those_of_the_statement(self, file: Path) -> None:
        mutants = find_mutants(file.parent, Path(file.name))
        condition = next(mutant for mutant in mutants if mutant.before == "> MOST")
        assert SOURCE.splitlines()[condition.lines.start - 1].strip() == "if value > MOST:"
        assert (len(condition.lines), condition.top_name, condition.is_in_function) == (1, "clip", True)
        constant = next(mutant for mutant in mutants if mutant.before == "3")
        assert (constant.top_name, constant.is_in_function) == ("MOST", False)
        assert [mutant.top_name for mutant in mutants if mutant.before in ("4", "7")] == ["FEW", "MANY"]


class TestGraft:
    @staticmethod
    def plant(sums: ModuleType, old: str, new: str) -> None:
        assert old in SOURCE
        graft(Path(str(sums.__file__)), SOURCE, SOURCE.replace(old, new))

    def test_who_imported_a_function_runs_its_new_code(self, sums: ModuleType) -> None:
        clip = sums.clip
        self.plant(sums, "value > MOST", "value < MOST")
        assert clip(2) == 3

    def test_defaults_of_functions_and_dataclasses(self, sums: ModuleType) -> None:
        self.plant(sums, "least: int = 0", "least: int = 3")
        assert sums.clip(1) == 3

    def test_default_of_a_dataclass(self, sums: ModuleType) -> None:
        self.plant(sums, "second: int = 2", "second: int = 7")
        assert sums.Pair(1).second == 7

    def test_property_of_objects_that_are_there(self, sums: ModuleType) -> None:
        pair = sums.Pair(1, 5)
        self.plant(sums, "self.first + self.second", "self.first - self.second")
        assert pair.total == -4

    def test_constant_wherever_it_was_imported(self, sums: ModuleType) -> None:
        other = ModuleType("other_sums")
        other.MOST = sums.MOST  # type: ignore[attr-defined]
        sys.modules["other_sums"] = other
        self.plant(sums, "MOST = 3", "MOST = 4")
        assert (sums.clip(9), sys.modules.pop("other_sums").MOST) == (4, 4)

    def test_one_of_two_constants_in_a_line(self, sums: ModuleType) -> None:
        self.plant(sums, "4, 7", "4, 8")
        assert (sums.FEW, sums.MANY) == (4, 8)

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            ("MOST = 3", "MOST = 3 ", "the same program"),
            ("MOST = 3", "MOST = 3 / 0", "its import raises ZeroDivisionError"),
        ],
    )
    def test_what_cannot_be_planted_is_said(self, sums: ModuleType, old: str, new: str, reason: str) -> None:
        with pytest.raises(NotGraftedError, match=reason):
            self.plant(sums, old, new)


def names_of(statement: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(statement, ast.FunctionDef | ast.ClassDef):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def run_trials(folder: Path, rounds: list[tuple[list[str], float, dict[str, str]]], *files: str) -> str:
    """Run tests against the faults of each round, with its patience and its changed files; return what is told."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    script = RUN.format(scripts=str(SCRIPTS), rounds=rounds, files=files)
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stderr
    return run.stdout


def test_each_fault_is_tried_against_the_tests_that_run_it(file: Path) -> None:
    (file.parent / "test_sums.py").write_text(TESTS)
    expected = {
        "self.first + self.second -> self.first - self.second": "killed",
        "> MOST -> <= MOST": "killed",
        "> MOST -> >= MOST": "survived",
        "2 * value -> 2 / value": "killed",
        "0.5 -> 1.5": "killed",
        "6 -> 7": "killed",
        "True -> False": "untested",
    }
    endless = "done += 1 -> done -= 1"
    # Only a fault that never ends may be given up soon: on a busy machine the others take seconds.
    told = run_trials(file.parent, [([*expected], 100.0, {}), ([endless], 1.0, {})], "test_sums.py")
    lines = [line.split("|", 2) for line in told.splitlines() if line.startswith("RESULT")]
    outcomes = {change.partition(": ")[2]: outcome for _, outcome, change in lines}
    assert outcomes == {**expected, endless: "endless"}
    assert "6 tests run once." in told


@pytest.mark.slow
def test_what_tests_ran_is_kept_until_they_or_their_lines_change(file: Path) -> None:
    (file.parent / "test_sums.py").write_text(TESTS)
    (file.parent / "test_other.py").write_text("def test_nothing(): pass\n")

    def count(*changes: dict[str, str]) -> list[str]:
        told = run_trials(file.parent, [([], 1.0, one) for one in changes], "test_sums.py", "test_other.py")
        return [line for line in told.splitlines() if line.endswith("tests run once.")]

    assert count({}) == ["7 tests run once."]
    # In a process of its own. Python compiles a file again whose size or second has changed.
    source, other = SOURCE + "\n", "def test_nothing(): assert True\n"
    assert count({}, {file.name: source}, {"test_other.py": other}) == [
        "0 tests run once.",
        "5 tests run once.",
        "1 tests run once.",
    ]


def test_changed_lines_are_those_since_the_branches_parted(tmp_path: Path) -> None:
    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
            cwd=tmp_path,
            check=True,
            capture_output=True,
        )

    git("init", "-b", "main")
    (tmp_path / "kept.py").write_text("a = 1\nb = 2\nc = 3\n")
    git("add", ".")
    git("commit", "-m", "first")
    git("checkout", "-b", "work")
    (tmp_path / "kept.py").write_text("a = 1\nb = 5\nc = 3\nd = 4\n")
    git("commit", "-am", "second")
    (tmp_path / "new.py").write_text("e = 6\n")
    assert changed_lines(tmp_path, "main") == {
        Path("kept.py"): frozenset({2, 4}),
        Path("new.py"): frozenset({1}),
    }


class TestRooms:
    def test_sources_are_named_by_file_folder_and_pattern(self) -> None:
        root = SCRIPTS.parent
        fp8 = Path("minimax_tools/checkpoint/fp8.py")
        assert find_sources(root, [str(fp8)]) == [fp8]
        assert Path("compare/noise/rho.py") in find_sources(root, ["compare"])
        assert {fp8, Path("compare/noise/rho.py"), Path("minimax_tools/capture/writer.py")} <= set(
            find_sources(root)
        )

    def test_tests_mirror_the_sources(self) -> None:
        root = SCRIPTS.parent
        assert list(find_tests(root, [Path("minimax_tools/capture/writer.py")])) == [
            root / "tests/minimax_tools/capture"
        ]


class TestExcuses:
    def test_each_excuse_is_of_code_that_is_there(self) -> None:
        for file, within, before, _ in read_excuses():
            source = (SCRIPTS.parent / file).read_text()
            statements = {
                name: " ".join((ast.get_source_segment(source, statement) or "").split())
                for statement in ast.parse(source).body
                for name in names_of(statement)
            }
            assert before in statements.get(within, ""), f"{file}: {within}: {before}"

    @pytest.mark.slow
    def test_each_excuse_is_of_a_fault_that_would_be_planted(self) -> None:
        root = SCRIPTS.parent
        excuses = read_excuses()
        mutants = [
            mutant for file in {file for file, *_ in excuses} for mutant in find_mutants(root, Path(file))
        ]
        planted = {(str(mutant.file), mutant.top_name, mutant.before, mutant.after) for mutant in mutants}
        assert set(excuses) <= planted

    def test_an_excuse_without_a_reason_is_refused(self, tmp_path: Path) -> None:
        file = tmp_path / FILE.name
        file.write_text("- {file: a.py, within: f, before: 1, after: 2, reason: ''}\n")
        with pytest.raises(ValueError, match="Write all five"):
            read_excuses(file)
