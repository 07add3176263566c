"""A golden as a command makes it: load or stream, generate, capture, certify, print.

By a plan several processes make it: each runs one slice, and rank 0 prints.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click
import torch

from gpu_reference.certification.certifier import certify_golden
from gpu_reference.golden.generation import generate
from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.golden.sampling import Sampling
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement, parse_placement
from gpu_reference.options import GoldenOptions
from gpu_reference.pipeline.pipeline import capture_by_ranks, validate_plan
from gpu_reference.streaming.stream_choice import choose_part_streaming, choose_streaming, is_whole
from minimax_tools.capture.passes import GENERATION_NAME, Generation
from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.resumption import holds_same, other_run_error, read_kept, refuse_other_run
from minimax_tools.capture.run_commands import after_golden
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import tidy_capture
from minimax_tools.checkpoint.index import find_absent_shards
from minimax_tools.command_line.console import (
    leave_record,
    print_json,
    print_text,
    say,
    show_warnings_only,
    shows_details,
)
from minimax_tools.errors import UsageError, list_faults
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.progress import LayerProgress, NoProgress, Progress
from minimax_tools.machine.streams import shows_pictures
from minimax_tools.model.run import Run, full_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.ranks.failure import ReportedElsewhereError
from minimax_tools.ranks.rank_group import RankPlace, open_ranks, warn_of_idle_cores
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.slices.verification_text import render_run
from minimax_tools.text.prompts import build_inputs
from reports.captures import capture_record, render_capture, render_statistics, statistics_record

logger = logging.getLogger(__name__)


def run_golden(
    options: GoldenOptions, make_run: Callable[[ModelSpec], Run], sampling: Sampling | None = None
) -> None:
    """Make a golden, and print it. With `sampling`, generate tokens before the capture.

    `make_run` gets the checkpoint's spec, and returns the layers and sites to capture.

    Raises:
        UsageError: Options contradict each other.
    """
    if options.model is None:
        raise UsageError("no checkpoint is named", next_step="Give --model, or a --plan, which names one.")
    if options.certify and options.no_save:
        raise UsageError("--certify checks a capture", found="--no-save", next_step="Leave one of them out.")
    request = _read_request(options, options.model, make_run)
    directory = options.store.directory(GOLDEN_SIDE, request.run.name)
    is_protected = not options.no_save and not options.store.overwrite
    if is_protected:
        _refuse_plainly_other(directory, request)
    with open_golden(request) as golden:
        generation = None
        if sampling is not None:
            generation = generate(
                golden.model, request.inputs.natural(), sampling, folder=request.model.folder
            )
        if options.no_save:
            layers = golden.run()
            record, text = statistics_record(layers), render_statistics(layers)
            following: tuple[str, ...] = ()
        else:
            is_made = False
            if is_protected:
                description = golden.describe()
                refuse_other_run(directory, description)
                is_made = holds_same(directory, description) and not _is_damaged(directory)
            if is_made:
                tidy_capture(directory)
            if is_made and _read_generation(directory) == generation:
                logger.info(
                    "The same golden is in %s, finished: it is left as it is. --overwrite makes it anew.",
                    directory,
                )
            elif is_made:
                raise other_run_error(directory, ["generated tokens"])
            else:
                extra = {GENERATION_NAME: encode(generation)} if generation else {}
                with LayerProgress(len(request.run.span), label="Golden") as progress:
                    golden.capture(directory, extra=extra, progress=progress)
            if options.certify and not Capture.open(directory).manifest.is_certified:
                # The certificate is stored in the capture, which is then printed with it.
                certify_golden(directory, options.model)
            capture = Capture.open(directory)
            record, text = _describe_golden(capture, as_json=options.as_json)
            following = after_golden(capture, model=options.model)
    print_golden(record, text, generation, as_json=options.as_json, next_commands=following)


def _refuse_plainly_other(directory: Path, request: GoldenRequest) -> None:
    """Raise before the model is loaded, if what the request alone tells differs from a finished golden there."""
    kept = read_kept(directory)
    if kept is None:
        return
    found = kept.description
    pairs = {
        "inputs_digest": (found.inputs_digest, request.inputs.digest()),
        "model_source": (found.provenance.model_source, request.model_source),
        "noise_floor": (found.noise_floor, request.noise_floor),
        "run": (found.run, request.run),
    }
    differing = [name for name, (kept_value, value) in pairs.items() if kept_value != value]
    if differing:
        raise other_run_error(directory, differing)


def _is_damaged(directory: Path) -> bool:
    """Decide whether the golden in a folder of this machine is damaged, and say what is wrong with it."""
    faults = inspect_capture(Capture.open(directory)).faults
    if faults:
        logger.warning(
            "The golden in %s is damaged, and is made anew: %s", directory, list_faults(list(faults))
        )
    return bool(faults)


def _read_generation(directory: Path) -> Generation | None:
    return Capture.open(directory).read_generation()


def _describe_golden(golden: Capture, *, as_json: bool) -> tuple[dict[str, Any], str]:
    """Return a stored golden as JSON, and as text unless JSON is asked for. `mm2-gpu show` has its statistics."""
    return capture_record(golden), "" if as_json else render_capture(golden, shows_statistics=False)


def print_golden(
    record: dict[str, Any],
    text: str,
    generation: Generation | None,
    *,
    as_json: bool,
    next_commands: tuple[str, ...],
) -> None:
    """Print a golden as JSON or as text, with the tokens that it generated and the commands to run next."""
    record |= {"generation": encode(generation)} if generation else {}
    leave_record(lambda: record, text, next_commands=next_commands)
    if as_json:
        print_json(record, next_commands=next_commands)
    else:
        text = "\n\n".join(filter(None, (text.strip("\n"), str(generation or "").strip("\n"))))
        print_text(text, next_commands=next_commands)


def whole_model_run(options: GoldenOptions, spec: ModelSpec) -> Run:
    """Return the run of all layers, with the sites that the options name."""
    return full_run(spec.num_hidden_layers, sites_level=options.sites_level, graph=spec.graph)


def _read_placement(options: GoldenOptions) -> Placement:
    """Read the placement on this machine.

    Raises:
        UsageError: A value cannot be read, or has no effect.
    """
    return parse_placement(
        options.device_map, max_memory=options.max_memory, offload_folder=options.offload_folder
    )


def _make_request(
    options: GoldenOptions, run: Run, *, folder: Path, spec: ModelSpec, placement: Placement, num_layers: int
) -> GoldenRequest:
    """Return the request of a golden whose first `num_layers` layers run; the caller chooses its streaming.

    Raises:
        UsageError: The token rows cannot be built, or variants were asked for of a noise floor that is off.
    """
    assert options.model is not None, "the options or the plan name a model"
    # A float32 run has no BF16 noise to measure.
    noise_floor = "off" if options.dtype == torch.float32 else options.noise_floor
    return GoldenRequest(
        model=GoldenModelRequest(
            folder=folder,
            spec=spec,
            num_hidden_layers=num_layers,
            dtype=options.dtype,
            placement=placement,
            attn_implementation=options.attn_implementation,
            experts_implementation=options.experts_implementation,
        ),
        model_source=options.model,
        run=run,
        inputs=build_inputs(options.inputs, folder=folder, spec=spec),
        noise_floor=noise_floor,
        floor_variants=_read_variants(options, noise_floor),
        budget=MemoryBudget(options.memory_budget),
    )


def _read_request(options: GoldenOptions, model: str, make_run: Callable[[ModelSpec], Run]) -> GoldenRequest:
    placement = _read_placement(options)
    spec = ModelSpec.from_folder(resolve_config(model))
    run = make_run(spec)
    run.span.within(spec.num_hidden_layers)
    # transformers loads a model whole only from all of its shards. A streamed model needs those of the layers that run.
    runs_all = run.span.stop == spec.num_hidden_layers
    needs_all_shards = runs_all or is_whole(options.streaming.stream, placement)
    folder = resolve_model(model, layers=None if needs_all_shards else range(run.span.stop))
    request = _make_request(
        options, run, folder=folder, spec=spec, placement=placement, num_layers=run.span.stop
    )
    absent_shards = () if needs_all_shards else find_absent_shards(folder)
    streaming = choose_streaming(options.streaming, request.room, absent_shards=absent_shards)
    return replace(request, streaming=streaming)


def _read_variants(options: GoldenOptions, noise_floor: str) -> tuple[str, ...]:
    number = options.floor_variants
    if noise_floor != "off" and not options.no_save:
        return variant_names(DEFAULT_NUM_VARIANTS if number is None else number)
    if not number:
        return ()
    off = "--noise-floor off" if options.noise_floor == "off" else "--dtype float32"
    raise UsageError(
        "--floor-variants widens the noise floor of a capture, and none is measured",
        found="--no-save" if options.no_save else off,
        next_step="Leave one of them out.",
    )


def run_planned(options: GoldenOptions, plan_file: Path, slices_folder: Path | None) -> None:
    """Run this rank's slice of a plan; rank 0 prints the whole capture.

    The slice is read from the extracted slices in `slices_folder`, or from the checkpoint if that is None.

    Raises:
        UsageError: Options contradict each other.
    """
    if options.no_save:
        raise UsageError("--plan writes a capture", found="--no-save", next_step="Leave one of them out.")
    if options.certify:
        raise UsageError(
            "--certify reads the whole model, but a rank has a slice only",
            next_step="Leave it out, and run mm2-gpu certify where the model is.",
        )
    place = RankPlace.from_environment()
    if place.rank > 0:
        show_warnings_only()
    try:
        with open_ranks(place) as ranks:
            plan = PartitionPlan.read(plan_file)
            # Rank i runs the plan's i-th slice that holds something.
            ranks.assign([used.node.name for used in plan.used])
            warn_of_idle_cores(place)
            slice_ = plan.used[place.rank]
            _show_slice(plan, slice_.node.name)
            request = _read_slice_request(
                replace(options, model=options.model or plan.model), plan, slice_, place, slices_folder
            )
            assert request.streaming is not None, "a slice is streamed"
            # Opens the process group, by which the ranks send hidden states.
            ranks.join(request.streaming.device)
            directory = options.store.directory(GOLDEN_SIDE, request.run.name)
            with open_golden(request) as golden, _progress_of(place, request.run) as progress:
                capture_by_ranks(
                    golden, ranks, plan, directory, progress=progress, overwrites=options.store.overwrite
                )
            _show_slice(plan, slice_.node.name, read_records(directory, [slice_.node.name]))
    except ReportedElsewhereError as error:
        # Another rank failed first, and reports the error.
        click.get_current_context().exit(error.exit_code)
    if place.rank == 0:
        capture = Capture.open(directory)
        print_golden(
            *_describe_golden(capture, as_json=options.as_json),
            None,
            as_json=options.as_json,
            next_commands=after_golden(capture, model=options.model),
        )


def _read_slice_request(
    options: GoldenOptions, plan: PartitionPlan, slice_: Slice, place: RankPlace, slices_folder: Path | None
) -> GoldenRequest:
    """Return the request of one rank: a model with the layers up to the rank's last, of which the first are skipped.

    A rank that holds the embedding alone has a model of one layer, which is skipped.
    """
    placement = _read_placement(options)
    if slices_folder is not None:
        folder = slices_folder / slice_.node.name
        spec = ModelSpec.from_folder(folder)
    else:
        model = options.model or plan.model
        spec = ModelSpec.from_folder(resolve_config(model))
        folder = resolve_model(model, layers=slice_.stage.layers)
    validate_plan(plan, folder, spec, slice_, is_slice=slices_folder is not None)
    request = _make_request(
        options,
        whole_model_run(options, spec),
        folder=folder,
        spec=spec,
        placement=placement,
        num_layers=max(slice_.stage.layers.stop, 1),
    )
    streaming = choose_part_streaming(options.streaming, request.room, slice_, place=place)
    return replace(request, streaming=streaming)


def _show_slice(
    plan: PartitionPlan, node: str, records: Mapping[str, ReadRecord] = MappingProxyType({})
) -> None:
    """Print what a rank is to load or, with `records`, has loaded, if the variable DEBUG asks for it."""
    if shows_details():
        text = render_run(plan, node, record=records.get(node), with_marks=shows_pictures(sys.stderr))
        say(text, to_stderr=True)


def _progress_of(place: RankPlace, run: Run) -> AbstractContextManager[Progress]:
    return nullcontext(NoProgress()) if place.rank else LayerProgress(len(run.span), label="Golden")
