"""CapturedInput: where a layer's input comes from: the golden, another layer's output, or unknown.

It decides by which limits the layer is judged. With the golden's input (isolated), its error is its own. With another
layer's output (chained), it inherits an error, unless the golden can be computed on the port's own input (see
`on_port_input`). Of a layer whose input is unknown, sites that differ stay undecided.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from compare.noise.rows import InputError, measure_input_error
from compare.sides.sides import Sides
from minimax_tools.capture.run_commands import RUN_ON_THIS_GOLDEN, run_on_this_golden
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import Mode
from minimax_tools.model.sites import ModelSite, Site

# Relative error of an input that may still be of the golden's tokens; inputs of other tokens are off by about 1.
_FARTHEST_INPUT = 0.5


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedInput:
    """Input of one layer."""

    known: tuple[Site, ...]  # sites whose values the layer was given, by the golden or by another layer
    error: InputError | None = None  # of an input that is another layer's output; None for the golden's own
    is_recorded: bool = True  # whether both sides hold the input, in one shape; if not, nothing was checked

    @property
    def is_inherited(self) -> bool:
        """True if the input carries errors of other layers."""
        return self.error is not None


def read_captured_input(sides: Sides, layer: int) -> CapturedInput:
    """Read the input of the target's layer.

    Raises:
        IncomparableError: The input is neither the golden's nor another layer's output, or one of two
            captures of mm2 lacks it.
    """
    known: list[Site] = []
    input_error: InputError | None = None
    for site in fed_sites(sides.target):
        # The real tokens [T,F] of the golden and of the target; None if a side lacks the site, or the shapes differ.
        pair = sides.read_rows(layer, site)
        if pair is None and site is Site.INPUT:
            _refuse_unrecorded(sides, layer)
            return CapturedInput(known=(), is_recorded=False)
        if pair is not None and not _is_same(*pair):
            input_error = measure_input_error(*pair)
            # Only a whole layer's input may come from another layer; what a component is given is the golden's.
            if site is not Site.INPUT or not _is_inherited(sides.target, layer, input_error):
                raise _fed_otherwise(sides, layer, site)
        # What a component was given need not be captured: the run's description says that it is the golden's.
        known.append(site)
    return CapturedInput(known=tuple(known), error=input_error)


def fed_sites(target: CaptureSource) -> tuple[Site, ...]:
    """Return the sites whose values the run was given: a layer's input or, for a component, those that feed it."""
    description = target.known_description
    return description.run.fed_sites if description is not None else (Site.INPUT,)


def _is_same(reference: torch.Tensor, target: torch.Tensor) -> bool:
    """Decide whether values are bit-equal after casting to the port's dtype. NaN equals NaN."""
    cast = reference.to(target.dtype)
    # Nearly always equal as they are: the search for NaN takes several copies.
    return torch.equal(cast, target) or bool(((cast == target) | (cast.isnan() & target.isnan())).all())


def _is_inherited(target: CaptureSource, layer: int, input_error: InputError) -> bool:
    """Decide whether the layer's input is what the layer before it, or the embedding, put out."""
    description = target.known_description
    if description is None:
        # Another tool's dump does not say whether its layers ran in a chain: its values show it.
        return _repeats_the_layer_before(target, layer) or _may_come_from_unseen_layers(
            target, layer, input_error
        )
    run = description.run
    # A chain's first layer gets the golden's input, unless the port computed the embedding too.
    return run.mode is Mode.CHAINED and (layer > run.span.start or ModelSite.EMBEDDING in run.model_sites)


def _repeats_the_layer_before(target: CaptureSource, layer: int) -> bool:
    """Decide whether the input has the values of the output before it."""
    if Site.OUTPUT in target.sites(layer - 1):
        before = target.read(layer - 1, Site.OUTPUT)
    elif layer == 0 and ModelSite.EMBEDDING in target.model_sites():
        before = target.read(None, ModelSite.EMBEDDING)
    else:
        return False
    values = target.read(layer, Site.INPUT)
    # A layer may have put out NaN: the next layer's input repeats that too.
    return values.shape == before.shape and _is_same(before, values)


def _may_come_from_unseen_layers(target: CaptureSource, layer: int, input_error: InputError) -> bool:
    """Decide whether the dump lacks the output before the layer, and the input is near the golden's."""
    # `may_omit_inputs` is true for dumps of other tools, which may have been told to capture some modules only.
    is_unseen = target.may_omit_inputs and layer > 0 and Site.OUTPUT not in target.sites(layer - 1)
    return is_unseen and input_error.overall < _FARTHEST_INPUT


def _refuse_unrecorded(sides: Sides, layer: int) -> None:
    """Refuse if both captures are mm2's own. A dump of another tool may lack a layer's input."""
    sources = (sides.reference, sides.target)
    if any(source.known_description is None or source.may_omit_inputs for source in sources):
        return
    lacking = next((source for source in sources if Site.INPUT not in source.sites(layer)), sides.target)
    raise IncomparableError(
        f"{lacking.directory} does not hold the input of layer {layer}",
        expected="hidden states in the golden's shape",
        next_step="Run the capture again.",
    )


def _fed_otherwise(sides: Sides, layer: int, site: Site) -> IncomparableError:
    values = "hidden states" if site is Site.INPUT else str(site)
    description = sides.target.known_description
    return IncomparableError(
        f"the captures have different inputs: layer {layer} got other {values}",
        expected="the golden's own, bit for bit",
        found=description.input_source if description else f"what {sides.target.directory} holds",
        next_step=RUN_ON_THIS_GOLDEN,
        commands=run_on_this_golden(sides.reference, sides.target),
    )
