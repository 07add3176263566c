"""Publication: a golden put at a remote address with a card, after it was checked; its manifest comes last."""

from __future__ import annotations

import shlex
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from gpu_reference.certification.trust import refuse_no_golden, refuse_uncertified
from minimax_tools.capture.manifest import Certificate
from minimax_tools.capture.mirror import address_of, mirror_capture, open_remote, share_files
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import inspect_capture
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError, RemoteError, list_faults
from minimax_tools.hub.access import NoRepositoryError
from minimax_tools.machine.size import format_size
from minimax_tools.model.inputs import Inputs
from minimax_tools.remote.address import RemoteAddress, RemoteFolder

CARD_NAME = "README.md"


def write_card(golden: Capture, *, address: str, size_bytes: int) -> str:
    """Return the card: what made the golden, what it holds, how far it was checked, and the commands that use it."""
    description = golden.description
    made, run = description.provenance, description.run
    header = yaml.safe_dump(
        {"pretty_name": f"mm2 golden of {made.model_source}", "tags": ["mm2", "minimax-m2", "golden"]},
        sort_keys=False,
        allow_unicode=True,
    )
    rows = [
        ("model", made.model_source),
        ("config", f"sha256 {made.model.spec_digest}"),
        ("run", f"{run.name}, {run}"),
        ("sites", ", ".join(map(str, (*run.sites, *run.model_sites)))),
        ("tokens", _word_tokens(golden.read_inputs(), description.inputs_digest)),
        ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in made.dtypes.items())),
        ("noise floor", _word_floor(description.noise_floor, description.floor_variants)),
        ("device", f"{made.backend}: {made.device}"),
        ("options", ", ".join(f"{name} {value}" for name, value in made.options.items() if name != "proved")),
        ("versions", ", ".join(f"{name} {version}" for name, version in made.versions.items())),
        ("environment", ", ".join(f"{name}={value}" for name, value in made.environment.items()) or "none"),
        ("size", format_size(size_bytes)),
    ]
    target = "my_port.py:DecoderLayer"
    sweep = shlex.join(
        ("mm2-test", "sweep", "--model", made.model_source, "--golden", address, "--target", target)
    )
    return "\n".join(
        [
            f"---\n{header}---",
            f"# Golden of {made.model_source}",
            "",
            "Activations of every layer, computed by transformers' own model, with the noise of BF16 measured beside",
            "them. mm2 finds with it where a port of the model goes wrong.",
            "",
            "```bash",
            f"mm2-gpu show {shlex.quote(address)}",
            sweep,
            "```",
            "",
            "## Made by",
            "",
            "| | |",
            "|---|---|",
            *(f"| {name} | {_escape(value)} |" for name, value in rows),
            "",
            "## Certificate",
            "",
            *_word_certificate(golden),
            "",
        ]
    )


def _word_certificate(golden: Capture) -> list[str]:
    certificate = golden.certificate
    if certificate is None:
        return ["None: this golden was published without a check. Do not rely on it."]
    return [
        f"{certificate}.",
        "",
        "| check | result | found |",
        "|---|---|---|",
        *(f"| {check.name} | {check.outcome} | {_escape(check.found)} |" for check in certificate.checks),
    ]


def _word_tokens(inputs: Inputs, digest: str) -> str:
    lengths = ", ".join(map(str, inputs.attention_mask.sum(dim=1).tolist()))
    return f"{inputs.source}: {inputs.batch_size} rows of {lengths} tokens, sha256 {digest}"


def _word_floor(floor: str, variants: tuple[str, ...]) -> str:
    return f"{floor}, {len(variants)} variants ({', '.join(variants)})" if variants else floor


def _escape(text: str) -> str:
    """Return a text that stays in its cell of a table."""
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")


@dataclass(frozen=True, slots=True, kw_only=True)
class Publication:
    """A golden at a remote address."""

    address: RemoteAddress
    files: tuple[str, ...]  # names of its files, the card too
    size_bytes: int
    num_put: int  # number of files that were not there already
    is_certified: bool


def publish_golden(
    directory: Path, address: RemoteAddress, *, allows_uncertified: bool, replaces: bool
) -> Publication:
    """Check a golden and put it at an address, with a card.

    What an interrupted call has put is not put again. Nobody reads a half: the manifest comes last, or on a hub all
    files come in one commit.

    Args:
        directory: Folder of the golden.
        address: Address of a folder in a bucket or a dataset.
        allows_uncertified: Whether a golden without a certificate, or certified without its model, is put.
        replaces: Whether another capture at the address may be replaced.

    Raises:
        CaptureError: It is incomplete or damaged.
        RemoteError: Another capture is at the address, or it cannot be put there.
    """
    golden = Capture.open(directory)
    refuse_no_golden(golden)
    refuse_uncertified(golden, allows_uncertified=allows_uncertified)
    folder = open_remote(address)
    folder.check_place()
    if not replaces:
        _refuse_other(folder, address, directory / MANIFEST_NAME)
    # All tensors are read: what can be told before is told before.
    _refuse_damage(golden)
    files = {name: golden.directory / name for name in golden.manifest.file_names()}
    size_bytes = sum(path.stat().st_size for path in files.values())
    with tempfile.TemporaryDirectory() as temporary:
        card = Path(temporary) / CARD_NAME
        card.write_text(write_card(golden, address=str(address), size_bytes=size_bytes), encoding="utf-8")
        files[CARD_NAME] = card
        put = folder.put(files, last=MANIFEST_NAME)
    return Publication(
        address=address,
        files=tuple(sorted(files)),
        size_bytes=size_bytes,
        num_put=len(put),
        is_certified=golden.certificate is not None,
    )


def publish_certificate(golden: Capture, certificate: Certificate) -> None:
    """Put a certificate into the manifest at a golden's address, and then a card that tells it.

    Args:
        golden: The golden as it was checked, by its mirror.
        certificate: The result of its check.

    Raises:
        RemoteError: Another golden is at the address now, or it cannot be written to.
    """
    address = RemoteAddress.parse(address_of(golden.directory))
    folder = open_remote(address)
    if not _is_there(folder, golden.directory / MANIFEST_NAME):
        raise RemoteError(
            f"{address} was replaced while it was checked: the certificate is not put there",
            next_step="Run the check again.",
        )
    certified = Capture(golden.directory, replace(golden.manifest, certificate=certificate))
    with tempfile.TemporaryDirectory() as temporary:
        files = {name: Path(temporary) / name for name in (CARD_NAME, MANIFEST_NAME)}
        size_bytes = sum((golden.directory / name).stat().st_size for name in golden.manifest.file_names())
        files[CARD_NAME].write_text(
            write_card(certified, address=str(address), size_bytes=size_bytes), encoding="utf-8"
        )
        files[MANIFEST_NAME].write_text(certified.manifest.as_text(), encoding="utf-8")
        # One by one: the manifest is replaced in one step then, and the golden can be read all the time.
        for name in (MANIFEST_NAME, CARD_NAME):
            folder.put({name: files[name]}, last=name)
    share_files(golden.directory, mirror_capture(address))


def _refuse_damage(golden: Capture) -> None:
    faults = inspect_capture(golden).faults
    if faults:
        raise CaptureError(
            f"the golden {golden.directory} is damaged",
            found=list_faults(list(faults)),
            next_step="Copy it again from where it was made, or make it again: mm2-gpu extract-all.",
        )


def _refuse_other(folder: RemoteFolder, address: RemoteAddress, manifest: Path) -> None:
    try:
        file = folder.find(MANIFEST_NAME)
    except NoRepositoryError:
        # A new dataset, or a new branch of one.
        return
    if file is not None and not _is_there(folder, manifest):
        raise RemoteError(
            f"another capture is at {address}",
            next_step="Choose another address, or give --replace.",
        )


def _is_there(folder: RemoteFolder, manifest: Path) -> bool:
    """Decide whether a folder has this very manifest."""
    file = folder.find(MANIFEST_NAME)
    if file is None:
        return False
    with tempfile.TemporaryDirectory() as temporary:
        there = Path(temporary) / MANIFEST_NAME
        folder.fetch(file, there)
        return there.read_bytes() == manifest.read_bytes()
