"""The command `mm2-test replacement`: the golden's stream in the files of NxDI and vLLM Neuron, and a search by it."""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.command_line.console import Mm2Command, end_command, loading, print_json, print_text
from minimax_tools.command_line.options import (
    captures_option,
    grouped_as,
    model_option,
    output_options,
    stack_options,
)
from minimax_tools.dumps.format_names import NXDI, VLLM_NEURON
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.streams import write
from minimax_tools.model.spec import ModelSpec
from neuron.options import golden_option

if TYPE_CHECKING:
    from minimax_tools.results.probes import Point, ReplacedRun, StreamSearch
    from neuron.replacement.run_folder import RunFolder, RunPlan
    from neuron.replacement.stream import GoldenStream


# NxDI's kernels take lengths that are multiples of this.
_LENGTH_MULTIPLE = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplacementOptions:
    """The options of the command. Their help texts explain them."""

    model: str
    golden: Path
    tool: str
    layer: int | None
    num_decoded: int | None
    bucket: int | None
    is_exhaustive: bool
    is_anew: bool
    output_dir: Path
    captures: Path
    as_json: bool


@click.command(
    "replacement",
    cls=Mm2Command,
    resumes=True,
    epilog="\b\nExample: mm2-test replacement --model DIR --golden GOLDEN --format nxdi --output-dir replaced",
)
@stack_options(
    model_option,
    golden_option("Golden capture of the whole model: gives the stream and the prompts.", required=True),
    click.option(
        "--format",
        "tool",
        type=click.Choice([NXDI, VLLM_NEURON]),
        required=True,
        help="Tool that runs the port.",
    ),
    click.option(
        "--layer",
        type=click.IntRange(min=0),
        help="Layer whose input is to be replaced in the next run; the number of layers for the final norm's. Default: "
        "the one that the search needs next.",
    ),
    click.option(
        "--decode",
        "num_decoded",
        type=click.IntRange(min=0),
        metavar="N",
        help="Decode the last N tokens of each prompt one at a time; more of them show smaller mistakes. "
        "Default: 32, or half of the shortest prompt.",
    ),
    click.option(
        "--bucket",
        type=click.IntRange(min=1),
        metavar="C",
        help="With nxdi: columns of a prefill in the compiled graph, its max_context_length. Default: the prompts' "
        f"length, up to a multiple of {_LENGTH_MULTIPLE}.",
    ),
    click.option(
        "--exhaustive",
        "is_exhaustive",
        is_flag=True,
        help="Ask for a run at every layer, from the last on. Default: halve the layers.",
    ),
    click.option(
        "--anew",
        "is_anew",
        is_flag=True,
        help="Drop the logits in the folder: the port has been mended since. Its other files stay.",
    ),
    click.option(
        "--output-dir",
        type=click.Path(path_type=Path, file_okay=False),
        required=True,
        help="Folder for the files, and for the logits of the runs.",
    ),
    captures_option,
    output_options,
    grouped_as("options", ReplacementOptions),
)
def replacement_command(options: ReplacementOptions) -> None:
    """Bisect a port that is compiled whole: run it by hand, with the golden's stream in place of its own.

    Writes the stream into files, and prints the lines to paste for one run by the tool's tensor replacement. After
    the run give the same command again: it judges the logits, and asks for the next run, until the last wrong layer is
    named. Judged logits stay in the folder, until --anew drops them for a port that has been mended.

    Exits with 3 while a run is missing, with 1 if a part of the model is wrong, with 0 if none is.
    """
    with loading():
        import torch

        from compare.chains.stream_search import search_stream
        from minimax_tools.capture.mirror import address_of
        from minimax_tools.capture.reader import Capture
        from minimax_tools.checkpoint.reader import CheckpointReader
        from minimax_tools.golden_logits.logits_store import LOGITS_FOLDER
        from neuron.replacement.stream import GoldenStream, ReplacedJudge
        from reports.replacements import render_stream_search, stream_search_record

    spec = ModelSpec.from_folder(resolve_config(options.model))
    if options.layer is not None and options.layer > spec.num_hidden_layers:
        raise UsageError(
            f"--layer {options.layer} is no layer of the model",
            expected=f"0 to {spec.num_hidden_layers}, the last for the final norm",
        )
    golden = Capture.open(options.golden).of_whole_ports()
    with CheckpointReader(resolve_model(options.model)) as reader:
        stream = GoldenStream.open(golden, reader=reader, spec=spec, dtype=torch.bfloat16)
        folder = _open_folder(options, stream)
        judge = ReplacedJudge(
            stream=stream,
            num_decoded=folder.plan.num_decoded,
            reader=reader,
            folder=options.captures / LOGITS_FOLDER,
        )

        def judge_run(point: Point) -> ReplacedRun | None:
            rows = folder.read_logits(point)
            return None if rows is None else judge.judge(point, rows)

        search = search_stream(
            spec.num_hidden_layers,
            judge_run,
            reference=address_of(golden.directory),
            target="",
            is_exhaustive=options.is_exhaustive,
        )
    if search.finding is not None and search.finding.point == spec.num_hidden_layers:
        folder.refuse_unmoved([run.point for run in search.runs])
    needs_run = options.layer is not None or not search.is_finished
    lines = _lines_to_paste(options, search, folder=folder, stream=stream) if needs_run else ""
    # Once the part that was found is mended, all runs are to be made again.
    is_mended = not needs_run and search.finding is not None
    again = (_again(options, folder.plan, is_mended=is_mended),) if needs_run or is_mended else ()
    if options.as_json:
        record = {**stream_search_record(search), "directory": str(folder.directory)}
        record["notes"] += golden.row_notes
        print_json({**record, "lines": lines.splitlines()}, next_commands=again)
    else:
        write("\n".join((render_stream_search(search), *golden.row_notes)))
        if lines:
            write(f"\n{lines}")
        print_text("", next_commands=again)
    end_command(search.verdict.exit_code)


def _open_folder(options: ReplacementOptions, stream: GoldenStream) -> RunFolder:
    from neuron.commands.bisect_whole import choose_num_decoded
    from neuron.model_runs.passes import plan_passes
    from neuron.replacement.nxdi_run import refuse_prompts, write_stream
    from neuron.replacement.run_folder import RunFolder, RunPlan
    from neuron.replacement.vllm_neuron_run import refuse_requests, write_token_ids

    inputs, spec = stream.inputs, stream.spec
    num_decoded = choose_num_decoded(inputs, options.num_decoded)
    # Before anything is written: a prompt may be too short.
    plan_passes(inputs, num_decoded)
    bucket = 0
    if options.tool == NXDI:
        bucket = options.bucket or -(-inputs.sequence_length // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        refuse_prompts(inputs, bucket=bucket)
    else:
        if options.bucket is not None:
            raise UsageError("--bucket is an option of --format nxdi", next_step="Leave it out.")
        refuse_requests(inputs, num_decoded=num_decoded)
    plan = RunPlan(
        tool=options.tool,
        golden_digest=stream.digest(),
        model_name=options.model,
        num_layers=spec.num_hidden_layers,
        hidden_size=spec.hidden_size,
        vocab_size=spec.vocab_size,
        num_decoded=num_decoded,
        bucket=bucket,
    )

    def write_files(folder: RunFolder) -> None:
        if options.tool == NXDI:
            write_stream(folder, stream)
        else:
            write_token_ids(folder)

    folder = RunFolder.make(options.output_dir, plan, inputs, write=write_files)
    if options.is_anew:
        folder.drop_logits()
    return folder


def _lines_to_paste(
    options: ReplacementOptions, search: StreamSearch, *, folder: RunFolder, stream: GoldenStream
) -> str:
    from neuron.replacement.vllm_neuron_run import write_tensors

    point = search.waits_for if options.layer is None else options.layer
    if options.tool == NXDI:
        return _nxdi_instructions(folder, point)
    write_tensors(folder, stream, point)
    return _vllm_neuron_instructions(folder, point)


def _again(options: ReplacementOptions, plan: RunPlan, *, is_mended: bool) -> str:
    """Return the command that judges the run, or that asks for all runs of a port that is mended."""
    again = {
        "--model": options.model,
        "--golden": options.golden,
        "--format": options.tool,
        "--decode": plan.num_decoded,
        "--output-dir": options.output_dir,
        "--captures": options.captures,
        **({"--bucket": plan.bucket} if options.tool == NXDI else {}),
    }
    words = [text for pair in again.items() for text in map(str, pair)]
    flags = [*(["--exhaustive"] if options.is_exhaustive else []), *(["--anew"] if is_mended else [])]
    return shlex.join(["mm2-test", "replacement", *words, *flags])


def _nxdi_instructions(folder: RunFolder, point: Point) -> str:
    """Return the lines for NxDI: the points, the config of the compiled graph, and the run."""
    directory, plan = folder.directory.resolve(), folder.plan
    batch_size = folder.read_inputs().batch_size
    return f"""\
# 1. Once, in the port's model (its NeuronBaseModel), as the last line of init_model:
from neuron.ports.nxdi_stream import add_stream_points
add_stream_points(self)

# 2. Once: options of the NeuronConfig, and the replacement, before the application is built, compiled and loaded.
#    The graph is compiled once for all points.
#      batch_size={batch_size}, max_context_length={plan.bucket}, enable_bucketing=False, padding_side="right",
#      output_logits=True, sequence_parallel_enabled=False, seq_len at least {plan.bucket + plan.num_decoded}
from neuron.ports.nxdi_stream import stream_replacement
neuron_config.tensor_replacement_config = stream_replacement(
    neuron_config, num_layers={plan.num_layers}, hidden_size={plan.hidden_size}
)

# 3. Each run, behind application.compile(…) and application.load(…): {_word_run(folder, point)}.
from neuron.replacement.nxdi_run import run_replaced
run_replaced(application, {str(directory)!r}, point={point!r})  # writes {_word_logits(folder, point)}
"""


def _vllm_neuron_instructions(folder: RunFolder, point: Point) -> str:
    """Return the lines for vLLM Neuron: the points, the engine's options, and the run."""
    from neuron.replacement.vllm_neuron_run import TOKENS_NAME, tensors_name

    directory, plan = folder.directory.resolve(), folder.plan
    options = {
        "neuron_config": {
            "tensor_replacement": {
                "tensors_path": str(directory / tensors_name(folder, point)),
                "prompt_token_ids_path": str(directory / TOKENS_NAME),
            },
            "max_logprobs": -1,
        }
    }
    return f"""\
# 1. Once, in the port's model: before each layer, by its number i from 0, and before the final norm. With ranks that
#    divide the tokens of a prefill add rank=…; with a stream of two summands take replace_summands.
from neuron.ports.vllm_neuron_stream import point_name, replace_stream
hidden_states = replace_stream(hidden_states, point_name(i, num_layers={plan.num_layers}))
hidden_states = replace_stream(hidden_states, point_name({plan.num_layers}, num_layers={plan.num_layers}))

# 2. Each run: {_word_run(folder, point)}. The graph stays the same.
from vllm import LLM
llm = LLM(
    model={plan.model_name!r},
    max_logprobs=-1,
    enable_prefix_caching=False,
    additional_config={json.dumps(options)},
)
from neuron.replacement.vllm_neuron_run import run_replaced
run_replaced(llm, {str(directory)!r}, point={point!r})  # writes {_word_logits(folder, point)}
"""


def _word_run(folder: RunFolder, point: Point) -> str:
    if point is None:
        return "nothing is replaced"
    from minimax_tools.results.probes import name_point

    return f"the stream is replaced at {name_point(point, num_layers=folder.plan.num_layers)}"


def _word_logits(folder: RunFolder, point: Point) -> str:
    return str(folder.logits_path(point).relative_to(folder.directory))
