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

import pytest
import tomllib
import yaml

REPOSITORY = Path(__file__).parents[2]
PROJECT = REPOSITORY / "scripts" / "examples" / "pytest_project"
Pytest = Callable[..., subprocess.CompletedProcess[str]]


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
def run_pytest(project: Path, installed: Path) -> Pytest:
    """Runs pytest in the project, as its author does."""

    def run(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *map(str, arguments)]
        return run_in(project, command, path=(installed, REPOSITORY))

    return run


def run_in(folder: Path, command: list[str], *, path: tuple[Path, ...]) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    environment |= {"PYTHONPATH": os.pathsep.join(map(str, path)), "OMP_NUM_THREADS": "1"}
    environment["PATH"] = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def swap_gate_and_up(project: Path) -> None:
    experts = project / "my_port" / "experts.py"
    right, wrong = "functional.silu(gate) * up", "functional.silu(up) * gate"
    assert right in experts.read_text()
    experts.write_text(experts.read_text().replace(right, wrong))


def test_right_port_passes_in_every_layer(run_pytest: Pytest, golden: Path) -> None:
    done = run_pytest("--mm2-golden", golden, "-vv")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"mm2: GoldenLayers({golden}, layers 0-3" in done.stdout
    assert set(re.findall(r"(test_\w+)\[layer_(\d)\] PASSED", done.stdout)) == {
        (test, str(layer)) for test in ("test_layer", "test_experts_alone") for layer in range(4)
    }


def test_wrong_port_fails_with_site_rho_and_limit(run_pytest: Pytest, project: Path, golden: Path) -> None:
    swap_gate_and_up(project)
    done = run_pytest("--mm2-golden", golden, "--mm2-layers", "2:3")
    assert done.returncode == 1
    assert "2 failed" in done.stdout
    assert re.search(r"PortDiffersError: FAIL: layer 2, .*moe_delta", done.stdout)
    assert re.search(r"PortDiffersError: layer 2, moe_delta: error .*× the noise floor, limit", done.stdout)
    # The traceback ends in the port's own test.
    assert "mm2/comparison.py" not in done.stdout


def test_without_a_golden_tests_are_skipped_and_it_is_said(run_pytest: Pytest) -> None:
    done = run_pytest()
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
    arguments: tuple[str, ...], message: str, run_pytest: Pytest, golden: Path
) -> None:
    done = run_pytest(*(str(golden) if argument == "GOLDEN" else argument for argument in arguments))
    assert done.returncode == pytest.ExitCode.USAGE_ERROR, done.stdout + done.stderr
    assert message in done.stderr


def test_project_without_mm2_in_its_tests_is_left_alone(run_pytest: Pytest, project: Path) -> None:
    (project / "tests" / "test_layer.py").write_text(
        "import sys\n\ndef test_nothing_was_imported():\n    assert 'torch' not in sys.modules\n"
    )
    done = run_pytest()
    assert done.returncode == 0, done.stdout
    assert "mm2:" not in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("is_wrong", [False, True])
def test_workflow_does_what_it_says(is_wrong: bool, project: Path, installed: Path) -> None:
    if is_wrong:
        swap_gate_and_up(project)
    workflow = yaml.safe_load((project / ".github" / "workflows" / "mm2.yml").read_text())
    steps = {step["name"]: step for step in workflow["jobs"]["port"]["steps"] if "name" in step}
    # The commands, as the shell on the path finds them.
    programs = project / "bin"
    programs.mkdir()
    modules = {
        "mm2-split": "from minimax_tools.cli import main",
        "mm2-gpu": "from gpu_reference.cli import main",
        "mm2-test": "from neuron.__main__ import main",
        "mm2-compare": "from compare.cli import main",
    }
    for name, line in modules.items():
        (programs / name).write_text(f"#!{sys.executable}\nimport sys\n{line}\nsys.exit(main())\n")
        (programs / name).chmod(0o755)
    assert workflow["jobs"]["port"]["env"] == {"PYTHONPATH": "."}
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
