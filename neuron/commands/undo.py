"""`mm2-test single-layer --undo` at work: a mistake is undone in a layer, which is judged again."""

from __future__ import annotations

from typing import NoReturn

from compare.catalogue.undo import Undo
from compare.diagnosis.report import render_proof
from compare.next_commands import after_proof
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.console import end_command, print_json, print_text
from minimax_tools.errors import UsageError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.json_codec import encode
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.model.run import single_layer_run
from minimax_tools.model.spec import ModelSpec
from neuron.commands.device_run import build_request
from neuron.devices.runtime import open_runtime
from neuron.options import DeviceOptions, port_arguments
from neuron.runs.proving import PortProver


def prove_layer(options: DeviceOptions, layer: int, mistakes: tuple[str, ...]) -> NoReturn:
    """Undo mistakes in a layer, judge it again, print, and end with the exit code."""
    undone = tuple(map(Undo.parse, mistakes))
    _refuse_other_inputs(options)
    spec = ModelSpec.from_folder(resolve_config(options.model))
    run = single_layer_run(layer, sites_level="all", graph=spec.graph)
    run.span.within(spec.num_hidden_layers)  # raises if the model lacks the layer
    assert options.golden is not None, "a proof without a golden was refused"
    golden = Capture.open(options.golden)
    layers = range(layer, layer + 1)
    folder = resolve_model(options.model, layers=layers)
    request = build_request(options, spec, run, golden, folder=folder)
    name = f"{run.name}_undone"
    with (
        output_set_aside(),
        open_runtime(options.backend, compile_with=options.compile_with, ranks=options.ranks) as runtime,
        CheckpointReader(folder, layers=layers) as reader,
    ):
        prover = PortProver(
            request,
            runtime=runtime,
            reader=reader,
            weights=CheckpointWeights(model=options.model),
            criteria=options.criteria,
            directory=options.store.directory(DEVICE_SIDE, name),
        )
        proof = prover.prove(undone)
    following = after_proof(
        proof, layer=layer, model=options.model, golden=golden, arguments=port_arguments(options)
    )
    if options.as_json:
        record = {"layer": layer, "undone": [str(undo) for undo in undone], "proof": encode(proof)}
        print_json(record, next_commands=following)
    else:
        text = render_proof(proof, layer=layer, undone=" and ".join(map(str, undone)))
        print_text(text, next_commands=following)
    end_command(proof.outcome.exit_code)


def _refuse_other_inputs(options: DeviceOptions) -> None:
    if options.golden is None:
        raise UsageError(
            "--undo needs a golden: a proof is a judgement", next_step="Give --golden DIR; mm2-gpu makes one."
        )
    if options.num_decoded or options.skip_compile:
        raise UsageError(
            "--undo runs the layer anew, all tokens at once",
            next_step="Leave out --decode and --skip-compile.",
        )
    if options.report_path is not None:
        raise UsageError(
            "--report-path is a report of a comparison, and --undo ends in a proof",
            next_step="Leave it out; mm2-diagnose --prove --report-path FOLDER reports proofs too.",
        )
