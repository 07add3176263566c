"""Pairing: whether two captures may be judged against each other, and which layer-site pairs that gives."""

from __future__ import annotations

import fnmatch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.run import Mode
from minimax_tools.sites import Site

_AGAIN = "Run the port on this golden: mm2-test … --golden DIR."


def refuse_foreign(reference: CaptureSource, target: CaptureSource) -> tuple[str, ...]:
    """Refuse captures of different models, inputs, positions or dtypes.

    Returns:
        Notes on what could not be checked, because a layout does not record it.

    Raises:
        IncomparableError: The captures must not be compared.
    """
    mine, theirs = reference.known_description, target.known_description
    if mine is None or theirs is None:
        return ("one side does not record its model, inputs and positions: that they agree was not checked",)
    _refuse_other_model(mine, theirs)
    if mine.inputs_digest != theirs.inputs_digest:
        raise IncomparableError(
            "the captures have different inputs: ids, mask or positions differ",
            expected=f"{mine.input_source} (golden)",
            found=theirs.input_source,
            next_step=_AGAIN,
        )
    dtypes = mine.provenance.dtypes.get("weights"), theirs.provenance.dtypes.get("weights")
    if dtypes[0] != dtypes[1]:
        raise IncomparableError(
            "the captures computed in different dtypes",
            expected=f"{dtypes[0]} (golden)",
            found=str(dtypes[1]),
            next_step="Run one side again with the other's --dtype.",
        )
    return _unfinished(reference, target)


def refuse_other_input(reference: CaptureSource, target: CaptureSource, layer: int) -> None:
    """Refuse a layer that was fed something else than the golden's own input.

    Raises:
        IncomparableError: The input recorded by the target is not the golden's, bit for bit.
    """
    if not isinstance(reference, Capture) or not isinstance(target, Capture):
        return
    mine, theirs = reference.entry(layer, Site.INPUT), target.entry(layer, Site.INPUT)
    if mine is not None and theirs is not None and mine.sha256 != theirs.sha256:
        raise IncomparableError(
            f"the captures have different inputs: layer {layer} was fed other hidden states",
            expected="the golden's",
            found=target.description.input_source,
            next_step=_AGAIN,
        )


def select_layers(reference: CaptureSource, target: CaptureSource, pattern: str) -> tuple[int, ...]:
    """The target's layers whose name `layer_N` matches, in natural order.

    Raises:
        UsageError: No layer matches.
        IncomparableError: The golden lacks one of them.
    """
    selected = tuple(layer for layer in target.layers if fnmatch.fnmatchcase(f"layer_{layer}", pattern))
    if not selected:
        raise UsageError(
            f"no layer matches {pattern!r}", found=f"the device run holds {_names(target.layers)}"
        )
    missing = [layer for layer in selected if layer not in reference.layers]
    if missing:
        raise IncomparableError(
            f"the golden {reference.directory} holds no {_names(tuple(missing))}",
            found=_names(reference.layers),
            next_step="Choose layers that both sides have (--layer, --layer-pattern), or capture more.",
        )
    return selected


def is_chained(target: CaptureSource) -> bool:
    """Whether the target's layers were fed each other's outputs."""
    description = target.known_description
    return description is not None and description.run.mode is Mode.CHAINED


def _refuse_other_model(reference: Description, target: Description) -> None:
    differences = reference.provenance.model.differences(target.provenance.model)
    if differences:
        raise IncomparableError(
            "the captures are of different models",
            found="; ".join(differences),
            next_step="Run both sides from copies of one checkpoint (FP8 and BF16 copies agree).",
        )


def _unfinished(reference: CaptureSource, target: CaptureSource) -> tuple[str, ...]:
    notes = []
    for side, source in (("golden", reference), ("device run", target)):
        if isinstance(source, Capture) and not source.manifest.is_complete:
            notes.append(f"the {side} is not complete: run it again and it resumes")
    return tuple(notes)


def _names(layers: tuple[int, ...]) -> str:
    shown = ", ".join(f"layer_{layer}" for layer in layers[:4])
    return shown + (f" … layer_{layers[-1]}" if len(layers) > 4 else "") if layers else "no layer"
