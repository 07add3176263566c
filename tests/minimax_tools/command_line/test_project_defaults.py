from __future__ import annotations

from pathlib import Path

import click
import click.testing
import pytest

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.store import captures_folder
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import output_options
from minimax_tools.command_line.project_defaults import ProjectDefaults
from minimax_tools.errors import UsageError
from neuron.cli import main as mm2_test


@click.command(cls=Mm2Command)
@click.option("--model", envvar="MM2_MODEL", default="none")
@click.option("--golden", type=click.Path(path_type=Path))
@click.option("--target", default="builtin")
@click.option("--backend", type=click.Choice(["auto", "xla-cpu"]), default="auto")
@click.option("--tp-degree", type=int, default=1)
@output_options
def command(
    model: str, golden: Path | None, target: str, backend: str, tp_degree: int, as_json: bool
) -> None:
    click.echo(f"{model} {golden} {target} {backend} {tp_degree}")


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's folder, which is the working directory; it has no file yet."""
    monkeypatch.delenv("MM2_MODEL", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def run(*words: str) -> click.testing.Result:
    return click.testing.CliRunner().invoke(command, words)


def write(project: Path, *lines: str) -> None:
    (project / "mm2.toml").write_text("\n".join(lines))


def test_file_gives_defaults_and_says_so(project: Path) -> None:
    without = run()
    assert (without.stdout, without.stderr) == ("none None builtin auto 1\n", "")
    assert "Defaults from" not in run("--help").output
    write(project, 'model = "owner/name"', 'golden = "goldens/full"', "tp_degree = 4", 'dtype = "float32"')
    result = run()
    assert result.stdout == "owner/name goldens/full builtin auto 4\n"
    # --dtype is no option of this command.
    given = "--model owner/name, --golden goldens/full, --tp-degree 4"
    assert result.stderr == f"From {project / 'mm2.toml'}: {given}\n"
    assert run("--quiet").stderr == ""
    shown = " ".join(run("--help").output.split())
    assert f"mm2.toml: {given}" in shown


def test_command_line_goes_before_environment_and_that_before_the_file(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(project, 'model = "of-the-file"')
    assert run().stdout.startswith("of-the-file ")
    monkeypatch.setenv("MM2_MODEL", "of-the-environment")
    result = run()
    assert result.stdout.startswith("of-the-environment ")
    assert result.stderr == ""
    assert run("--model", "given").stdout.startswith("given ")


def test_path_beside_the_folder_is_shown_without_parents(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    below, real = project / "a", project / "real" / "deep"
    for folder in (below, real):
        folder.mkdir(parents=True)
    (project / "link").symlink_to(real)
    monkeypatch.chdir(below)
    write(below, 'golden = "../golden"')
    assert run("--quiet").stdout.split()[1] == str(project / "golden")
    # The parent of what a link leads to is another folder than that of the link.
    write(below, 'golden = "../link/../golden"')
    assert Path(run("--quiet").stdout.split()[1]).resolve() == project / "real" / "golden"


def test_paths_of_a_file_above_count_from_its_folder(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    below = project / "a" / "b"
    below.mkdir(parents=True)
    (project / "toy").mkdir()
    monkeypatch.chdir(below)
    write(project, 'model = "toy"', 'golden = "full"', 'target = "ports/port.py:Layer"')
    assert run().stdout == f"{project}/toy {project}/full {project}/ports/port.py:Layer auto 1\n"
    # Modules, hub ids and addresses are no paths.
    write(project, 'model = "owner/name"', 'target = "package.module:Layer"', 'golden = "s3://bucket/full"')
    assert dict(ProjectDefaults.find(below).values) == {
        "model": "owner/name",
        "target": "package.module:Layer",
        "golden": "s3://bucket/full",
    }


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ('modle = "m"', "no default is called 'modle'"),
        ('modle = "m"', "Did you mean model?"),
        ('tp_degree = "4"', "tp_degree is wrong: expected a whole number, found '4'"),
        ("model = 3", "model is wrong: expected a text in quotes, found 3"),
        ("[sweep]", "no default is called 'sweep'"),
        ("model =", "cannot be read"),
    ],
)
def test_wrong_file_is_refused_by_name(project: Path, line: str, told: str) -> None:
    write(project, line)
    result = run()
    assert result.exit_code == 2
    assert str(project / "mm2.toml") in result.stderr
    assert told in result.stderr
    with pytest.raises(UsageError, match="mm2.toml"):
        ProjectDefaults.find(project)


def test_wrong_value_of_the_file_is_told_to_be_its(project: Path) -> None:
    write(project, 'backend = "xlacpu"')
    result = run()
    assert result.exit_code == 2
    assert f"Did you mean xla-cpu? {project / 'mm2.toml'} gives it." in result.stderr
    # The same value on the command line is not the file's.
    assert "gives it" not in run("--backend", "xlacpu").stderr


def test_real_commands_take_the_file(project: Path) -> None:
    write(project, 'model = "nowhere"', 'golden = "gone"', 'captures = "kept"', 'criteria = "limits.yaml"')
    runner = click.testing.CliRunner()
    sweep = runner.invoke(mm2_test, ["sweep", "--help"])
    assert "--model nowhere, --golden gone" in " ".join(sweep.output.split())
    compared = runner.invoke(mm2_compare, [])
    assert compared.exit_code != 0
    assert "limits.yaml" in compared.stderr
    made = runner.invoke(mm2_gpu, ["extract-all", "--seq-len", "8"])
    assert "--model nowhere, --captures kept" in made.stderr


def test_folder_of_captures_is_the_projects(project: Path) -> None:
    @click.command(cls=Mm2Command)
    @click.option("--captures", type=click.Path(path_type=Path), default="mm2-captures")
    def where(captures: Path) -> None:
        click.echo(captures_folder())

    runner = click.testing.CliRunner()
    assert runner.invoke(where).stdout == "mm2-captures\n"
    write(project, 'captures = "kept"')
    assert runner.invoke(where).stdout == "kept\n"
    assert runner.invoke(where, ["--captures", "given"]).stdout == "given\n"
