"""`mm2-test check`: what this machine is, what changes numbers on it, and whether a layer fits."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, end_command, loading, print_json, print_text
from minimax_tools.command_line.options import (
    dtype_option,
    optional_model_option,
    output_options,
    parse_lengths,
    true_size_option,
)
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.machine.finding import Level, render_findings, worst_level
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import PRESETS
from neuron.options import backend_option

if TYPE_CHECKING:
    import torch


@click.command("check", cls=Mm2Command, epilog="\b\nExample: mm2-test check --model DIR --seq-len 128,2048")
@optional_model_option
@true_size_option
@backend_option
@click.option(
    "--seq-len",
    "seq_lens",
    callback=parse_lengths,
    metavar="128,2048",
    default="128",
    show_default=True,
    help="Row lengths in tokens; the memory of a layer is reported for each.",
)
@click.option(
    "--profile-of",
    type=click.Path(path_type=Path),
    metavar="CAPTURE",
    help="Run made with --profile on this machine. Predicts the time of each length. Default: none.",
)
@dtype_option
@output_options
def check_command(
    model: str | None,
    preset: str,
    backend: str,
    seq_lens: tuple[int, ...],
    profile_of: Path | None,
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Report what this machine is, what changes numbers on it, and whether a layer fits.

    Without --model, the layer is one of a published model's. Exits with 3 if no run can work.
    """
    with loading():
        from minimax_tools.capture.run_commands import judge_port_of
        from neuron.check import check_machine
        from neuron.runs.run_profile import RunProfile

    spec = PRESETS[preset].spec() if model is None else ModelSpec.from_folder(resolve_config(model))
    if max(seq_lens) > spec.max_position_embeddings:
        raise UsageError(
            f"--seq-len is {max(seq_lens)}",
            expected=f"at most the model's {spec.max_position_embeddings} positions",
        )
    profile = None if profile_of is None else RunProfile.read(profile_of)
    findings = check_machine(spec, seq_lens, backend=backend, dtype=dtype, profile=profile)
    following: tuple[str, ...] = ()
    if model is not None and worst_level(findings) is not Level.FAIL:
        following = (judge_port_of(model, "--backend", backend),)
    if as_json:
        record = {"worst": str(worst_level(findings)), "findings": [asdict(finding) for finding in findings]}
        print_json(record, next_commands=following)
    else:
        print_text("\n".join(render_findings(findings)), next_commands=following)
    if worst_level(findings) is Level.FAIL:
        end_command(CannotRunError.exit_code)
