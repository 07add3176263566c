"""Refusals of goldens that nobody should rely on: incomplete, changed, or not certified."""

from __future__ import annotations

from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import certify_golden
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.errors import CaptureError, IncomparableError

_ALLOW = "Or give --allow-uncertified."
# Check that is made only if the golden was certified with its model.
_WITH_MODEL = "same_model"


def refuse_no_golden(capture: Capture) -> None:
    """Raise unless a capture is a complete golden.

    Raises:
        CaptureError: It is incomplete.
        IncomparableError: It is a device run.
    """
    refuse_run(capture, next_step="Name a golden: only the trusted side can judge.")
    if not capture.is_complete:
        raise CaptureError(
            f"the golden {address_of(capture.directory)} is incomplete",
            found=f"{len(capture.layers)} of {len(capture.description.run.span)} layers",
            next_step="Run its command again: it continues behind the last layer.",
        )


def refuse_run(capture: Capture, *, next_step: str) -> None:
    """Raise if a capture is a port's run, and no golden.

    Raises:
        IncomparableError: It is.
    """
    if capture.description.side != GOLDEN_SIDE:
        raise IncomparableError(
            f"{address_of(capture.directory)} is no golden",
            expected="a capture of mm2-gpu",
            found=f"a run of {capture.description.provenance.target} on a device",
            next_step=next_step,
        )


def refuse_uncertified(capture: Capture, *, allows_uncertified: bool) -> None:
    """Raise unless a golden passed its certification, with its model; with `allows_uncertified` unless it failed.

    Raises:
        IncomparableError: It is not certified, failed a check, or was changed after it was certified.
    """
    capture.refuse_void_certificate()
    place = address_of(capture.directory)
    certificate = capture.certificate
    again = certify_golden(capture.directory, capture.description.provenance.model_source)
    if certificate is None and not allows_uncertified:
        raise IncomparableError(
            f"the golden {place} is not certified", next_step=f"Certify it: {again}. {_ALLOW}"
        )
    if certificate is not None and certificate.failed:
        check = certificate.failed[0]
        raise IncomparableError(
            f"the golden {place} failed certification, and proves nothing",
            found=f"{check.name}: {check.found}",
            next_step="Make it again with other versions or options.",
        )
    # Other checks may not apply: a float32 golden has no noise of BF16.
    unchecked = () if certificate is None else certificate.not_checked
    if not allows_uncertified and _WITH_MODEL in [check.name for check in unchecked]:
        raise IncomparableError(
            f"the golden {place} was certified without its model",
            next_step=f"Certify it again: {again}. {_ALLOW}",
        )
