"""CaptureWriter: writes a capture directory layer by layer, atomically, so that a killed run resumes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from minimax_tools.capture.manifest import MANIFEST_NAME, Description, Entry, Manifest, dtype_name
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.inputs import Inputs
from minimax_tools.metrics import measure_tensor
from minimax_tools.sites import ModelSite, Site

logger = logging.getLogger(__name__)

_LOCK_NAME = ".lock"


class CaptureWriter:
    """A capture directory being written; made by `open_capture`."""

    def __init__(self, directory: Path, manifest: Manifest) -> None:
        self.directory = directory
        self.manifest = manifest

    @property
    def complete_layers(self) -> tuple[int, ...]:
        """Layers that are already stored whole."""
        return self.manifest.complete_layers

    def write_layer(
        self,
        layer: int,
        tensors: Mapping[Site, torch.Tensor],
        *,
        twin: Mapping[Site, torch.Tensor] | None = None,
        floor: Mapping[str, torch.Tensor] | None = None,
        not_exposed: tuple[Site, ...] = (),
        observed_dtypes: Mapping[str, str] | None = None,
    ) -> None:
        """Store one whole layer; nothing of it is visible until all of it is.

        Args:
            layer: The layer's number.
            tensors: CPU tensors by site.
            twin: Float32 twins by site, where the noise floor is kept whole.
            floor: Per-token floor statistics by name (`compare.noise` reads them).
            not_exposed: Sites that were wanted and are not exposed.
            observed_dtypes: Dtypes of the router's gate and correction bias as they were loaded.

        Raises:
            CaptureError: The disk is full.
        """
        name = f"layer_{layer}"
        if twin is not None:
            self._write(f"{name}.fp32.safetensors", {str(site): tensor for site, tensor in twin.items()})
        if floor is not None:
            self._write(f"{name}.floor.safetensors", floor)
        named = {str(site): tensor for site, tensor in tensors.items()}
        self._write(f"{name}.safetensors", named)
        entries = tuple(_entry(layer, site, f"{name}.safetensors", tensor) for site, tensor in named.items())
        self._update(
            self.manifest.with_layer(
                layer, entries, not_exposed=not_exposed, observed_dtypes=observed_dtypes or {}
            )
        )

    def write_model(
        self, tensors: Mapping[ModelSite, torch.Tensor], *, twin: Mapping[ModelSite, torch.Tensor] | None = None
    ) -> None:
        """Store the sites outside the layers, and their float32 twins where the noise floor is kept."""
        if twin:
            self._write("model.fp32.safetensors", {str(site): tensor for site, tensor in twin.items()})
        named = {str(site): tensor for site, tensor in tensors.items()}
        self._write("model.safetensors", named)
        entries = tuple(_entry(None, site, "model.safetensors", tensor) for site, tensor in named.items())
        self._update(self.manifest.with_model(entries))

    def finish(self) -> None:
        """Mark the capture as complete."""
        self._update(self.manifest.finished())

    def read_layer_output(self, layer: int) -> torch.Tensor:
        """The output [B,S,H] of a layer that is already stored."""
        return Capture(self.directory, self.manifest).read(layer, Site.OUTPUT)

    def write_json(self, name: str, value: object) -> None:
        """Store a JSON file beside the tensors."""
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        with _replacing(self.directory / name) as temporary:
            temporary.write_text(text, encoding="utf-8")

    def write_inputs(self, inputs: Inputs, hidden_states: torch.Tensor | None) -> None:
        """Store the token rows, and the hidden states [B,S,H] of a run that starts in mid-model."""
        extra = {} if hidden_states is None else {"hidden_states": hidden_states}
        self._write("inputs.safetensors", {**inputs.tensors(), **extra})

    def _write(self, name: str, tensors: Mapping[str, torch.Tensor]) -> None:
        with _replacing(self.directory / name) as temporary:
            safetensors.torch.save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, temporary)

    def _update(self, manifest: Manifest) -> None:
        self.write_json(MANIFEST_NAME, manifest.as_json())
        self.manifest = manifest


@contextlib.contextmanager
def open_capture(
    directory: Path, description: Description, *, inputs: Inputs, hidden_states: torch.Tensor | None = None
) -> Iterator[CaptureWriter]:
    """Open `directory` for writing: resumed where it holds the same capture unfinished, else begun anew.

    Args:
        directory: The capture directory; made where it does not exist.
        description: What will be written.
        inputs: The token rows.
        hidden_states: [B,S,H], the first layer's input where that is not made of the tokens.

    Raises:
        CaptureError: Another process writes there, the directory holds something else, or the disk is full.
    """
    _make_folder(directory)
    with _locked(directory):
        manifest = _resumable(directory, description)
        if manifest is None:
            _clear(directory)
            manifest = Manifest(description=description)
        writer = CaptureWriter(directory, manifest)
        if not manifest.complete_layers:
            writer.write_inputs(inputs, hidden_states)
            writer.write_json(MANIFEST_NAME, manifest.as_json())
        yield writer


def _make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CaptureError(
            f"cannot make the capture directory {directory}", found=error.strerror, next_step="Choose another --output-dir."
        ) from error


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    path = directory / _LOCK_NAME
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise CaptureError(
                f"the output directory {directory} is in use by another run",
                next_step="Wait for it, or choose another --output-dir.",
            ) from None
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def _resumable(directory: Path, description: Description) -> Manifest | None:
    """The manifest to go on from; None where the directory must be begun anew."""
    if not (directory / MANIFEST_NAME).exists():
        return None
    try:
        manifest = Manifest.read(directory)
    except CaptureError as error:
        logger.warning("Starting anew in %s: %s", directory, error)
        return None
    differing = manifest.description.differences(description)
    if differing:
        logger.info("Starting anew in %s: the capture there has other %s.", directory, ", ".join(differing))
        return None
    if manifest.is_complete:
        logger.info("Starting anew in %s: the same capture is there, complete.", directory)
        return None
    whole = tuple(layer for layer in manifest.complete_layers if _is_intact(directory, manifest, layer))
    if whole != manifest.complete_layers:
        logger.warning("Starting anew in %s: a stored layer does not match its digest.", directory)
        return None
    if whole:
        logger.info("Resuming %s after layer %d.", directory, max(whole))
    return manifest


def _is_intact(directory: Path, manifest: Manifest, layer: int) -> bool:
    capture = Capture(directory, manifest)
    try:
        return all(
            digest_tensor(capture.read(layer, Site(entry.site))) == entry.sha256
            for entry in manifest.entries
            if entry.layer == layer
        )
    except CaptureError:
        return False


def _clear(directory: Path) -> None:
    """Remove an earlier capture; refuse to touch anything else."""
    present = {path.name for path in directory.iterdir()} - {_LOCK_NAME}
    if not present:
        return
    if MANIFEST_NAME not in present:
        raise CaptureError(
            f"{directory} is not empty and holds no capture",
            found=", ".join(sorted(present)[:3]),
            next_step="Choose another --output-dir.",
        )
    for name in present:
        path = directory / name
        if path.suffix in (".safetensors", ".json") or path.name.endswith(".tmp"):
            path.unlink()


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` that takes its place once the block has ended well."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        yield temporary
        # safetensors writes files that only their owner may read; captures travel between people.
        temporary.chmod(mode)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    except (OSError, SafetensorError) as error:
        temporary.unlink(missing_ok=True)
        if getattr(error, "errno", None) == errno.ENOSPC or "os error 28" in str(error):
            free = shutil.disk_usage(path.parent).free
            raise CaptureError(
                f"no space left to write {path}",
                found=f"{free / 1e6:.1f} MB free",
                next_step="Free some space, choose another --output-dir, or capture less (--sites layer); "
                "the layers already written are kept and the run resumes.",
            ) from error
        raise CaptureError(f"cannot write {path}", found=str(error)) from error


def _entry(layer: int | None, site: str, file: str, tensor: torch.Tensor) -> Entry:
    return Entry(
        layer=layer,
        site=site,
        file=file,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        sha256=digest_tensor(tensor),
        statistics=measure_tensor(tensor),
    )


def digest_tensor(tensor: torch.Tensor) -> str:
    """sha256 over the tensor's bytes in row-major order."""
    values = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return hashlib.sha256(values.numpy().data).hexdigest()
