"""The command `mm2-diagnose`: names the known mistake that explains a layer's output."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from compare.diagnosis.diagnose import diagnose
from compare.diagnosis.report import catalogue_record, diagnosis_record, render_catalogue, render_diagnosis
from compare.sides.opening import open_named_sides, opening_options
from compare.sides.pairing import select_layers
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import DEVICE_SIDE, GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.console import Mm2Command, end_command, print_json
from minimax_tools.command_line.options import captures_option, optional_model_option, output_options
from minimax_tools.command_line.progress import LayerProgress
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_model


@click.command(cls=Mm2Command)
@optional_model_option
@click.option(
    "--gpu-path", type=click.Path(path_type=Path), help="Golden capture; the newest under --captures."
)
@click.option(
    "--neuron-path", type=click.Path(path_type=Path), help="Device run; the newest under --captures."
)
@click.option("--layer", metavar="layer_0", help="Diagnose this layer, to blame or not.")
@click.option(
    "--layer-pattern",
    metavar="'layer_*'",
    help="Diagnose the layers that match; by default those that the comparison blames.",
)
@click.option(
    "--mistake", "mistakes", multiple=True, metavar="NAME", help="Try this mistake alone; repeat for several."
)
@click.option("--list", "lists_catalogue", is_flag=True, help="Print the catalogue of mistakes, and end.")
@captures_option
@opening_options
@output_options
def main(
    model: str | None,
    gpu_path: Path | None,
    neuron_path: Path | None,
    layer: str | None,
    layer_pattern: str | None,
    mistakes: tuple[str, ...],
    lists_catalogue: bool,
    captures: Path,
    as_json: bool,
    **options: Any,
) -> None:
    """Name the known mistake that explains a device run's layers, from their outputs alone.

    Exits with 0 where nothing differs, with 1 where the port does, named or not.

    Example: mm2-diagnose --model DIR --gpu-path GOLDEN --neuron-path RUN
    """
    if lists_catalogue:
        print_json(catalogue_record()) if as_json else click.echo(render_catalogue())
        return
    if model is None:
        raise UsageError(
            "no checkpoint was named", next_step="Give --model the one that the golden was made of."
        )
    if layer is not None and layer_pattern is not None:
        raise UsageError("--layer and --layer-pattern were both given", next_step="Use one of them.")
    reference, target = open_named_sides(
        gpu_path or newest_capture(captures, GOLDEN_SIDE),
        neuron_path or newest_capture(captures, DEVICE_SIDE),
        options,
    )
    layers = _chosen_layers(reference, target, layer, layer_pattern)
    span = range(min(layers), max(layers) + 1) if layers else None
    with LayerProgress(len(layers or target.layers), label="Diagnosis") as progress:
        diagnosis = diagnose(
            reference,
            target,
            model=resolve_model(model, layers=span),
            layers=layers,
            mistakes=mistakes,
            progress=progress,
        )
    if as_json:
        print_json(diagnosis_record(diagnosis))
    else:
        click.echo(render_diagnosis(diagnosis))
    end_command(diagnosis.exit_code)


def _chosen_layers(
    reference: CaptureSource, target: CaptureSource, layer: str | None, pattern: str | None
) -> tuple[int, ...] | None:
    """Return the layers that were asked for; None where none was."""
    if layer is not None:
        pattern = f"layer_{layer}" if layer.isdigit() else layer
    return None if pattern is None else select_layers(reference, target, pattern)


if __name__ == "__main__":
    main()
