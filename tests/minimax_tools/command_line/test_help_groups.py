from __future__ import annotations

from collections.abc import Iterator

import click
import click.testing
import pytest

from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.command_line import help_groups, options
from minimax_tools.command_line.options import stack_options
from neuron.cli import main as mm2_test

ROOTS: dict[str, click.Command] = {
    "mm2-compare": mm2_compare,
    "mm2-diagnose": mm2_diagnose,
    "mm2-gpu": mm2_gpu,
    "mm2-split": mm2_split,
    "mm2-test": mm2_test,
}


RUNS = (
    *(("mm2-gpu", name) for name in ("extract-all", "full", "single-layer", "multi-layer")),
    *(("mm2-test", name) for name in ("single-layer", "multi-layer", "full", "sweep", "component")),
)


def described(param: click.Parameter) -> tuple[object, ...]:
    assert isinstance(param, click.Option)
    return param.opts, param.secondary_opts, param.help, param.type.name, param.default, param.multiple


def leaves() -> Iterator[tuple[tuple[str, ...], click.Command]]:
    for name, root in ROOTS.items():
        if isinstance(root, click.Group):
            context = click.Context(root)
            yield from (
                ((name, below), root.get_command(context, below)) for below in root.list_commands(context)
            )
        else:
            yield (name,), root


def show(words: tuple[str, ...]) -> str:
    result = click.testing.CliRunner().invoke(ROOTS[words[0]], [*words[1:], "--help"], prog_name=words[0])
    assert result.exit_code == 0
    return result.output


def sections(text: str) -> dict[str, list[str]]:
    """The options or commands that each heading of a help text lists."""
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.endswith(":") and not line.startswith(" "):
            listed = found.setdefault(line[:-1], [])
        elif line.startswith("  ") and line[2:3].strip() and found and not line.startswith("  Example:"):
            listed.append(line.split()[0].rstrip(","))
    return found


@pytest.mark.parametrize("words", [words for words, _ in leaves()], ids=" ".join)
def test_help_shows_every_option_once_and_the_first_ones_first(words: tuple[str, ...]) -> None:
    command = dict(leaves())[words]
    found = sections(show(words))
    first = found["Options that matter first"]
    assert next(iter(found)) == "Options that matter first"
    assert 1 <= len(first) <= 5
    shown = [name for names in found.values() for name in names if name.startswith("--")]
    assert len(shown) == len(set(shown))
    options = [param for param in command.params if isinstance(param, click.Option)]
    assert set(shown) == {option.opts[0] for option in options} | {"--help"}
    listed = {name for names in help_groups._GROUPS.values() for name in names}
    assert all(listed.intersection(option.opts) for option in options)
    required = {option.opts[0] for option in options if option.required}
    assert required <= set(first) or len(required) > 5
    assert f"  Example: {' '.join(words)} " in show(words)


@pytest.mark.parametrize("words", RUNS, ids=" ".join)
def test_every_run_takes_the_shared_options_with_one_meaning(words: tuple[str, ...]) -> None:
    judges = words[0] == "mm2-test"
    shared = stack_options(
        options.model_option,
        options.store_options,
        options.run_options,
        options.input_options,
        options.judging_output_options if judges else options.output_options,
    )
    own = {param.name: described(param) for param in dict(leaves())[words].params}
    for param in click.command(shared(lambda **_: None)).params:
        assert own[param.name] == described(param)


def test_groups_list_options_that_commands_have() -> None:
    names = {"--help"}
    for _, command in leaves():
        for param in command.params:
            names.update(param.opts)
    assert {name for group in help_groups._TABLE.values() for name in group.split()} <= names


def test_groups_of_a_sweep() -> None:
    found = sections(show(("mm2-test", "sweep")))
    first = found["Options that matter first"]
    assert first == ["--model", "--golden", "--target", "--layers", "--backend"]
    assert "--seq-len" in found["Inputs"]
    assert "--tp-degree" in found["Device"]
    assert "--criteria" in found["Judging"]
    assert "--output-dir" in found["Output"]


def test_second_names_are_shown_once_beside_the_first() -> None:
    for name in ("mm2-compare", "mm2-diagnose"):
        text = show((name,))
        assert text.count("--gpu-path") == text.count("--neuron-path") == 1
        assert "--golden, --gpu-path FOLDER|s3://…|hf://…" in text
        assert "--run, --neuron-path FOLDER|s3://…|hf://…" in text


@pytest.mark.parametrize("name", ["mm2-gpu", "mm2-split", "mm2-test"])
def test_groups_list_each_command_in_one_section(name: str) -> None:
    found = sections(show((name,)))
    root = ROOTS[name]
    assert isinstance(root, click.Group)
    del found["Options"]
    assert "Other" not in found
    listed = [command for commands in found.values() for command in commands]
    # A long description goes on in lines that are indented further.
    assert sorted(listed) == sorted(root.list_commands(click.Context(root)))


@pytest.mark.parametrize(("words", "command"), [(words, one) for words, one in leaves() if len(words) == 2])
def test_a_group_names_a_command_and_tells_its_first_sentence_without_loading_it(
    words: tuple[str, str], command: click.Command
) -> None:
    assert command.name == words[1]
    listed = f"{' '.join(show(words[:1]).split())} "
    assert f" {words[1]} {command.get_short_help_str(limit=200)} " in listed


@pytest.mark.parametrize("name", list(ROOTS))
def test_every_program_tells_its_version(name: str) -> None:
    result = click.testing.CliRunner().invoke(ROOTS[name], ["--version"], prog_name=name)
    assert result.exit_code == 0
    assert result.output.startswith(f"{name} 0.")
