"""Next commands: what to run after a comparison, a diagnosis or a proof, best first; () if nothing remains.

| result | next |
|---|---|
| fail | trace the weights, if one may be wrong; then name the mistake, or run a chain's first wrong layer alone |
| named | prove it |
| proved | the same run again, once the port is mended |
| not named, not proved | trace the weights; then the same run again, once the port is mended |
| warn | trace the weights, then as after pass |
| pass of some layers | a sweep of all layers |
| pass of all layers, each alone | all layers in a chain |
| incomparable | what shows more: a golden of every site, each layer alone with every site, a dump's map to fill in |
"""

from __future__ import annotations

from collections.abc import Iterable

from compare.diagnosis.finding import Diagnosis
from compare.diagnosis.proof import MistakeProof
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import RunCommands, judge_port, make_golden
from minimax_tools.model.run import Mode, single_layer_run
from minimax_tools.model.sites import Site, find_level
from minimax_tools.results.results import Comparison, Verdict

# Sites that no weight enters between their inputs and them. Where inputs were not shown, a blame names those too.
_WITHOUT_WEIGHTS = frozenset({Site.Q_ROPE, Site.K_ROPE, Site.ATTN_CONTEXT, Site.ROUTER_WEIGHTS})


def after_comparison(comparison: Comparison, commands: RunCommands | None) -> tuple[str, ...]:
    """Return what to run after the comparison of a run; `commands` is None if no checkpoint is known."""
    if commands is None:
        curve = comparison.curve
        return (curve.command,) if curve is not None and curve.command else ()
    if comparison.verdict is Verdict.FAIL:
        return _after_failure(comparison, commands)
    if comparison.verdict is Verdict.INCOMPARABLE:
        return (_settle(commands),)
    traces = _trace_weights(comparison.layers, commands) if comparison.verdict is Verdict.WARN else ()
    return (*traces, *_after_pass(comparison, commands))


def after_diagnosis(
    diagnosis: Diagnosis, commands: RunCommands | None, *, options: tuple[str, ...] = ()
) -> tuple[str, ...]:
    """Return what to run after a diagnosis; `options` chose the layers and the mistakes that were tried."""
    if commands is None or diagnosis.verdict is Verdict.PASS:
        return ()
    if diagnosis.verdict is Verdict.INCOMPARABLE:
        return (_settle(commands),)
    proofs = [finding.proof for finding in diagnosis.findings if finding.proof is not None]
    if diagnosis.findings and not proofs:
        return (commands.diagnose(*options, "--prove"),)
    layers = [layer.layer for layer in diagnosis.layers if not layer.is_right]
    is_open = not proofs or not any(proof.is_proved for proof in proofs)
    return _mend_and_repeat(layers, commands, is_open=is_open)


def after_proof(
    proof: MistakeProof, *, layer: int, model: str, golden: Capture, arguments: tuple[str, ...]
) -> tuple[str, ...]:
    """Return what to run after a mistake was undone in one layer; `arguments` name the port.

    Once the port is mended, that is all layers if the proof holds, else the layer.
    """
    run = golden.description.run
    if proof.is_proved:
        return (judge_port(golden.directory, run, model=model, arguments=arguments),)
    undone = ("--undo", proof.remaining[0]) if proof.remaining else ()
    layer_alone = single_layer_run(layer, sites_level="all", graph=golden.graph)
    return (judge_port(golden.directory, layer_alone, model=model, arguments=(*arguments, *undone)),)


def _after_failure(comparison: Comparison, commands: RunCommands) -> tuple[str, ...]:
    blamed = [
        blame.layer
        for blame in comparison.blame
        if blame.layer is not None and not _WITHOUT_WEIGHTS.issuperset(blame.sites)
    ]
    if blamed and all(blame.is_of_weights for blame in comparison.blame):
        # They were seen: there is nothing to search.
        return (*_trace_weights(blamed, commands), commands.again())
    curve = comparison.curve
    if curve is None:
        return (*_trace_weights(blamed, commands), commands.diagnose())
    if not curve.command:
        return (commands.diagnose(),)
    return (*_trace_weights([curve.onset], commands), curve.command)


def _settle(commands: RunCommands) -> str:
    """Return the command that shows more: a map of a dump, each layer alone with every site, or a whole golden."""
    port, golden = commands.port, commands.golden_run
    if port is None:
        return commands.map_template()
    if commands.is_whole_port:
        return commands.again()
    if golden is None or find_level(golden.sites) != "all":
        return make_golden(commands.model)
    is_isolated = port.run.mode is Mode.ISOLATED and port.run.sites == golden.sites
    return commands.show() if is_isolated else commands.isolated()


def _after_pass(comparison: Comparison, commands: RunCommands) -> tuple[str, ...]:
    """Return the run of all layers, each alone; or in a chain, if all of them are right alone."""
    port, golden = commands.port, commands.golden_run
    if port is None or golden is None or port.run.mode is Mode.CHAINED or not commands.runs_all_layers:
        return ()
    if port.run.component is not None or len(comparison.layers) < len(golden.span):
        return (commands.sweep(),)
    return (commands.full(),) if golden.model_sites else ()


def _mend_and_repeat(layers: Iterable[int], commands: RunCommands, *, is_open: bool) -> tuple[str, ...]:
    """Return the same run again; before it the trace of the weights, if the mistake is still open."""
    if commands.port is None:
        return ()
    return (*(_trace_weights(layers, commands) if is_open else ()), commands.again())


def _trace_weights(layers: Iterable[int | None], commands: RunCommands) -> tuple[str, ...]:
    """Return the trace of the first of some layers; () without a layer, or without a conversion to trace."""
    first = next((layer for layer in layers if layer is not None), None)
    return (commands.weights(first),) if first is not None and commands.can_trace_weights else ()
