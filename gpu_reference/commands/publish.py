"""`mm2-gpu publish`: a certified golden put where every porter can read it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from minimax_tools.capture.store import GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import CapturePath, captures_option, output_options
from minimax_tools.machine.size import format_size
from minimax_tools.remote.address import RemoteAddress

if TYPE_CHECKING:
    from gpu_reference.publication.publication import Publication


@click.command(
    "publish",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu publish --golden GOLDEN --to hf://datasets/owner/minimax-m2-golden",
)
@click.option(
    "--golden",
    type=CapturePath(),
    help="Golden capture, certified. Default: the newest under --captures.",
)
@click.option(
    "--to",
    "address_text",
    required=True,
    metavar="s3://bucket/folder|hf://datasets/owner/name@revision",
    help="Address to put it at. A dataset is made if there is none, and is public then.",
)
@click.option(
    "--allow-uncertified", is_flag=True, help="Take a golden without a certificate, or with a partial one."
)
@click.option("--replace", "replaces", is_flag=True, help="Replace another capture at the address.")
@captures_option
@output_options
def publish_command(
    golden: Path | None,
    address_text: str,
    allow_uncertified: bool,
    replaces: bool,
    captures: Path,
    as_json: bool,
) -> None:
    """Put a certified golden at a remote address, with a card that says what made it.

    All tensors are checked first. The manifest comes last, so nobody reads a half. An interrupted command goes on where
    it stopped. Commands read the golden by its address: --golden s3://bucket/folder.
    """
    with loading():
        from gpu_reference.publication.publication import publish_golden
        from minimax_tools.capture.mirror import address_of
        from minimax_tools.capture.reader import Capture
        from minimax_tools.capture.run_commands import judge_port

    address = RemoteAddress.parse(address_text)
    directory = golden or newest_capture(captures, GOLDEN_SIDE)
    publication = publish_golden(directory, address, allows_uncertified=allow_uncertified, replaces=replaces)
    made = Capture.open(directory).description
    following = (judge_port(str(address), made.run, model=made.provenance.model_source),)
    if as_json:
        print_json(_record(publication, address_of(directory)), next_commands=following)
    else:
        print_text(_render(publication, address_of(directory)), next_commands=following)


def _record(publication: Publication, place: str) -> dict[str, object]:
    return {
        "directory": place,
        "address": str(publication.address),
        "files": list(publication.files),
        "size_bytes": publication.size_bytes,
        "num_put": publication.num_put,
        "certified": publication.is_certified,
    }


def _render(publication: Publication, place: str) -> str:
    number = len(publication.files)
    return "\n".join(
        [
            f"Published {place} at {publication.address}",
            f"  files        {number}, {format_size(publication.size_bytes)}; put now: {publication.num_put}",
            f"  certificate  {'passed' if publication.is_certified else 'none'}",
        ]
    )
