"""A golden as a command makes it in one process: load or stream, generate, capture, certify, print."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from gpu_reference.certification.certifier import certify_golden
from gpu_reference.golden.generation import generate
from gpu_reference.golden.golden import GoldenRequest, open_golden
from gpu_reference.golden.sampling import Sampling
from gpu_reference.model.model import GoldenModelRequest
from gpu_reference.model.placement import Placement, parse_placement
from gpu_reference.options import GoldenOptions
from gpu_reference.streaming.stream_choice import choose_streaming, is_whole
from minimax_tools.capture.passes import GENERATION_NAME, Generation
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.resumption import holds_same, other_run_error, read_kept, refuse_other_run
from minimax_tools.capture.run_commands import after_golden
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.capture.writer import tidy_capture
from minimax_tools.checkpoint.index import find_absent_shards
from minimax_tools.command_line.console import leave_record, print_json, print_text
from minimax_tools.errors import UsageError, list_faults
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.progress import LayerProgress
from minimax_tools.model.run import Run, full_run
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, variant_names
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
            record, text = describe_golden(capture, as_json=options.as_json)
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


def describe_golden(golden: Capture, *, as_json: bool) -> tuple[dict[str, Any], str]:
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
    return full_run(spec.num_hidden_layers, sites_level=options.sites_level)


def read_placement(options: GoldenOptions) -> Placement:
    """Read the placement on this machine.

    Raises:
        UsageError: A value cannot be read, or has no effect.
    """
    return parse_placement(
        options.device_map, max_memory=options.max_memory, offload_folder=options.offload_folder
    )


def make_request(
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
    placement = read_placement(options)
    spec = ModelSpec.from_folder(resolve_config(model))
    run = make_run(spec)
    run.span.within(spec.num_hidden_layers)
    # transformers loads a model whole only from all of its shards. A streamed model needs those of the layers that run.
    runs_all = run.span.stop == spec.num_hidden_layers
    needs_all_shards = runs_all or is_whole(options.streaming.stream, placement)
    folder = resolve_model(model, layers=None if needs_all_shards else range(run.span.stop))
    request = make_request(
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
