"""The command `mm2-gpu`: golden captures with transformers, on GPUs or the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

from gpu_reference.certify_command import certify_command, certify_golden
from gpu_reference.golden.generation import Sampling, generate
from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement, parse_placement
from gpu_reference.options import golden_options, planned_golden_options, sampling_options
from gpu_reference.pipeline.pipeline import capture_by_ranks
from gpu_reference.pipeline.steps import validate_plan
from gpu_reference.streaming.stream_choice import choose_part_streaming, choose_streaming, is_whole
from minimax_tools.capture.generation import GENERATION_NAME, Generation
from minimax_tools.capture.inspection import inspect_capture
from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import GOLDEN_SIDE, capture_directory
from minimax_tools.checkpoint.index import find_absent_shards
from minimax_tools.command_line.console import (
    Mm2Group,
    end_command,
    print_json,
    show_warnings_only,
    shows_details,
    shows_pictures,
)
from minimax_tools.command_line.options import (
    layer_option,
    output_options,
    read_input_request,
    read_reading,
    read_span,
    reading_options,
    span_options,
)
from minimax_tools.command_line.progress import LayerProgress, NoProgress, Progress
from minimax_tools.dumps.opening import open_source
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.run import Run, full_run, multi_layer_run, single_layer_run
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.ranks.failure import ReportedElsewhereError
from minimax_tools.ranks.rank_group import open_ranks
from minimax_tools.ranks.rank_place import RankPlace, warn_of_idle_cores
from minimax_tools.reference.variants import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.slices.verification_text import render_run
from minimax_tools.text.prompts import build_inputs
from reports.captures import capture_record, is_damaged, render_capture, render_statistics, statistics_record

Options = dict[str, Any]
MakeRun = Callable[[ModelSpec], Run]


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-gpu extract-all --model MiniMaxAI/MiniMax-M2 --max-memory 40GB --seq-len 96,61",
)
def main() -> None:
    """Make golden captures of a MiniMax-M2 with transformers' own model."""


@main.command(
    "extract-all",
    epilog="\b\n"
    "By a plan of two slices, on 16 cores:\n"
    "  OMP_NUM_THREADS=8 torchrun --nproc-per-node 2 -m gpu_reference extract-all --plan P.json --seq-len 96,61\n"
    "Example: mm2-gpu extract-all --model DIR --max-memory 40GB --seq-len 96,61",
)
@planned_golden_options
def extract_all(plan_file: Path | None, slices_folder: Path | None, **options: Any) -> None:
    """Capture every layer of the model from one forward pass, on one machine or, by a plan, on several."""
    if plan_file is not None:
        _run_planned(options, plan_file, slices_folder)
        return
    if slices_folder is not None:
        raise UsageError("--slices belongs to a plan", next_step="Give --plan too.")
    if options["model"] is None:
        raise UsageError("no checkpoint is named", next_step="Give --model, or a --plan, which names one.")
    _run_golden(options, _whole_model(options))


@main.command("full", epilog='\b\nExample: mm2-gpu full --model DIR --prompt "The capital of France is"')
@sampling_options
@golden_options
def full(
    max_new_tokens: int,
    do_sample: bool,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    **options: Any,
) -> None:
    """Capture every layer, then generate; ids and text are saved beside the activations."""
    sampling = Sampling(
        max_new_tokens=max_new_tokens,
        do_sample=do_sample,
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        seed=options["seed"],
    )
    _run_golden(options, _whole_model(options), sampling)


@main.command("single-layer", epilog="\b\nExample: mm2-gpu single-layer --model DIR --layer 7")
@layer_option
@golden_options
def single_layer(layer: int, **options: Any) -> None:
    """Capture one layer, fed by the layers before it."""
    _run_golden(options, lambda _: single_layer_run(layer, sites_level=options["sites_level"]))


@main.command(
    "multi-layer", epilog="\b\nExample: mm2-gpu multi-layer --model DIR --start-layer 0 --end-layer 5"
)
@span_options
@golden_options
def multi_layer(start_layer: int | None, end_layer: int | None, layers: str | None, **options: Any) -> None:
    """Capture a range of layers, fed by the layers before it; all of them where no range is given."""
    given = read_span(start_layer, end_layer, layers)

    def make_run(spec: ModelSpec) -> Run:
        return multi_layer_run(given or Span(0, spec.num_hidden_layers), sites_level=options["sites_level"])

    _run_golden(options, make_run)


@main.command("show", epilog="\b\nExample: mm2-gpu show mm2-captures/gpu_reference/full_model")
@click.argument("directory", type=click.Path(path_type=Path))
@reading_options()
@output_options
def show(directory: Path, as_json: bool, **reading: Any) -> None:
    """Print what a capture holds: layers, sites, shapes and statistics, what was generated, and whether it is damaged.

    Exits with 3 where its files are not as they were written.
    """
    source = open_source(directory, read_reading(reading["format"], reading["map"]))
    generated = Generation.read(directory)
    inspection = inspect_capture(source) if isinstance(source, Capture) else None
    if as_json:
        print_json(_with_generation(capture_record(source, inspection), generated))
    else:
        click.echo(render_capture(source, inspection) + _word(generated))
    if is_damaged(source, inspection):
        end_command(CaptureError.exit_code)


main.add_command(certify_command)


def _whole_model(options: Options) -> MakeRun:
    return lambda spec: full_run(spec.num_hidden_layers, sites_level=options["sites_level"])


def _run_golden(options: Options, make_run: MakeRun, sampling: Sampling | None = None) -> None:
    """Run what was asked for, and print what came of it."""
    if options["certify"] and options["no_save"]:
        raise UsageError("--certify checks a capture", found="--no-save", next_step="Leave one of them out.")
    request = _read_request(options, make_run)
    with open_golden(request) as golden:
        generated = None
        if sampling is not None:
            generated = generate(golden.model, request.inputs, sampling, folder=request.model.folder)
        if options["no_save"]:
            layers = golden.run()
            record, text = statistics_record(layers), render_statistics(layers)
        else:
            directory = _directory(options, request.run)
            with LayerProgress(len(request.run.span), label="Golden") as progress:
                golden.capture(
                    directory,
                    extra={GENERATION_NAME: generated.as_json()} if generated else {},
                    progress=progress,
                )
            if options["certify"]:
                certify_golden(directory, options["model"])
            capture = Capture.open(directory)
            record, text = capture_record(capture), render_capture(capture)
    if options["as_json"]:
        print_json(_with_generation(record, generated))
    else:
        click.echo(text + _word(generated))


def _run_planned(options: Options, plan_file: Path, slices_folder: Path | None) -> None:
    """Run one rank's slice of a plan; rank 0 prints what came of all."""
    if options["no_save"]:
        raise UsageError("--plan writes a capture", found="--no-save", next_step="Leave one of them out.")
    if options["certify"]:
        raise UsageError(
            "--certify reads the whole model, of which a rank has a slice",
            next_step="Leave it out, and run mm2-gpu certify where the model is.",
        )
    place = RankPlace.from_environment()
    if place.rank > 0:
        show_warnings_only()
    try:
        with open_ranks(place) as ranks:
            plan = PartitionPlan.read(plan_file)
            ranks.assign([part.node.name for part in plan.used])
            warn_of_idle_cores(place)
            options["model"] = options["model"] or plan.model
            node = plan.used[place.rank].node.name
            _show_part(plan, node)
            request = _read_planned_request(options, plan, plan.used[place.rank], place, slices_folder)
            assert request.streaming is not None, "a slice is streamed"
            ranks.join(request.streaming.device)
            directory = _directory(options, request.run)
            with open_golden(request) as golden, _progress_of(place, request.run) as progress:
                capture_by_ranks(golden, ranks, plan, directory, progress=progress)
            _show_part(plan, node, read_records(directory, [node]))
    except ReportedElsewhereError as error:
        click.get_current_context().exit(error.exit_code)
    if place.rank == 0:
        _print_capture(Capture.open(directory), as_json=options["as_json"])


def _show_part(
    plan: PartitionPlan, node: str, records: Mapping[str, ReadRecord] = MappingProxyType({})
) -> None:
    """What a rank will load, and what it loaded where there are records, if the variable DEBUG asks for it."""
    if shows_details():
        text = render_run(plan, node, record=records.get(node), with_marks=shows_pictures(sys.stderr))
        click.echo(text, err=True)


def _progress_of(place: RankPlace, run: Run) -> AbstractContextManager[Progress]:
    return nullcontext(NoProgress()) if place.rank else LayerProgress(len(run.span), label="Golden")


def _directory(options: Options, run: Run) -> Path:
    directory: Path | None = options["output_dir"]
    return directory or capture_directory(options["captures"], GOLDEN_SIDE, run.name)


def _print_capture(capture: Capture, *, as_json: bool) -> None:
    if as_json:
        print_json(capture_record(capture))
    else:
        click.echo(render_capture(capture))


def _read_planned_request(
    options: Options, plan: PartitionPlan, part: Slice, place: RankPlace, slices_folder: Path | None
) -> GoldenRequest:
    """What one rank runs: the layers up to its last, of which those before its first stand aside."""
    placement = _read_placement(options)
    if slices_folder is not None:
        folder = slices_folder / part.node.name
    else:
        folder = resolve_model(options["model"], layers=part.stage.layers)
    spec = ModelSpec.from_folder(folder)
    validate_plan(plan, folder, spec, part, is_slice=slices_folder is not None)
    num_layers = max(part.stage.layers.stop, 1)
    request = _make_request(options, folder, spec, _whole_model(options)(spec), placement, num_layers)
    streaming = choose_part_streaming(
        options["stream"],
        request.footprint,
        placement,
        part,
        place=place,
        prefetch=options["prefetch"],
        packed=options["packed_experts"],
        budget=request.budget,
    )
    return replace(request, streaming=streaming)


def _read_placement(options: Options) -> Placement:
    return parse_placement(
        options["device_map"], max_memory=options["max_memory"], offload_folder=options["offload_folder"]
    )


def _make_request(
    options: Options, folder: Path, spec: ModelSpec, run: Run, placement: Placement, num_layers: int
) -> GoldenRequest:
    # A float32 run has no BF16 noise to measure.
    noise_floor = "off" if options["dtype"] == torch.float32 else options["noise_floor"]
    return GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=num_layers,
            dtype=options["dtype"],
            placement=placement,
            attn_implementation=options["attn_implementation"],
            experts_implementation=options["experts_implementation"],
        ),
        model_source=options["model"],
        run=run,
        inputs=build_inputs(read_input_request(options), folder=folder, spec=spec),
        noise_floor=noise_floor,
        floor_variants=_read_variants(options, noise_floor),
        budget=MemoryBudget(options["memory_budget"]),
    )


def _read_variants(options: Options, noise_floor: str) -> tuple[str, ...]:
    """The variants to measure: none where no noise floor is, which is refused where they were asked for by number."""
    number = options["floor_variants"]
    if noise_floor != "off" and not options["no_save"]:
        return variant_names(DEFAULT_NUM_VARIANTS if number is None else number)
    if number:
        raise UsageError(
            "--floor-variants widens the noise floor of a capture, and none is measured",
            found="--no-save"
            if options["no_save"]
            else "--noise-floor off"
            if options["noise_floor"] == "off"
            else "--dtype float32",
            next_step="Leave one of them out.",
        )
    return ()


def _read_request(options: Options, make_run: MakeRun) -> GoldenRequest:
    placement = _read_placement(options)
    spec = ModelSpec.from_folder(resolve_config(options["model"]))
    run = make_run(spec)
    run.span.within(spec.num_hidden_layers)
    # transformers loads a model only where all its shards are; a stream reads those of its layers.
    is_all = is_whole(options["stream"], placement) or run.span.stop == spec.num_hidden_layers
    folder = resolve_model(options["model"], layers=None if is_all else range(run.span.stop))
    request = _make_request(options, folder, spec, run, placement, run.span.stop)
    streaming = choose_streaming(
        options["stream"],
        request.footprint,
        placement,
        prefetch=options["prefetch"],
        packed=options["packed_experts"],
        budget=request.budget,
        absent_shards=() if is_all else find_absent_shards(folder),
    )
    return replace(request, streaming=streaming)


def _with_generation(record: dict[str, Any], generated: Generation | None) -> dict[str, Any]:
    return {**record, "generation": generated.as_json()} if generated else record


def _word(generated: Generation | None) -> str:
    return str(generated or "")


if __name__ == "__main__":
    main()
