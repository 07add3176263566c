from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import click.testing
import pytest
import torch

from compare.cli import main as mm2_compare
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.command_line import options
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import read_span
from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span
from neuron.cli import main as mm2_test

# These capture no run: two run no model, bisect keeps no sites of a golden's rows, trace runs nothing of its own,
# weights and certify look at what others load and have captured, model takes the golden's rows and all its sites,
# prompts have answers, export and replacement write files for other tools, publish puts a golden elsewhere, and port
# starts other commands.
OTHERS = {
    "port",
    "publish",
    "show",
    "check",
    "bisect",
    "trace",
    "weights",
    "certify",
    "model",
    "prompts",
    "export",
    "replacement",
}
# Options of a shared name that mean something else there: check tells of lengths, and runs none; weights are traced in
# one layer, the first unless another is asked for; export and replacement write no capture; the stream is replaced at
# the layer that the search needs, or at the final norm.
OTHER_MEANINGS = {
    ("check", "seq_lens"),
    ("weights", "layer"),
    ("export", "output_dir"),
    ("port", "output_dir"),
    ("replacement", "output_dir"),
    ("replacement", "layer"),
}
# A plan, the dimensions that all know, or what the golden alone tells stand for a model that is not given.
NEED_NO_MODEL = {"extract-all", "check", "certify"}
# Run by every command of mm2-gpu and mm2-test that runs a model.
SHARED_BY_RUNS = (
    options.model_option,
    options.store_options,
    options.run_options,
    options.input_options,
    options.output_options,
)


def parameters(*decorators: Callable[..., Any]) -> dict[str, click.Parameter]:
    def command() -> None: ...

    for decorate in decorators:
        command = decorate(command)
    return {parameter.name or "": parameter for parameter in click.command(cls=Mm2Command)(command).params}


def commands(group: click.Command) -> Iterator[click.Command]:
    if not isinstance(group, click.Group):
        yield group
        return
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        assert found is not None
        yield found


def described(parameter: click.Parameter) -> dict[str, Any]:
    record = parameter.to_info_dict()
    return {**record, "callback": parameter.callback, "is_eager": parameter.is_eager}


def expected(shared: click.Parameter, command: click.Command) -> dict[str, Any]:
    # Commands that judge have a second form of JSON.
    judging = parameters(options.judging_output_options)["as_json"]
    own = next(parameter for parameter in command.params if parameter.name == shared.name)
    if shared.name == "as_json" and described(own) == described(judging):
        return described(judging)
    record = described(shared)
    is_free = shared.name == "model" and command.name in NEED_NO_MODEL
    return {**record, "required": record["required"] and not is_free}


def runs() -> list[click.Command]:
    return [one for group in (mm2_gpu, mm2_test) for one in commands(group) if one.name not in OTHERS]


@pytest.mark.parametrize("command", runs(), ids=lambda command: str(command.name))
def test_every_run_takes_the_shared_options_with_one_meaning(command: click.Command) -> None:
    own = {parameter.name: parameter for parameter in command.params}
    for name, shared in parameters(*SHARED_BY_RUNS).items():
        assert name in own
        assert described(own[name]) == expected(shared, command)


@pytest.mark.parametrize(
    "group", [mm2_gpu, mm2_test, mm2_compare], ids=["mm2-gpu", "mm2-test", "mm2-compare"]
)
def test_an_option_of_a_shared_name_is_the_shared_option(group: click.Command) -> None:
    shared = parameters(*SHARED_BY_RUNS, options.span_options, options.layer_option, options.captures_option)
    for command in commands(group):
        for parameter in command.params:
            # mm2-compare chooses among layers that are there, and can do without a model.
            is_another = (group is mm2_compare and parameter.name in ("layer", "model")) or (
                (command.name, parameter.name) in OTHER_MEANINGS
            )
            if parameter.name in shared and not is_another:
                assert described(parameter) == expected(shared[parameter.name], command), command.name


def parse(decorator: Callable[..., Any], *arguments: str) -> dict[str, Any]:
    values: dict[str, Any] = {}

    @click.command(cls=Mm2Command)
    @decorator
    def command(**found: Any) -> None:
        values.update(found)

    result = click.testing.CliRunner().invoke(command, list(arguments))
    assert result.exit_code == 0, result.output
    return values


def test_a_command_gets_the_dtype_that_the_option_names() -> None:
    assert parse(options.run_options)["dtype"] == torch.bfloat16
    assert parse(options.run_options, "--dtype", "float32")["dtype"] == torch.float32


def test_lengths_are_parsed_at_the_edge() -> None:
    request = parse(options.input_options, "--seq-len", "96,61", "--pad-to", "128, 512")["inputs"]
    assert (request.seq_lens, request.pad_to) == ((96, 61), (128, 512))
    assert parse(options.input_options)["inputs"].seq_lens == ()


@pytest.mark.parametrize("text", ["", "a", "1,", "0", "-4", "1.5"])
def test_lengths_that_are_none_are_refused(text: str) -> None:
    command = click.command()(options.input_options(lambda **_: None))
    result = click.testing.CliRunner().invoke(command, ["--seq-len", text])
    assert result.exit_code == 2
    assert "expected positive lengths, for example 96,61" in result.stderr


def test_start_positions_are_parsed_at_the_edge() -> None:
    arguments = ["--seq-len", "8,8", "--start-positions", "0, 4096"]
    assert parse(options.input_options, *arguments)["inputs"].start_positions == (0, 4096)
    assert parse(options.input_options)["inputs"].start_positions == ()


@pytest.mark.parametrize("text", ["", "a", "1,", "-4", "1.5"])
def test_start_positions_that_are_none_are_refused(text: str) -> None:
    command = click.command()(options.input_options(lambda **_: None))
    result = click.testing.CliRunner().invoke(command, ["--start-positions", text])
    assert result.exit_code == 2
    assert "expected positions from 0 on, for example 0,4096,65536" in result.stderr


def test_input_options_become_one_request() -> None:
    arguments = ["--prompt", "a", "--prompt", "b", "--chat", "--padding-side", "left", "--max-length", "9"]
    arguments += ["--start-positions", "0,8"]
    both = options.stack_options(options.input_options, options.run_options)
    request = parse(both, *arguments, "--seed", "4")["inputs"]
    assert (request.prompts, request.chat, request.padding_side) == (("a", "b"), True, "left")
    assert (request.max_length, request.batch_size, request.seed) == (9, 1, 4)
    assert request.start_positions == (0, 8)


@pytest.mark.parametrize(
    ("start", "end", "layers", "span"),
    [
        (0, 5, None, Span(0, 6)),
        (3, 3, None, Span(3, 4)),
        (None, None, "0:5", Span(0, 5)),
        (None, None, None, None),
    ],
)
def test_spans_are_read_in_both_notations(
    start: int | None, end: int | None, layers: str | None, span: Span | None
) -> None:
    assert read_span(start, end, layers) == span


@pytest.mark.parametrize(
    ("start", "end", "layers", "message"),
    [
        (0, None, None, "come together"),
        (None, 0, None, "come together"),
        (0, 1, "0:2", "both given"),
        (None, 1, "0:2", "both given"),
        (4, 2, None, "are no span"),
    ],
)
def test_contradicting_spans_are_refused(
    start: int | None, end: int | None, layers: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_span(start, end, layers)


def test_docstring_lists_every_option() -> None:
    text = options.__doc__ or ""
    everything = parameters(
        *SHARED_BY_RUNS, options.span_options, options.layer_option, options.memory_budget_option
    )
    for parameter in everything.values():
        assert parameter.opts[0] in text


def test_captures_lie_in_the_working_directory_unless_told_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MM2_CAPTURES", raising=False)
    assert parse(options.captures_option)["captures"] == Path("mm2-captures")


def test_memory_budget_is_bytes_and_none_where_it_is_absent() -> None:
    assert parse(options.memory_budget_option) == {"memory_budget": None}
    for text, size_bytes in (("12GB", 12 * 10**9), ("12 GiB", 12 * 2**30), ("500mb", 500 * 10**6)):
        assert parse(options.memory_budget_option, "--memory-budget", text) == {"memory_budget": size_bytes}


@pytest.mark.parametrize("text", ["much", "12", "0GB", "-1GB", "0.1B", ""])
def test_memory_budget_that_is_no_size_is_refused(text: str) -> None:
    command = click.command()(options.memory_budget_option(lambda memory_budget: None))
    result = click.testing.CliRunner().invoke(command, ["--memory-budget", text])
    assert result.exit_code == 2
    assert f"'--memory-budget': {text!r}: expected a size, for example 500MB, 2GB or 64MiB" in result.stderr
