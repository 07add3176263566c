"""The commands of `mm2-gpu` that capture, at work."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from gpu_reference.commands.work.golden_run import run_golden, whole_model_run
from gpu_reference.commands.work.planned_run import run_planned
from gpu_reference.golden.sampling import Sampling
from gpu_reference.options import GoldenOptions
from minimax_tools.errors import UsageError
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.span import Span


def capture_all(plan_file: Path | None, slices_folder: Path | None, options: GoldenOptions) -> None:
    """Capture every layer, by one process or as one rank of a plan."""
    if plan_file is not None:
        run_planned(options, plan_file, slices_folder)
        return
    if slices_folder is not None:
        raise UsageError("--slices belongs to a plan", next_step="Give --plan too.")
    run_golden(options, lambda spec: whole_model_run(options, spec))


def capture_and_generate(sampling: Sampling, options: GoldenOptions) -> None:
    """Capture every layer, then generate."""
    # --seed is one of the options of the inputs.
    sampling = replace(sampling, seed=options.inputs.seed)
    run_golden(options, lambda spec: whole_model_run(options, spec), sampling)


def capture_layer(layer: int, options: GoldenOptions) -> None:
    """Capture one layer."""
    run_golden(options, lambda _: single_layer_run(layer, sites_level=options.sites_level))


def capture_layers(span: Span | None, options: GoldenOptions) -> None:
    """Capture a range of layers; None stands for all."""
    run_golden(
        options,
        lambda spec: multi_layer_run(
            span or Span(0, spec.num_hidden_layers), sites_level=options.sites_level
        ),
    )
