"""Pairing: the refusal of captures, or tensors, that must not be compared, and the choice of layers to compare."""

from __future__ import annotations

import fnmatch

import torch

from minimax_tools.capture.run_commands import RUN_ON_THIS_GOLDEN, run_on_this_golden
from minimax_tools.capture.source import CaptureSource, DumpListing
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.model.inputs import Inputs

# Layers, and modules of a dump, that a message names.
_MAX_NAMED = 4
_MAX_MODULES = 12
# Begins a reason of `find_mismatch`.
_SHAPE = "shape: "


def refuse_other_runs(reference: CaptureSource, target: CaptureSource) -> tuple[str, ...]:
    """Refuse captures of different models, inputs, positions or dtypes.

    Returns:
        Notes on what could not be checked, since another tool's dump does not record it.

    Raises:
        IncomparableError: The captures must not be compared, or one was changed after it was certified.
    """
    golden, port = reference.known_description, target.known_description
    for side in (reference, target):
        # A certificate is void if the capture was changed after it.
        side.refuse_void_certificate()
    if golden is None or port is None:
        # Another tool's dump: opening it compared its token ids with the other side's, if it holds any.
        are_tokens_checked = reference.has_checked_tokens or target.has_checked_tokens
        unchecked = "model" if are_tokens_checked else "model and tokens"
        return (f"one side does not record its {unchecked}: that they agree was not checked",)
    differences = golden.provenance.model.differences(port.provenance.model)
    if differences:
        raise IncomparableError(
            "the captures are of different models",
            found="; ".join(differences),
            next_step="Run both sides from copies of one checkpoint (FP8 and BF16 copies agree).",
        )
    # The digests cover padding too, which may differ.
    is_same = golden.inputs_digest == port.inputs_digest
    difference = None if is_same else _find_difference(reference.read_inputs(), target.read_inputs())
    if difference is not None:
        raise IncomparableError(
            f"the captures have different inputs: {difference}",
            expected=f"{golden.input_source} (golden)",
            found=port.input_source,
            next_step=RUN_ON_THIS_GOLDEN,
            commands=run_on_this_golden(reference, target),
        )
    dtypes = [side.provenance.dtypes.get("weights") for side in (golden, port)]
    if dtypes[0] != dtypes[1]:
        raise IncomparableError(
            "the captures computed in different dtypes",
            expected=f"{dtypes[0]} (golden)",
            found=str(dtypes[1]),
            next_step="Run one side again with the other's --dtype.",
        )
    return ()


def select_layers(reference: CaptureSource, target: CaptureSource, pattern: str) -> tuple[int, ...]:
    """Return the target's declared layers whose name `layer_N` matches the pattern, ascending.

    Raises:
        UsageError: No layer matches.
        IncomparableError: The golden lacks one of them.
    """
    for side in (reference, target):
        # Only another tool's dump has a listing.
        if not side.layers and (listing := side.listing()) is not None:
            raise _nothing_found(side, listing)
    declared = declared_layers(target)
    selected = tuple(layer for layer in declared if fnmatch.fnmatchcase(f"layer_{layer}", pattern))
    if not selected:
        raise UsageError(
            f"no layer matches {pattern!r}",
            found=f"the run has {_names(declared)}",
            next_step="Name one layer, such as layer_7, or several, such as 'layer_1*'.",
        )
    missing = tuple(layer for layer in selected if layer not in reference.layers)
    if missing:
        raise IncomparableError(
            f"the golden {reference.directory} holds no {_names(missing)}",
            found=_names(reference.layers),
            next_step="Choose layers that both sides have (--layer, --layer-pattern), or capture more.",
        )
    return selected


def declared_layers(source: CaptureSource) -> tuple[int, ...]:
    """Return the layers that a run declares, ascending; a run that stopped early may lack some."""
    description = source.known_description
    return tuple(description.run.span) if description is not None else source.layers


def _find_difference(reference: Inputs, target: Inputs) -> str | None:
    """Return the first difference on real tokens, in words; None if only padding differs."""
    mask = reference.attention_mask
    if mask.shape != target.attention_mask.shape:
        shapes = [f"{inputs.batch_size}x{inputs.sequence_length}" for inputs in (reference, target)]
        return f"{shapes[0]} tokens with padding in the golden, {shapes[1]} in the run"
    if not torch.equal(mask, target.attention_mask):
        return "attention_mask differs" + _first_place(mask, target.attention_mask, torch.ones_like(mask))
    for name in ("input_ids", "position_ids"):
        golden, port = getattr(reference, name), getattr(target, name)
        if not torch.equal(golden * mask, port * mask):
            return f"{name} differ" + _first_place(golden, port, mask)
    return None


def _first_place(reference: torch.Tensor, target: torch.Tensor, mask: torch.Tensor) -> str:
    row, position = ((reference != target) & mask.bool()).nonzero()[0].tolist()
    golden, port = int(reference[row, position]), int(target[row, position])
    return f", first at row {row}, token {position}: {golden} in the golden, {port} in the run"


def _nothing_found(source: CaptureSource, listing: DumpListing) -> IncomparableError:
    shown = listing.unmapped
    named = ", ".join(shown[:_MAX_MODULES]) + (" …" if len(shown) > _MAX_MODULES else "")
    return IncomparableError(
        f"no site of a layer was found in {source.directory}",
        expected="modules under the usual names, such as layers.{layer}.self_attn.q_proj, or a map of others",
        found=named or "no module",
        next_step=f"mm2-test show {source.directory} --map-template > map.yaml gives a map to fill in, for --map.",
    )


def _names(layers: tuple[int, ...]) -> str:
    if not layers:
        return "no layer"
    shown = ", ".join(f"layer_{layer}" for layer in layers[:_MAX_NAMED])
    return f"{shown} … layer_{layers[-1]}" if len(layers) > _MAX_NAMED else shown


def find_mismatch(reference: torch.Tensor, target: torch.Tensor) -> str | None:
    """Return the reason why two tensors of a site cannot be compared; None if they can.

    A target may be [B·S,F] where the reference is [B,S,F], and the other way round.
    """
    is_folded = {reference.ndim, target.ndim} == {2, 3} and reference.shape[-1] == target.shape[-1]
    if reference.shape != target.shape and not (is_folded and reference.numel() == target.numel()):
        return _word_shapes(tuple(reference.shape), tuple(target.shape))
    if reference.is_floating_point() != target.is_floating_point():
        return f"dtype: expected {reference.dtype}, found {target.dtype}"
    return None


def is_of_shape(reason: str) -> bool:
    """Decide whether a reason of `find_mismatch` is the shape."""
    return reason.startswith(_SHAPE)


def _word_shapes(expected: tuple[int, ...], found: tuple[int, ...]) -> str:
    """Word two shapes that differ, and the two axes that are exchanged, if all others agree."""
    words = f"{_SHAPE}expected {expected}, found {found}"
    if len(expected) != len(found):
        return words
    differing = [
        axis for axis, (size, other) in enumerate(zip(expected, found, strict=True)) if size != other
    ]
    if len(differing) != 2:
        return words
    first, second = differing
    is_exchanged = (expected[first], expected[second]) == (found[second], found[first])
    return f"{words}: axes {first} and {second} are exchanged" if is_exchanged else words
