"""`mm2-gpu certify`: the check of a finished golden; the result goes into its manifest."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.capture.store import GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.console import (
    Mm2Command,
    end_command,
    loading,
    print_json,
    print_text,
)
from minimax_tools.command_line.options import (
    CapturePath,
    captures_option,
    complete_captures,
    optional_model_option,
    output_options,
)

if TYPE_CHECKING:
    from minimax_tools.capture.manifest import Certificate


@click.command("certify", cls=Mm2Command, epilog="\b\nExample: mm2-gpu certify --model DIR --golden GOLDEN")
@optional_model_option
@click.option(
    "--golden",
    type=CapturePath(),
    help="Golden capture. Default: the newest under --captures.",
    shell_complete=complete_captures(GOLDEN_SIDE),
)
@captures_option
@output_options
def certify_command(model: str | None, golden: Path | None, captures: Path, as_json: bool) -> None:
    """Check a finished golden before it is trusted; the result becomes a part of it.

    Checks of the golden alone: digests, NaN and Inf, recorded versions and dtypes, and the width of the norms of q
    and k. Checks with --model: transformers' float32 layers against mm2's own, the choice of experts against the
    checkpoint's float32 bias, and the rotary width against config.json.

    One layer is in memory at a time, with one expert. Checks that could not run are named. Exits with 1 if a check
    failed. Of a golden at a remote address the result is printed, and then put there: you need the right to write.
    """
    with loading():
        from gpu_reference.certification.certifier import check_golden
        from gpu_reference.publication.publication import publish_certificate
        from minimax_tools.capture.mirror import CaptureMirror, address_of
        from minimax_tools.capture.reader import Capture
        from minimax_tools.capture.run_commands import after_golden
        from minimax_tools.capture.writer import store_certificate
        from minimax_tools.json_codec import encode

    directory = golden or newest_capture(captures, GOLDEN_SIDE)
    capture = Capture.open(directory)
    certificate = check_golden(capture, model)
    is_remote = CaptureMirror.find(directory, capture.manifest) is not None
    if not is_remote:
        store_certificate(directory, certificate)
    place = address_of(directory)
    certified = Capture(directory, replace(capture.manifest, certificate=certificate))
    following = after_golden(certified, model=model)
    if as_json:
        record = {"directory": place, "certificate": encode(certificate)}
        print_json(record, next_commands=following)
    else:
        print_text(_render(place, certificate), next_commands=following)
    if is_remote:
        # A check of hours is printed even if its result cannot be put there.
        publish_certificate(capture, certificate)
    end_command(0 if certificate.has_passed else 1)


def _render(place: str, certificate: Certificate) -> str:
    from minimax_tools.capture.manifest import Outcome

    marks = {Outcome.PASSED: "[ok]", Outcome.FAILED: "[FAILED]", Outcome.NOT_CHECKED: "[not checked]"}
    verdict = "certified" if certificate.has_passed else "NOT CERTIFIED"
    lines = [f"{place}: {verdict}, {certificate}"]
    lines += [f"  {marks[check.outcome]:14}{check.name}: {check.found}" for check in certificate.checks]
    return "\n".join(lines)
