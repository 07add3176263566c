"""CaptureWriter: writes a capture directory layer by layer, atomically, so that a killed run resumes.

A network file system may show a file of another machine late, or an old file under a name that was written anew. So
such a file is known by its content: a lock by its owner, a tensor by its digest. Wrong content is waited out like a
missing file, because no reader can tell a damaged file from an old one that its machine still shows.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from minimax_tools.capture.further import further_file
from minimax_tools.capture.manifest import (
    INPUTS_NAME,
    Certificate,
    Description,
    Entry,
    FileDigests,
    Manifest,
    TensorDigest,
    describe_tensor,
)
from minimax_tools.capture.passes import CachePair, cache_file
from minimax_tools.capture.proof import file_state
from minimax_tools.capture.read_record import remove_records
from minimax_tools.capture.reader import Capture, KeptTokens
from minimax_tools.capture.resumption import (
    HiddenStates,
    add_part,
    clear_capture,
    find_resumable,
    remove_parts,
)
from minimax_tools.capture.store import MANIFEST_NAME, floor_file, sites_file, twins_file
from minimax_tools.errors import CaptureError, list_faults
from minimax_tools.machine.compiled import CorePool
from minimax_tools.machine.files import (
    locked_directory,
    read_owner,
    remove_abandoned,
    whole_capture_file,
)
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site

# Longest wait, in seconds: NFS keeps what it knows of a folder for at most 60 s by default (`acdirmax`), and a margin.
SETTLING_S = 75.0
POLL_S = 0.25
Found = TypeVar("Found")
_TENSORS = ".safetensors"
SiteTensors = Mapping[Site, torch.Tensor] | Mapping[ModelSite, torch.Tensor]


def wait_for_lock(directory: Path, owner: str, *, patience_s: float = SETTLING_S) -> None:
    """Wait until `directory` shows the lock of this run, named `owner`; at most `patience_s` seconds.

    Raises:
        CaptureError: After this time the directory holds the lock of another run, or none.
    """
    found = _wait(lambda: read_owner(directory), lambda found: found == owner, patience_s=patience_s)
    if found != owner:
        raise CaptureError(
            f"{directory} is not the directory that rank 0 opened",
            expected="the lock of this run in it",
            found="none" if found is None else "that of another",
            next_step="Give --output-dir a folder on a file system that all machines share.",
        )


def refuse_other_owner(directory: Path, owner: str) -> None:
    """Raise if another run has taken the directory over; a missing lock may only not show, so it does not count.

    Raises:
        CaptureError: The directory holds the lock of another run.
    """
    found = read_owner(directory)
    if found not in (owner, None):
        raise CaptureError(
            f"another run writes in {directory} now", next_step="Nothing: this one ended when its rank 0 did."
        )


def read_shared(
    directory: Path, manifest: Manifest, entry: Entry, *, patience_s: float = SETTLING_S
) -> torch.Tensor:
    """Read the tensor of an entry that another rank wrote, once its file shows; wait at most `patience_s` seconds."""

    def read() -> torch.Tensor | CaptureError:
        try:
            return Capture(directory, manifest).read_entry(entry)
        except CaptureError as error:
            return error

    found = _wait(read, lambda found: isinstance(found, torch.Tensor), patience_s=patience_s)
    if isinstance(found, CaptureError):
        raise CaptureError(
            f"{entry.site} of layer {entry.layer} does not show in {directory}, where another rank wrote it",
            found=str(found),
            next_step="Check that all machines see the same folder, and run the same command again.",
        )
    return found


def _wait(look: Callable[[], Found], is_there: Callable[[Found], bool], *, patience_s: float) -> Found:
    """Return what `look` finds, as soon as it is there or the time is over."""
    deadline = time.monotonic() + patience_s
    while not is_there(found := look()) and time.monotonic() <= deadline:
        time.sleep(POLL_S)
    return found


class WrittenFiles:
    """The states of the files that this run wrote to a directory, or checked in it when it began."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._states: dict[str, tuple[int, int, int] | None] = {}

    def note(self, names: Iterable[str]) -> None:
        """Take the states of files that have just been written or checked."""
        self._states |= {name: self._state(name) for name in names}

    def require(self, manifest: Manifest, *, manifest_name: str, patience_s: float = SETTLING_S) -> None:
        """Check that all files of a capture are there, as they were written, and the manifest too.

        Files of another machine may show late: they are waited for, at most `patience_s` seconds.
        """
        names = dict.fromkeys((*manifest.file_names(), manifest_name))
        own = {name: self._states[name] for name in names if name in self._states}
        faults = [f"{name} is missing" for name in own if self._state(name) is None]
        if not faults:
            changed = [name for name, state in own.items() if self._state(name) != state]
            faults = self._compare(changed, manifest, manifest_name)
        # Files of other ranks, as far as their headers tell.
        others = [name for name in names if name not in own]
        faults += _wait(
            lambda: [fault for name in others if (fault := self._fault(name)) is not None],
            lambda found: not found,
            patience_s=patience_s,
        )
        if faults:
            raise CaptureError(
                f"files of {self._directory} were removed or changed while the run wrote there",
                found=list_faults(faults),
                next_step="Find out what else writes or cleans up there, then run the same command again"
                # Without its manifest the folder is not known as a capture, and not written to.
                + ("." if Manifest.is_in(self._directory) else ", with another --output-dir."),
            )

    def _state(self, name: str) -> tuple[int, int, int] | None:
        try:
            return file_state(self._directory / name)
        except OSError:
            return None

    def _compare(self, changed: list[str], manifest: Manifest, manifest_name: str) -> list[str]:
        """Return the faults of files whose states changed."""
        faults = []
        for name in changed:
            path = self._directory / name
            if name != manifest_name:
                damage = manifest.find_damage(name, path)
            else:
                damage = None if path.read_bytes() == manifest.as_text().encode() else "another content"
            if damage is not None:
                faults.append(f"{name}: {damage}")
        return faults

    def _fault(self, name: str) -> str | None:
        """Return the fault of a file as its header tells it; None for a file that is whole."""
        path = self._directory / name
        if not path.is_file():
            return f"{name} is missing"
        try:
            if name.endswith(_TENSORS):
                with safe_open(path, framework="pt"):  # refuses a size that is not the header's
                    pass
        except (OSError, SafetensorError) as error:
            return f"{name} is damaged: {error}"
        return None


class CaptureWriter:
    """A capture directory being written, as `open_capture` opens it.

    Args:
        inputs: The batch, by which the last tokens of each row are found, if these alone are kept; None to keep all.
        manifest_name: File name of the manifest. If several ranks write one capture, each has a manifest of its own,
            its part.
    """

    def __init__(
        self,
        directory: Path,
        manifest: Manifest,
        *,
        inputs: Inputs | None = None,
        manifest_name: str = MANIFEST_NAME,
    ) -> None:
        self._kept = KeptTokens(inputs) if inputs is not None and inputs.last_tokens else None
        self.directory = directory
        self.manifest = manifest
        self._manifest_name = manifest_name
        self._files = WrittenFiles(directory)

    @property
    def complete_layers(self) -> tuple[int, ...]:
        """Layers that are already stored whole."""
        return self.manifest.complete_layers

    @property
    def has_model_sites(self) -> bool:
        """True if the sites outside the layers are already stored."""
        return any(entry.layer is None for entry in self.manifest.entries)

    def write(
        self,
        layer: int | None,
        tensors: SiteTensors,
        *,
        twin: SiteTensors | None = None,
        floor: Mapping[str, torch.Tensor] | None = None,
        further: Mapping[str, torch.Tensor] | None = None,
        observed_dtypes: Mapping[str, str] | None = None,
        cache: CachePair | None = None,
        **of_layer: Any,
    ) -> None:
        """Store one whole layer; readers see nothing of it until all of it is written.

        Args:
            layer: The layer's number; None for the sites outside the layers.
            tensors: CPU tensors by site.
            twin: Float32 twins by site, if the noise floor is kept whole.
            floor: Statistics of the noise floor by name (see `minimax_tools.metrics.noise_floor`).
            further: Further outputs of a port by name (see `taps`).
            observed_dtypes: Dtypes of the router's gate and correction bias as they were loaded.
            cache: Keys and values [B,K,S,D] in the cache of a whole port.
            of_layer: What else the manifest notes of a layer, by the names of its fields `OF_LAYER`.
        """
        if self._kept is not None:
            tensors = self._kept.cut_sites(tensors)
            twin = None if twin is None else self._kept.cut_twins(twin)
            floor = None if floor is None else self._kept.cut_floor(floor)
        digests: dict[str, Mapping[str, TensorDigest]] = {}
        if twin is not None:
            digests |= self._write(twins_file(layer), _by_name(twin))
        if floor is not None:
            digests |= self._write(floor_file(layer), floor)
        if layer is not None and further:
            digests |= self._write(further_file(layer), further)
        if layer is not None and cache is not None:
            digests |= self._write(cache_file(layer), dict(zip(("keys", "values"), cache, strict=True)))
        entries = self._write_sites(layer, _by_name(tensors))
        self._update(
            self.manifest.with_layer(
                layer, entries, digests=digests, observed_dtypes=observed_dtypes or {}, **of_layer
            )
        )

    def add_part(self, part: Manifest) -> None:
        """List the tensors of a part, the manifest of another rank that writes this capture."""
        self._update(add_part(self.manifest, part))

    def finish(self) -> None:
        """Mark the capture as complete, if all its files are there."""
        self.require_files()
        self._update(replace(self.manifest, is_complete=True))
        remove_parts(self.directory)

    def require_files(self) -> None:
        """Check that the capture's files are there as they were written."""
        self._files.require(self.manifest, manifest_name=self._manifest_name)

    @property
    def capture(self) -> Capture:
        """The capture as far as it is stored, opened for reading."""
        return Capture(self.directory, self.manifest)

    def read_hidden_states(self) -> torch.Tensor:
        """Read the hidden states [B,S,H] that `write_inputs` stored."""
        stored = self.capture.read_hidden_states()
        if stored is None:
            raise CaptureError(f"{self.directory} holds no hidden states", next_step="Run the capture again.")
        return stored

    def write_json(self, name: str, value: object) -> None:
        """Store a JSON file beside the tensors, and its digest."""
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        self._write_text(name, text)
        self._update(self.manifest.with_text(name, hashlib.sha256(text.encode()).hexdigest()))

    def write_inputs(self, inputs: Inputs, hidden_states: torch.Tensor | None) -> None:
        """Store the token rows, and the hidden states [B,S,H] of a run that starts in mid-model."""
        extra = {} if hidden_states is None else {"hidden_states": hidden_states}
        written = self._write(INPUTS_NAME, {**inputs.tensors(), **extra})
        changed = self.manifest.with_digests(written)
        if changed != self.manifest:
            self._update(changed)

    def _write_sites(self, layer: int | None, tensors: Mapping[str, torch.Tensor]) -> tuple[Entry, ...]:
        """Write the sites of a layer, by their names, and return their entries."""
        file = sites_file(layer)
        # Threads describe the tensors while they are written. Each computes alone: statistics of blocks are too short
        # for torch's own threads, which would wait for each other up to a hundred times as long.
        with CorePool("describing") as pool:
            entries = pool.map(
                lambda site: Entry.of(layer, site, file=file, tensor=tensors[site]), tuple(tensors)
            )
            self._save(file, tensors)
            return tuple(entries)

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> FileDigests:
        """Write a file whose tensors have no entries, and return their digests."""
        self._save(name, tensors)
        return {name: {key: describe_tensor(tensor) for key, tensor in tensors.items()}}

    def _save(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        with whole_capture_file(self.directory / name) as temporary:
            safetensors.torch.save_file(
                {key: tensor.contiguous() for key, tensor in tensors.items()}, temporary
            )
        self._files.note([name])

    def _write_text(self, name: str, text: str) -> None:
        with whole_capture_file(self.directory / name) as temporary:
            temporary.write_text(text, encoding="utf-8")
        self._files.note([name])

    def _update(self, manifest: Manifest) -> None:
        self._write_text(self._manifest_name, manifest.as_text())
        self.manifest = manifest


@contextlib.contextmanager
def open_capture(
    directory: Path,
    description: Description,
    *,
    inputs: Inputs,
    hidden_states: HiddenStates = None,
    owner: str = "",
) -> Iterator[CaptureWriter]:
    """Open `directory` for writing: resume the same capture if it is unfinished, else begin anew.

    Args:
        directory: The capture directory; made if it does not exist.
        description: The capture to write.
        inputs: The token rows.
        hidden_states: The first layer's input [B,S,H], if it is not made of the tokens. A function is called only if
            no layer is stored yet; everything that its result depends on must be in `description`.
        owner: Name of the run, by which other ranks know its lock (see `folder_lock.read_owner`).
    """
    with locked_directory(directory, owner=owner):
        manifest = find_resumable(directory, description, hidden_states=hidden_states)
        if manifest is None:
            clear_capture(directory)
            manifest = Manifest(description=description)
        if not manifest.complete_layers:
            # The records (`read_record`) of what ranks read of the checkpoint are of a run that is not resumed.
            remove_records(directory)
        remove_abandoned(directory)
        # A capture that changes loses its certificate: `mm2-gpu certify` must check it again.
        manifest = replace(manifest, certificate=None)
        writer = CaptureWriter(directory, manifest, inputs=inputs)
        # A resumed capture was just read and checked.
        writer._files.note(manifest.file_names())
        # The manifest comes first: a run killed at once leaves a directory that is known as a capture.
        writer._update(manifest)
        remove_parts(directory)
        if callable(hidden_states):
            hidden_states = writer.read_hidden_states() if manifest.complete_layers else hidden_states()
        writer.write_inputs(inputs, hidden_states)
        yield writer
        if writer.manifest.is_complete:
            # Once more: a finished run may have added to its capture, as the tokens that it generated.
            writer.require_files()


def tidy_capture(directory: Path) -> None:
    """Remove what a killed run left in a finished capture, unless another run writes there or nobody may write."""
    if Manifest.is_in(directory):
        with contextlib.suppress(CaptureError, OSError), locked_directory(directory):
            remove_abandoned(directory)


def store_certificate(directory: Path, certificate: Certificate) -> Manifest:
    """Put a certificate into the manifest of a finished capture, in place of an earlier one."""
    # Read first: locking would make a directory that does not exist.
    Manifest.read(directory)
    with locked_directory(directory):
        writer = CaptureWriter(directory, Manifest.read(directory))
        writer._update(replace(writer.manifest, certificate=certificate))
    return writer.manifest


def _by_name(tensors: SiteTensors) -> dict[str, torch.Tensor]:
    return {str(site): tensor for site, tensor in tensors.items()}
