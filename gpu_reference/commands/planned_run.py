"""A golden as a command makes it in several processes: each runs one slice of a plan, and rank 0 prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

import click

from gpu_reference.commands.golden_run import (
    describe_golden,
    make_request,
    print_golden,
    read_placement,
    whole_model_run,
)
from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.options import GoldenOptions
from gpu_reference.pipeline.pipeline import capture_by_ranks, validate_plan
from gpu_reference.streaming.stream_choice import choose_part_streaming
from minimax_tools.capture.read_record import ReadRecord, read_records
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import after_golden
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.command_line.console import say, show_warnings_only, shows_details
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.progress import LayerProgress, NoProgress, Progress
from minimax_tools.machine.streams import shows_pictures
from minimax_tools.model.run import Run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.plan import PartitionPlan, Slice
from minimax_tools.ranks.failure import ReportedElsewhereError
from minimax_tools.ranks.rank_group import open_ranks
from minimax_tools.ranks.rank_place import RankPlace, warn_of_idle_cores
from minimax_tools.slices.verification_text import render_run


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
            request = _read_request(
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
            *describe_golden(capture, as_json=options.as_json),
            None,
            as_json=options.as_json,
            next_commands=after_golden(capture, model=options.model),
        )


def _read_request(
    options: GoldenOptions, plan: PartitionPlan, slice_: Slice, place: RankPlace, slices_folder: Path | None
) -> GoldenRequest:
    """Return the request of one rank: a model with the layers up to the rank's last, of which the first are skipped.

    A rank that holds the embedding alone has a model of one layer, which is skipped.
    """
    placement = read_placement(options)
    if slices_folder is not None:
        folder = slices_folder / slice_.node.name
        spec = ModelSpec.from_folder(folder)
    else:
        model = options.model or plan.model
        spec = ModelSpec.from_folder(resolve_config(model))
        folder = resolve_model(model, layers=slice_.stage.layers)
    validate_plan(plan, folder, spec, slice_, is_slice=slices_folder is not None)
    request = make_request(
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
