from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import click.testing
import pytest
import torch

from minimax_tools.command_line import options
from minimax_tools.command_line.console import Mm2Command
from minimax_tools.command_line.options import read_span
from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span


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
        (0, 1, "0:2", "both given"),
        (4, 2, None, "are no span"),
    ],
)
def test_contradicting_spans_are_refused(
    start: int | None, end: int | None, layers: str | None, message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        read_span(start, end, layers)


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


@pytest.mark.parametrize("text", ["", "a", "1,", "-4", "1.5"])
def test_start_positions_that_are_none_are_refused(text: str) -> None:
    command = click.command()(options.input_options(lambda **_: None))
    result = click.testing.CliRunner().invoke(command, ["--start-positions", text])
    assert result.exit_code == 2
    assert "expected positions from 0 on, for example 0,4096,65536" in result.stderr
