"""Tests of the plugin: pytest runs the example project, with a right port and with a wrong one."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tomllib
import yaml

REPOSITORY = Path(__file__).parents[2]
PROJECT = REPOSITORY / "scripts" / "examples" / "pytest_project"
Pytest = Callable[..., subprocess.CompletedProcess[str]]

# What pytest and the plugin import.
MODULES = ("pytest", "mm2.comparison", "mm2.golden_layer", "mm2.recording")


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that states the entry points of pyproject.toml, as an installed mm2 does."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    folder = tmp_path_factory.mktemp("installed")
    info = folder / f"mm2-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: mm2\nVersion: {project['version']}\n")
    lines = [f"{name} = {module}" for name, module in project["entry-points"]["pytest11"].items()]
    (info / "entry_points.txt").write_text("\n".join(["[pytest11]", *lines, ""]))
    return folder


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example project."""
    return Path(shutil.copytree(PROJECT, tmp_path / "project"))


@pytest.fixture
def fork_pytest(project: Path, installed: Path, fork_server: Any) -> Pytest:
    """Runs pytest in the project, in a process that need not import mm2's libraries."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        done: subprocess.CompletedProcess[str] = fork_server.run(
            ["-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)],
            folder=project,
            environment=environment_with((installed, REPOSITORY)),
            standard_input="",
            modules=MODULES,
        )
        return done

    return run


def run_in(folder: Path, command: list[str], *, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    environment = environment_with(path)
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def environment_with(path: tuple[Path, ...]) -> dict[str, str]:
    """Return this process's environment for another that finds modules on a path."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return environment


def swap_gate_and_up(project: Path) -> None:
    experts = project / "my_port" / "experts.py"
    right, wrong = "functional.silu(gate) * up", "functional.silu(up) * gate"
    assert right in experts.read_text()
    experts.write_text(experts.read_text().replace(right, wrong))


def test_right_port_passes_in_every_layer(fork_pytest: Pytest, golden: Path) -> None:
    done = fork_pytest("--mm2-golden", golden, "-vv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"mm2: GoldenLayers({golden}, layers 0-3" in done.stdout
    passed = re.findall(r"(test_\w+)\[layer_(\d)\] PASSED", done.stdout)
    for test in ("test_layer", "test_experts_alone"):
        assert sorted(layer for name, layer in passed if name == test) == ["0", "1", "2", "3"]


def test_wrong_port_fails_with_site_rho_and_limit(fork_pytest: Pytest, project: Path, golden: Path) -> None:
    swap_gate_and_up(project)
    done = fork_pytest("--mm2-golden", golden, "--mm2-layers", "2:3")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert re.search(r"PortDiffersError: FAIL: layer 2, .*moe_delta", done.stdout)
    assert re.search(r"PortDiffersError: layer 2, moe_delta: error .*× the noise floor, limit", done.stdout)
    # The traceback ends in the port's own test.
    assert "mm2/comparison.py" not in done.stdout


def test_without_a_golden_tests_are_skipped_and_it_is_said(fork_pytest: Pytest) -> None:
    done = fork_pytest()
    assert done.returncode == 0
    assert "mm2: 2 skipped, no golden: give --mm2-golden DIR" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--mm2-golden", "nowhere"), "mm2: no capture at nowhere"),
        (("--mm2-golden", "GOLDEN", "--mm2-layers", "2:9"), "holds no layer 4: expected layers 0-3"),
        (("--mm2-golden", "GOLDEN", "--mm2-layers", "2"), "--mm2-layers '2' names no layers: expected A:B"),
        (("--mm2-golden", "GOLDEN", "--mm2-model", "/nowhere"), "mm2: no checkpoint at '/nowhere'"),
    ],
)
def test_wrong_option_stops_before_any_test(
    arguments: tuple[str, ...], message: str, fork_pytest: Pytest, golden: Path
) -> None:
    done = fork_pytest(*(str(golden) if argument == "GOLDEN" else argument for argument in arguments))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert message in done.stderr


def test_project_without_mm2_in_its_tests_is_left_alone(project: Path, installed: Path) -> None:
    (project / "tests" / "test_layer.py").write_text(
        "import sys\n\ndef test_nothing_was_imported():\n    assert 'torch' not in sys.modules\n"
    )
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider"]
    done = run_in(project, command, path=(installed, REPOSITORY))
    assert done.returncode == 0, done.stdout
    assert "mm2:" not in done.stdout


# Stands in for GitHub's own program: it keeps what it is told, and the file that it would post.
GH = """#!/bin/sh
printf '%s\\n' "$@" > told.txt
while [ $# -gt 0 ] && [ "$1" != --body-file ]; do shift; done
cat "$2" > posted.md
"""


def steps_of(project: Path) -> dict[str, Any]:
    """The steps of the example's workflow by name."""
    workflow = yaml.safe_load((project / ".github" / "workflows" / "mm2.yml").read_text())
    assert workflow["jobs"]["port"]["env"] == {"PYTHONPATH": "."}
    return {step["name"]: step for step in workflow["jobs"]["port"]["steps"] if "name" in step}


def post(project: Path) -> str:
    """Run the step that posts, on a pull request of number 7, and return the comment."""
    programs = project / "github"
    programs.mkdir()
    (programs / "gh").write_text(GH)
    (programs / "gh").chmod(0o755)
    variables = f"export PATH={shlex.quote(str(programs))}:$PATH GITHUB_STEP_SUMMARY=summary.md NUMBER=7;"
    command = ["bash", "-e", "-c", f"{variables} {steps_of(project)['Post the report']['run']}"]
    done = run_in(project, command, path=())
    assert done.returncode == 0, done.stderr
    assert (project / "told.txt").read_text().splitlines()[:3] == ["pr", "comment", "7"]
    posted = (project / "posted.md").read_text()
    assert (project / "summary.md").read_text() == posted
    return posted


def test_workflow_posts_the_markdown_of_the_report(project: Path) -> None:
    (project / "report").mkdir()
    for name in ("report.html", "report.md", "report.txt", "junit.xml"):
        (project / "report" / name).write_text(f"{name} of the port\n")
    assert post(project) == "report.md of the port\n"


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_workflow_does_what_it_says(is_wrong: bool, project: Path, installed: Path) -> None:
    if is_wrong:
        swap_gate_and_up(project)
    steps = steps_of(project)
    # The commands, as the shell on the path finds them.
    programs = project / "bin"
    programs.mkdir()
    modules = {
        "mm2-split": "from minimax_tools.__main__ import main",
        "mm2-gpu": "from gpu_reference.__main__ import main",
        "mm2-test": "from neuron.__main__ import main",
        "mm2-compare": "from compare.__main__ import main",
    }
    for name, line in modules.items():
        (programs / name).write_text(f"#!{sys.executable}\nimport sys\n{line}\nsys.exit(main())\n")
        (programs / name).chmod(0o755)
    codes = {}
    for name in ("Golden", "Tests", "Report"):
        script = steps[name]["run"].replace("pytest --mm2", f"{shlex.quote(sys.executable)} -m pytest --mm2")
        # GitHub's shell: it stops at the first error.
        command = ["bash", "-e", "-c", f"PATH={programs}:$PATH; {script}"]
        codes[name] = run_in(project, command, path=(Path(), installed, REPOSITORY)).returncode
    assert codes == {"Golden": 0, "Tests": int(is_wrong), "Report": int(is_wrong)}
    assert any((project / "report").iterdir())
    # The report is posted though a step before failed.
    assert steps["Report"]["if"] == steps["Post the report"]["if"] == "${{ !cancelled() }}"
    assert "--body-file report/report.md" in steps["Post the report"]["run"]
    posted = post(project)
    assert posted == (project / "report" / "report.md").read_text()
    assert ("FAIL" if is_wrong else "PASS") in posted.splitlines()[0]
