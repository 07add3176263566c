"""Untested: what a comparison has not looked at, and the command that does.

| left out | by |
|---|---|
| sites that the port does not show, or that were not captured or judged | the port's `sites` |
| layers, and what lies outside them | `mm2-test sweep`, `mm2-test full` |
| the default rows, if the golden has the short ones of --quick | `mm2-gpu extract-all` |
| experts that no token chose | the default rows |
| tokens before the last ones of each row | a golden without --last-tokens |
| rows longer than the longest; rows padded on the left; a second call of one shape | other rows |
| decoding, and chunks behind a cache | `mm2-test model` |
| several ranks, or any division of the weights among them | `--tp-degree` |
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from compare.sides.sides import Sides
from minimax_tools.capture.run_commands import RunCommands, golden_words
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import format_count
from minimax_tools.model.run import Mode
from minimax_tools.model.span import word_layers
from minimax_tools.results.results import Comparison, Untested

# Tokens of a long row: windows, chunks and pages of up to 4 096 keys have an edge in it.
_LONG_ROW = 4200
_KEPT_OF_LONG_ROW = 16
# Experts that a text names.
_MOST_NAMED = 8
_MORE_RANKS = "--tp-degree 2"


def find_untested(sides: Sides, comparison: Comparison) -> tuple[Untested, ...]:
    """Return what a comparison left out of what mm2 can compare; where neither side tells, it is left out too."""
    commands = RunCommands.of(sides.reference, sides.target)
    return tuple(
        found
        for of_kind in (
            _sites(comparison),
            _layers(sides, comparison, commands),
            _experts(sides, comparison, commands),
            _rows(sides.reference, commands),
            _calls(sides.target, commands),
            _passes(sides.target, comparison, commands),
            _ranks(sides.target, comparison, commands),
        )
        for found in of_kind
    )


def _sites(comparison: Comparison) -> Iterator[Untested]:
    num_left_out = comparison.of - comparison.compared
    if num_left_out:
        yield Untested(what="sites", detail=f"{num_left_out} of {format_count(comparison.of, 'site')}")


def _layers(sides: Sides, comparison: Comparison, commands: RunCommands | None) -> Iterator[Untested]:
    left_out = sorted(set(sides.reference.layers) - set(comparison.layers))
    port = None if commands is None else commands.port
    if left_out:
        # A whole port runs all layers at once: those that are left out have no sites.
        is_whole = commands is not None and commands.is_whole_port
        command = "" if commands is None or port is None or is_whole else commands.sweep()
        by = "" if is_whole else "mm2-test sweep"
        yield Untested(what="layers", detail=word_layers(left_out), by=by, command=command)
    elif port is not None and commands is not None and not port.run.model_sites:
        golden = commands.golden_run
        can_chain = golden is not None and bool(golden.model_sites)
        if port.run.mode is Mode.ISOLATED or can_chain:
            yield Untested(
                what="chain",
                detail="layers on each other's outputs, embedding, final norm and head",
                by="mm2-test full",
                command=commands.full() if can_chain else "",
            )


def _experts(sides: Sides, comparison: Comparison, commands: RunCommands | None) -> Iterator[Untested]:
    """Count the experts that no token chose; the weights of some were compared all the same."""
    golden = sides.reference
    unreached = {layer: golden.unreached_experts(layer) for layer in comparison.layers}
    missing = {layer: experts for layer, experts in unreached.items() if experts}
    if any(experts is None for experts in unreached.values()):
        detail = "experts that no token chose, which this golden does not count"
    elif missing:
        compared = {result.layer for result in comparison.weights if not result.not_compared}
        but = ", but for their weights" if compared.issuperset(missing) else ""
        total = sum(map(len, missing.values()))
        detail = f"{format_count(total, 'expert')} that no token chose ({_word_experts(missing)}){but}"
    else:
        return
    if commands is not None and commands.port is not None and golden.is_natural:
        command = "" if commands.is_whole_port else commands.sweep()
        yield Untested(what="experts", detail=detail, by="mm2-test sweep", command=command)
    elif golden.known_description is None or golden.known_description.expert_tokens is not None:
        # Another tool's golden, or the default rows: nothing reaches more.
        yield Untested(what="experts", detail=detail)
    else:
        yield Untested(what="experts", detail=detail, **_golden_of(commands))


def _word_experts(missing: dict[int, tuple[int, ...]]) -> str:
    if len(missing) == 1:
        ((layer, experts),) = missing.items()
        if len(experts) <= _MOST_NAMED:
            return f"layer {layer}: {', '.join(map(str, experts))}"
    worst = max(missing, key=lambda layer: len(missing[layer]))
    return f"at most {len(missing[worst])} in a layer, layer {worst}"


def _rows(golden: CaptureSource, commands: RunCommands | None) -> Iterator[Untested]:
    """Tell what rows of a golden of mm2's own leave out."""
    made = golden.known_description
    if made is None:
        return
    inputs = golden.read_inputs()
    if made.is_quick:
        yield Untested(
            what="default_rows", detail="the default rows (these are of --quick)", **_golden_of(commands)
        )
    if made.last_tokens:
        yield Untested(
            what="first_tokens",
            detail=f"all but the last {made.last_tokens} tokens of each row",
            **_golden_of(commands),
        )
    longest = max(inputs.lengths)
    options = ("--seq-len", str(_LONG_ROW), "--last-tokens", str(_KEPT_OF_LONG_ROW))
    yield Untested(
        what="long_rows",
        detail=f"rows longer than {format_count(longest, 'token')}",
        **(_golden_of(commands, *options) if longest < _LONG_ROW else {}),
    )
    if not made.is_quick and bool(inputs.attention_mask[:, 0].all()):
        yield Untested(what="left_padding", detail="rows padded on the left", **_golden_of(commands))


def _calls(target: CaptureSource, commands: RunCommands | None) -> Iterator[Untested]:
    """Tell that each layer was called once; a whole port is given its rows again."""
    made = target.known_description
    if made is not None and len(made.calls) < 2 and target.read_passes() is None:
        yield Untested(
            what="second_call",
            detail="a second call of the same shape at other positions",
            **_golden_of(commands),
        )


def _passes(
    target: CaptureSource, comparison: Comparison, commands: RunCommands | None
) -> Iterator[Untested]:
    """Tell which passes behind a cache did not run; chunks need a whole port."""
    made, chunks = target.known_description, comparison.chunks
    if made is None or not made.run.num_decoded:
        yield Untested(what="decode", detail="decoding", by="mm2-test model")
    if chunks is None or chunks.untested:
        command = commands.again() if commands is not None and commands.is_whole_port else ""
        by = "" if chunks is not None else "mm2-test model"
        yield Untested(what="chunks", detail="chunks behind a cache", by=by, command=command)


def _ranks(target: CaptureSource, comparison: Comparison, commands: RunCommands | None) -> Iterator[Untested]:
    """Tell that one rank ran, or that ranks of several each held every weight."""
    made = target.known_description
    if made is None:
        return
    if int(made.provenance.options.get("tp_degree", 1)) == 1:
        command = f"{commands.again()} {_MORE_RANKS}" if commands is not None else ""
        yield Untested(what="ranks", detail="several ranks", by=_MORE_RANKS, command=command)
    elif comparison.weights and not any(result.is_divided for result in comparison.weights):
        yield Untested(what="ranks", detail="ranks that divide the weights: each holds all of them")


def _golden_of(commands: RunCommands | None, *options: str) -> dict[str, str]:
    """Return the command that makes a golden of other rows: the default rows, if `options` name none."""
    command = "" if commands is None else shlex.join(golden_words(commands.model, *options))
    return {"by": " ".join(("mm2-gpu extract-all", *options)), "command": command}


def untested_by_prompts(*, longest: int, num_decoded: int, num_ranks: int) -> tuple[Untested, ...]:
    """Return what a ranking of prompts leaves out; `longest` is the longest row in tokens."""
    whole = "mm2-test model"
    return (
        Untested(what="sites", detail="the sites of the layers", by=whole),
        *(() if num_decoded else (Untested(what="decode", detail="decoding", by=whole),)),
        Untested(what="chunks", detail="chunks behind a cache", by=whole),
        Untested(what="long_rows", detail=f"rows longer than {format_count(longest, 'token')}"),
        *(() if num_ranks > 1 else (Untested(what="ranks", detail="several ranks", by=_MORE_RANKS),)),
    )
