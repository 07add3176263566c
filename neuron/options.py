"""The options of every command that runs a port on a device."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from compare.options import criteria_options
from minimax_tools.options import input_options, model_option, output_options, run_options, store_options
from neuron.backend import Backend


def device_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """`--golden`, `--target`, `--backend`, `--random-input`, `--skip-compile`, and those all runs share."""
    decorators: list[Callable[[Callable[..., Any]], Callable[..., Any]]] = [
        model_option,
        click.option(
            "--golden",
            type=click.Path(path_type=Path),
            help="Golden capture: its inputs are used, and it judges.",
        ),
        click.option(
            "--target",
            default="builtin",
            show_default=True,
            metavar="builtin|reference|PATH.py:NAME|package.module:NAME",
            help="The implementation to run.",
        ),
        click.option(
            "--backend",
            type=click.Choice(["auto", *(str(backend) for backend in Backend)]),
            default="auto",
            show_default=True,
            help="The device.",
        ),
        click.option("--random-input", is_flag=True, help="Feed the first layer random hidden states."),
        click.option(
            "--skip-compile", is_flag=True, help="Load the saved run instead of compiling and running."
        ),
        criteria_options,
        input_options,
        run_options,
        store_options,
        output_options,
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command
