"""`mm2-gpu publish` at work: a certified golden put at a remote address."""

from __future__ import annotations

from pathlib import Path

from gpu_reference.publication.publication import Publication, publish_golden
from minimax_tools.capture.address_records import address_of
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.run_commands import judge_port
from minimax_tools.capture.store import GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.machine.size import format_size
from minimax_tools.remote.address import RemoteAddress


def publish(
    golden: Path | None,
    address_text: str,
    allow_uncertified: bool,
    replaces: bool,
    captures: Path,
    as_json: bool,
) -> None:
    """Publish a golden, and print what was put."""
    address = RemoteAddress.parse(address_text)
    directory = golden or newest_capture(captures, GOLDEN_SIDE)
    publication = publish_golden(directory, address, allows_uncertified=allow_uncertified, replaces=replaces)
    made = Capture.open(directory).description
    following = (judge_port(str(address), made.run, model=made.provenance.model_source),)
    if as_json:
        print_json(_record(publication, directory), next_commands=following)
    else:
        print_text(_render(publication, directory), next_commands=following)


def _record(publication: Publication, directory: Path) -> dict[str, object]:
    return {
        "directory": address_of(directory),
        "address": str(publication.address),
        "files": list(publication.files),
        "size_bytes": publication.size_bytes,
        "num_put": publication.num_put,
        "certified": publication.is_certified,
    }


def _render(publication: Publication, directory: Path) -> str:
    number = len(publication.files)
    return "\n".join(
        [
            f"Published {address_of(directory)} at {publication.address}",
            f"  files        {number}, {format_size(publication.size_bytes)}; put now: {publication.num_put}",
            f"  certificate  {'passed' if publication.is_certified else 'none'}",
        ]
    )
