"""CapturedInput: a layer's input: the golden's own values, another layer's output, or not captured."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.noise.input_error import InputError, measure_input_error
from compare.sides.sides import Sides
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site

# Relative to the golden's: other tokens have inputs about as far away as these are long.
_FARTHEST_INPUT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedInput:
    """Input of one layer.

    Args:
        known: Sites whose values were given to the layer and are the golden's own, or another layer's.
        error: Error of an input that is another layer's output; None where it is the golden's own.
        is_recorded: Whether both sides hold the input; else nothing was checked.
    """

    known: tuple[Site, ...]
    error: InputError | None = None
    is_recorded: bool = True

    @property
    def is_inherited(self) -> bool:
        """True where the input carries errors of other layers."""
        return self.error is not None


def read_captured_input(sides: Sides, layer: int) -> CapturedInput:
    """Read the input of the target's layer.

    Raises:
        IncomparableError: It is neither the golden's nor another layer's output, or mm2's own capture does not hold
            it.
    """
    known: list[Site] = []
    input_error: InputError | None = None
    for site in fed_sites(sides.target):
        rows = sides.read_rows(layer, site)
        if rows is None and site is Site.INPUT:
            _refuse_unrecorded(sides, layer)
            return CapturedInput(known=(), is_recorded=False)
        if rows is not None and not _is_same(*rows):
            input_error = measure_input_error(*rows)
            if site is not Site.INPUT or not _is_inherited(sides.target, layer, input_error):
                raise _fed_otherwise(sides, layer, site)
        known.append(site)
    return CapturedInput(known=tuple(known), error=input_error)


def fed_sites(target: CaptureSource) -> tuple[Site, ...]:
    """Return the sites whose values the run was given."""
    description = target.known_description
    return description.run.fed_sites if description is not None else (Site.INPUT,)


def _is_same(reference: torch.Tensor, target: torch.Tensor) -> bool:
    """Decide whether values are bit-equal after casting to the port's dtype. NaN equals NaN."""
    cast = reference.to(target.dtype)
    return bool(((cast == target) | (cast.isnan() & target.isnan())).all())


def _is_inherited(target: CaptureSource, layer: int, input_error: InputError) -> bool:
    """Decide whether the layer's input is what the layer before it, or the embedding, put out."""
    description = target.known_description
    if description is None:
        return _repeats_the_layer_before(target, layer) or _comes_from_unseen_layers(
            target, layer, input_error
        )
    run = description.run
    return run.mode is Mode.CHAINED and (layer > run.span.start or ModelSite.EMBEDDING in run.model_sites)


def _comes_from_unseen_layers(target: CaptureSource, layer: int, input_error: InputError) -> bool:
    """Decide whether a dump lacks the layer before, and the input is near the golden's."""
    is_unseen = target.may_omit_inputs and layer > 0 and Site.OUTPUT not in target.sites(layer - 1)
    return is_unseen and input_error.overall < _FARTHEST_INPUT


def _repeats_the_layer_before(target: CaptureSource, layer: int) -> bool:
    """Decide by values whether the input is the output of the layer before, where a layout tells no mode."""
    if Site.OUTPUT in target.sites(layer - 1):
        before = target.read(layer - 1, Site.OUTPUT)
    elif layer == 0 and ModelSite.EMBEDDING in target.model_sites():
        before = target.read_model(ModelSite.EMBEDDING)
    else:
        return False
    return torch.equal(target.read(layer, Site.INPUT), before)


def _refuse_unrecorded(sides: Sides, layer: int) -> None:
    """Refuse mm2's own captures without a layer's input; other layouts may lack it."""
    sources = (sides.reference, sides.target)
    if any(source.known_description is None for source in sources):
        return
    lacking = next((source for source in sources if Site.INPUT not in source.sites(layer)), sides.target)
    raise IncomparableError(
        f"{lacking.directory} does not hold the input of layer {layer}",
        expected="hidden states in the golden's shape",
        next_step="Run the capture again.",
    )


def _fed_otherwise(sides: Sides, layer: int, site: Site) -> IncomparableError:
    what = "hidden states" if site is Site.INPUT else str(site)
    description = sides.target.known_description
    return IncomparableError(
        f"the captures have different inputs: layer {layer} got other {what}",
        expected="the golden's own, bit for bit",
        found=description.input_source if description else f"what {sides.target.directory} holds",
        next_step="Run the port on this golden: mm2-test … --golden DIR.",
    )
