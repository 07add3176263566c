"""`mm2-gpu certify` at work: a finished golden checked, and its certificate stored."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from gpu_reference.certification.certifier import check_golden
from gpu_reference.publication.publication import publish_certificate
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.manifest import Certificate, Outcome
from minimax_tools.capture.mirror import CaptureMirror
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import after_golden
from minimax_tools.capture.store import GOLDEN_SIDE, newest_capture
from minimax_tools.capture.writer import store_certificate
from minimax_tools.command_line.console import do_afterwards, end_command, print_json, print_text
from minimax_tools.json_codec import encode

_MARKS = {Outcome.PASSED: "[ok]", Outcome.FAILED: "[FAILED]", Outcome.NOT_CHECKED: "[not checked]"}


def certify(model: str | None, golden: Path | None, captures: Path, as_json: bool) -> None:
    """Check a golden, keep the certificate, print it, and end with its exit code."""
    directory = golden or newest_capture(captures, GOLDEN_SIDE)
    capture = Capture.open(directory)
    certificate = check_golden(capture, model)
    if CaptureMirror.find(directory, capture.manifest) is None:
        store_certificate(directory, certificate)
    else:
        # A check of hours is printed even if its result cannot be put there.
        do_afterwards(click.get_current_context(), lambda: publish_certificate(capture, certificate))
    place = address_of(directory)
    certified = Capture(directory, replace(capture.manifest, certificate=certificate))
    following = after_golden(certified, model=model)
    if as_json:
        record = {"directory": place, "certificate": encode(certificate)}
        print_json(record, next_commands=following)
    else:
        print_text(_render(place, certificate), next_commands=following)
    end_command(0 if certificate.has_passed else 1)


def _render(place: str, certificate: Certificate) -> str:
    verdict = "certified" if certificate.has_passed else "NOT CERTIFIED"
    lines = [f"{place}: {verdict}, {certificate}"]
    lines += [f"  {_MARKS[check.outcome]:14}{check.name}: {check.found}" for check in certificate.checks]
    return "\n".join(lines)
