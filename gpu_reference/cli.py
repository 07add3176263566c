"""The command `mm2-gpu`: golden captures with transformers, on GPUs or the CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import torch

from gpu_reference.generation import GENERATION_NAME, Sampling, generate
from gpu_reference.golden import GoldenRequest, open_golden
from gpu_reference.model import ATTN_IMPLEMENTATIONS, EXPERTS_IMPLEMENTATIONS, GoldenModelRequest
from gpu_reference.placement import parse_placement
from minimax_tools.capture.locate import open_source
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import GOLDEN_SIDE, capture_directory
from minimax_tools.checkpoint.hub import resolve_model
from minimax_tools.console import Mm2Group, print_json
from minimax_tools.options import (
    input_options,
    layer_option,
    model_option,
    output_options,
    read_input_request,
    read_span,
    run_options,
    span_options,
    store_options,
)
from minimax_tools.prompts import build_inputs
from minimax_tools.run import Run, full_run, multi_layer_run, single_layer_run
from minimax_tools.sites import Site
from minimax_tools.span import Span
from minimax_tools.spec import ModelSpec
from reports.captures import capture_record, render_capture, render_statistics, statistics_record

Options = dict[str, Any]


@click.group(cls=Mm2Group)
def main() -> None:
    """Make golden captures of a MiniMax-M2 with transformers' own model.

    \b
    Example: mm2-gpu extract-all --model MiniMaxAI/MiniMax-M2 --max-memory 40GB --prompt "The capital of France is"
    """


def _golden_options(command: Callable[..., None]) -> Callable[..., None]:
    decorators = [
        model_option,
        input_options,
        run_options,
        store_options,
        click.option(
            "--device-map",
            default="auto",
            show_default=True,
            metavar="auto|balanced|balanced_low_0|sequential|cuda:N|cpu|JSON",
            help="Where to put the model.",
        ),
        click.option("--max-memory", metavar="40GB|0:40GB,cpu:100GB", help="Memory limit of each device."),
        click.option("--offload-folder", type=click.Path(path_type=Path, file_okay=False), help="For what fits nowhere."),
        click.option(
            "--attn-implementation", type=click.Choice(ATTN_IMPLEMENTATIONS), default="sdpa", show_default=True
        ),
        click.option(
            "--experts-implementation",
            type=click.Choice(EXPERTS_IMPLEMENTATIONS),
            default="grouped_mm",
            show_default=True,
        ),
        click.option(
            "--noise-floor",
            type=click.Choice(["full", "stats", "off"]),
            default="full",
            show_default=True,
            help="Keep each layer's float32 twin, its distances only, or nothing.",
        ),
        click.option("--no-save", is_flag=True, help="Print statistics, write nothing."),
        output_options,
    ]
    for decorate in reversed(decorators):
        command = decorate(command)
    return command


@main.command("extract-all")
@_golden_options
def extract_all(**options: Any) -> None:
    """Capture every layer of the model from one forward pass.

    \b
    Example: mm2-gpu extract-all --model DIR --max-memory 40GB --seq-len 96,61
    """
    _run_golden(options, lambda spec: full_run(spec.num_hidden_layers, sites_level=options["sites_level"]))


@main.command("full")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=32, show_default=True)
@click.option("--do-sample", is_flag=True, help="Sample instead of taking the most likely token.")
@click.option("--temperature", type=click.FloatRange(min=0, min_open=True))
@click.option("--top-k", type=click.IntRange(min=1))
@click.option("--top-p", type=click.FloatRange(min=0, max=1, min_open=True))
@_golden_options
def full(
    max_new_tokens: int,
    do_sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    **options: Any,
) -> None:
    """Capture every layer, then generate; ids and text are saved beside the activations.

    \b
    Example: mm2-gpu full --model DIR --prompt "The capital of France is" --max-new-tokens 32
    """
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=options["seed"],
    )
    _run_golden(options, lambda spec: full_run(spec.num_hidden_layers, sites_level=options["sites_level"]), sampling)


@main.command("single-layer")
@layer_option
@_golden_options
def single_layer(layer: int, **options: Any) -> None:
    """Capture one layer, fed by the layers before it.

    \b
    Example: mm2-gpu single-layer --model DIR --layer 7
    """
    _run_golden(options, lambda _: single_layer_run(layer, sites_level=options["sites_level"]))


@main.command("multi-layer")
@span_options
@_golden_options
def multi_layer(start_layer: int | None, end_layer: int | None, layers: str | None, **options: Any) -> None:
    """Capture a range of layers, fed by the layers before it.

    \b
    Example: mm2-gpu multi-layer --model DIR --start-layer 0 --end-layer 5
    """
    given = read_span(start_layer, end_layer, layers)

    def make_run(spec: ModelSpec) -> Run:
        return multi_layer_run(given or Span(0, spec.num_hidden_layers), sites_level=options["sites_level"])

    _run_golden(options, make_run)


@main.command("show")
@click.argument("directory", type=click.Path(path_type=Path))
@output_options
def show(directory: Path, as_json: bool) -> None:
    """Print what a capture holds: layers, sites, shapes and statistics.

    \b
    Example: mm2-gpu show mm2-captures/gpu_reference/full_model
    """
    source = open_source(directory)
    if as_json:
        print_json(capture_record(source))
    else:
        click.echo(render_capture(source))


def _run_golden(options: Options, make_run: Callable[[ModelSpec], Run], sampling: Sampling | None = None) -> None:
    """Build the request, run it, print what came of it."""
    folder = resolve_model(options["model"])
    spec = ModelSpec.from_folder(folder)
    run = make_run(spec)
    run.span.within(spec.num_hidden_layers)
    request = GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=run.span.stop,
            dtype=options["dtype"],
            placement=parse_placement(
                options["device_map"], max_memory=options["max_memory"], offload_folder=options["offload_folder"]
            ),
            attn_implementation=options["attn_implementation"],
            experts_implementation=options["experts_implementation"],
        ),
        model_source=options["model"],
        run=run,
        inputs=build_inputs(read_input_request(options), folder=folder, spec=spec),
        # A float32 run has no BF16 noise to measure.
        noise_floor="off" if options["dtype"] == torch.float32 else options["noise_floor"],
    )
    with open_golden(request) as golden:
        generated = generate(golden.model, request.inputs, sampling, folder=folder) if sampling else None
        if options["no_save"]:
            _print_unsaved(golden.run(), generated, as_json=options["as_json"])
            return
        directory = options["output_dir"] or capture_directory(options["captures"], GOLDEN_SIDE, run.name)
        golden.capture(directory, extra={GENERATION_NAME: generated} if generated else {})
    capture = Capture.open(directory)
    if options["as_json"]:
        print_json({**capture_record(capture), "generation": generated})
    else:
        click.echo(render_capture(capture))
        _print_generated(generated)


def _print_unsaved(
    layers: dict[int, dict[Site, torch.Tensor]], generated: dict[str, Any] | None, *, as_json: bool
) -> None:
    if as_json:
        print_json({**statistics_record(layers), "generation": generated})
    else:
        click.echo(render_statistics(layers))
        _print_generated(generated)


def _print_generated(generated: dict[str, Any] | None) -> None:
    for index, row in enumerate(generated["rows"] if generated else ()):
        click.echo(f"row {index}: {row['generated_ids']}\n  {row['text'] or ''}")


if __name__ == "__main__":
    main()
