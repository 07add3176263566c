"""GoldenPair: a BF16 golden and a float32 golden of the same tokens, by which another tool judges a port.

Such a tool divides the port's distance from float32 by BF16's distance from float32. A port is a chained run, so both
goldens must be chained runs too. The float32 twins within a golden will not do: each is computed from the golden's
input of its layer, so a chained port is farther from them than the golden in every layer but the first.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from gpu_reference.certification.trust import refuse_no_golden, refuse_uncertified
from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError, UsageError, list_names
from minimax_tools.model.inputs import Inputs

_MAX_NAMED = 4
_AGAIN = "Make both with the same options but --dtype: mm2-gpu extract-all --model DIR …, once with --dtype float32."


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenPair:
    """Two goldens that belong together; made by `open_golden_pair`."""

    golden: Capture  # in BF16
    float32_golden: Capture  # of the same model, tokens, layers and sites
    inputs: Inputs  # tokens of both


def open_golden_pair(golden: Path, float32_golden: Path, *, allows_uncertified: bool = False) -> GoldenPair:
    """Open two goldens, and prove from their manifests that they belong together.

    Args:
        golden: Directory of the BF16 golden.
        float32_golden: Directory of the float32 golden.
        allows_uncertified: Whether goldens without a certificate are taken.

    Raises:
        CaptureError: A directory holds no complete golden, or one that is damaged.
        IncomparableError: A golden is not certified, failed a check, or was changed after it was certified; or the two
            are of different models, tokens, layers or sites.
        UsageError: A golden was computed in the wrong dtype.
    """
    pair = Capture.open(golden).of_whole_ports(), Capture.open(float32_golden).of_whole_ports()
    for capture, dtype in zip(pair, (torch.bfloat16, torch.float32), strict=True):
        refuse_no_golden(capture)
        _refuse_dtype(capture, dtype_name(dtype))
        refuse_uncertified(capture, allows_uncertified=allows_uncertified)
    _refuse_strangers(*pair)
    return GoldenPair(golden=pair[0], float32_golden=pair[1], inputs=pair[0].read_inputs())


def _refuse_dtype(capture: Capture, expected: str) -> None:
    found = capture.description.provenance.dtypes.get("weights")
    if found != expected:
        option = "--float32-golden" if expected == "float32" else "--golden"
        raise UsageError(
            f"{option} {capture.directory} was not computed in {expected}",
            expected=expected,
            found=str(found),
            next_step=_AGAIN,
        )


def _refuse_strangers(golden: Capture, float32_golden: Capture) -> None:
    """Raise unless the two are of one model, the same tokens, and the same sites."""
    one, other = golden.description, float32_golden.description
    faults = one.provenance.model.differences(other.provenance.model)
    if one.inputs_digest != other.inputs_digest:
        faults.append(f"tokens: {one.input_source} against {other.input_source}")
    held, others_held = (
        {(e.layer, e.site) for e in side.manifest.entries} for side in (golden, float32_golden)
    )
    unpaired = sorted(held ^ others_held, key=str)
    if unpaired:
        names = [site if layer is None else f"{site} of layer {layer}" for layer, site in unpaired]
        faults.append(f"one side alone holds {list_names(names, most=_MAX_NAMED)}")
    if faults:
        raise IncomparableError(
            f"{golden.directory} and {float32_golden.directory} do not belong together",
            found="; ".join(faults),
            next_step=_AGAIN,
        )
