"""`mm2-test check` at work: findings about this machine, and what comes next."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import torch

from minimax_tools.capture.run_commands import judge_port_of
from minimax_tools.command_line.console import end_command, print_json, print_text
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config
from minimax_tools.machine.finding import Level, render_findings, worst_level
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.check import check_machine
from neuron.runs.run_profile import RunProfile


def report_machine(
    model: str | None,
    backend: str,
    seq_lens: tuple[int, ...],
    profile_of: Path | None,
    dtype: torch.dtype,
    as_json: bool,
) -> None:
    """Report the machine, print, and end with its exit code."""
    spec = SyntheticModel.m2().spec() if model is None else ModelSpec.from_folder(resolve_config(model))
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
