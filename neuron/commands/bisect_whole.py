"""`mm2-test bisect --whole`: the last wrong layer of a port that is compiled whole, found by replacing its stream."""

from __future__ import annotations

from typing import NoReturn

from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json
from minimax_tools.errors import UsageError
from minimax_tools.golden_logits.logits_store import LOGITS_FOLDER
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.streams import write
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Extent, whole_bisect_run
from minimax_tools.model.spec import ModelSpec
from neuron.devices.compiler import AUTO
from neuron.devices.runtime import open_runtime
from neuron.model_runs.model_request import ModelRequest
from neuron.options import BisectOptions
from neuron.ports.targets import find_model_target
from neuron.replacement.whole_bisection import bisect_whole
from reports.replacements import render_stream_search, stream_search_record

# Most tokens to decode, if --decode does not say. A compiled port shows the logits of each pass's last token alone:
# with five of them, gate and up swapped in a layer of a toy stayed in the noise, with seventeen they did not.
_USUAL_STEPS = 32


def bisect_whole_port(options: BisectOptions) -> NoReturn:
    """Search for the last wrong part, print the result, and end the command."""
    _refuse_options_of_layers(options)
    spec = ModelSpec.from_folder(resolve_config(options.model))
    golden = Capture.open(options.golden).of_whole_ports()
    inputs = golden.read_inputs()
    num_decoded = choose_num_decoded(inputs, options.num_decoded)
    run = whole_bisect_run(spec.num_hidden_layers, num_decoded=num_decoded, graph=spec.graph)
    directory = options.store.directory(DEVICE_SIDE, run.name)
    folder = resolve_model(options.model)
    with output_set_aside():
        request = ModelRequest(
            target=find_model_target(options.target),
            spec=spec,
            folder=folder,
            dtype=options.dtype,
            sites=(),
            budget=MemoryBudget(options.memory_budget),
            run=run,
            model_source=options.model,
            inputs=inputs,
            golden=golden,
            max_new_tokens=0,
        )
        with (
            open_runtime(options.backend, ranks=options.ranks) as runtime,
            CheckpointReader(folder) as reader,
        ):
            search = bisect_whole(
                request,
                runtime=runtime,
                reader=reader,
                directory=directory,
                logits_folder=options.store.captures / LOGITS_FOLDER,
                is_anew=options.is_anew,
                is_exhaustive=options.extent is Extent.EXHAUSTIVE,
            )
    if options.as_json:
        record = {**stream_search_record(search), "directory": address_of(directory)}
        record["notes"] += golden.row_notes
        print_json(record, next_commands=())
    else:
        write("\n".join((render_stream_search(search), *golden.row_notes)))
    end_command(search.verdict.exit_code)


def choose_num_decoded(inputs: Inputs, num_decoded: int | None) -> int:
    """Return the number of tokens to decode: the one given, else the usual one, at most half of the shortest prompt."""
    return min(_USUAL_STEPS, min(inputs.lengths) // 2) if num_decoded is None else num_decoded


def _refuse_options_of_layers(options: BisectOptions) -> None:
    given = {
        "--layers": options.span is not None,
        "--all": options.extent is Extent.ALL,
        "--chain-length": options.chain_length is not None,
        "--prefetch": options.prefetch is not None,
        # A whole port is run as it is.
        "--compile": options.compile_with != AUTO,
    }
    wrong = [name for name, is_given in given.items() if is_given]
    if wrong:
        raise UsageError(
            f"{', '.join(wrong)} and --whole were both given",
            expected="a whole port, of which no layer runs alone",
            next_step="Leave out one of them.",
        )
