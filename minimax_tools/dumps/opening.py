"""Opening: a capture of any layout, found by the directory's files unless a format is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from minimax_tools.capture.reader import Capture
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.dumps.cache_capture import MODULES_FOLDER, CacheCapture, holds_caches
from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.formats import FORMATS, find_format
from minimax_tools.dumps.legacy import LEGACY_LAYOUT, LegacyCapture, is_legacy
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.errors import CaptureError, UsageError, list_faults, list_names
from minimax_tools.model.run import Mode

_MAX_NAMED = 5
_TENSOR_SUFFIXES = (".pt", ".pth", ".npy", ".safetensors")


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpReading:
    """A user's options for reading another tool's dump."""

    format: str | None = None  # name of the format; None if the map or the files tell it
    names: NameMap = field(default_factory=NameMap)  # the user's map: which tensor holds which site

    @property
    def is_default(self) -> bool:
        """True if no option was given."""
        return self.format is None and self.names.path is None

    def refuse_for(self, directory: Path, what: str) -> None:
        """Raise UsageError if an option was given for a directory whose layout tells all; `what` says which it is."""
        if not self.is_default:
            raise UsageError(
                f"{directory} {what}: it takes no format and no map",
                next_step="Give them to the side that another tool wrote. If it is another tool's, name its --format.",
            )


def open_source(directory: Path | str, reading: DumpReading | None = None) -> CaptureSource:
    """Open a capture directory of mm2, of the legacy `.pt` layout, or of another tool.

    Raises:
        UsageError: A format or a map is given for a capture of mm2, or a map alone for one of the legacy layout.
    """
    directory = Path(directory)
    reading = reading or DumpReading()
    if not directory.is_dir():
        raise CaptureError(
            f"there is no capture directory {directory}",
            found="a file" if directory.exists() else None,
            next_step="Check the path, or make one: mm2-gpu extract-all --model DIR (golden), "
            "mm2-test sweep (run).",
        )
    if (directory / MANIFEST_NAME).exists():
        reading.refuse_for(directory, "is mm2's own capture")
        return Capture.open(directory)
    refuse_unreadable(directory)
    format_ = reading.format or reading.names.format
    if _holds_both(directory):
        caches = CacheCapture.open(directory)
        return DumpCapture.open(directory / MODULES_FOLDER, reading.names, format_=format_, caches=caches)
    if format_ is not None or find_format(directory) is not None:
        return DumpCapture.open(directory, reading.names, format_=format_)
    if is_legacy(directory):
        reading.refuse_for(directory, "is a capture in mm2's old layout")
        return LegacyCapture.open(directory)
    if holds_caches(directory):
        reading.refuse_for(directory, "holds vLLM Neuron's caches")
        return CacheCapture.open(directory)
    raise CaptureError(
        f"no capture at {directory}",
        expected=f"{MANIFEST_NAME}, or {LEGACY_LAYOUT}, or the files of {', '.join(FORMATS)}",
        found=list_names(sorted(path.name for path in directory.iterdir()), most=_MAX_NAMED)
        or "an empty directory",
        next_step=_next_step(directory),
    )


def is_others(directory: Path) -> bool:
    """Decide whether a format and a map may apply to a directory: its layout does not tell all."""
    tells_all = (directory / MANIFEST_NAME).exists() or is_legacy(directory) or holds_caches(directory)
    return not tells_all or _holds_both(directory)


def open_sides(
    reference: Path | str,
    target: Path | str,
    *,
    reference_reading: DumpReading,
    target_reading: DumpReading,
) -> tuple[CaptureSource, CaptureSource]:
    """Open two captures to be compared; another tool's dump is laid out as the batch of the other side.

    Of two dumps, the target is laid out as the reference's batch, if the reference tells its own.

    Other captures keep their padding.

    Raises:
        UsageError: As for `open_source`.
    """
    first, second = without_expert_tokens(
        open_source(reference, reference_reading), open_source(target, target_reading)
    )
    # Of two dumps the target may hold more requests, such as a warm-up's: its batch is the reference's.
    keeps_batch = second.takes_other_layouts and first.read_attention_mask() is not None
    return first if keeps_batch else first.laid_out_as(second), second.laid_out_as(first)


def without_expert_tokens(
    reference: CaptureSource, target: CaptureSource
) -> tuple[CaptureSource, CaptureSource]:
    """Take expert tokens for padding on both sides, unless the target ran each layer on the golden's own input.

    Anywhere else their states are not the golden's, and cannot be judged.
    """
    made = target.known_description
    if made is not None and made.expert_tokens is not None and made.run.mode is Mode.ISOLATED:
        return reference, target
    return reference.natural(), target.natural()


def _next_step(directory: Path) -> str:
    """Return the advice for a directory without a capture; captures usually lie one folder further down."""
    below = sorted(path.name for path in directory.iterdir() if path.is_dir() and _is_capture(path))
    if below:
        return f"Name one of the captures in it: {list_names(below, most=_MAX_NAMED)}."
    if any(path.suffix in _TENSOR_SUFFIXES for path in directory.iterdir()):
        return (
            "Tensors of hooks of your own are read under nxdi's names, such as "
            "captured_tensors_cte_step_1_module_layers.0.mlp_output.pt; mm2-test show tells then which sites "
            "they map to."
        )
    return "Make one: mm2-gpu extract-all --model DIR (golden), mm2-test sweep (run)."


def _is_capture(path: Path) -> bool:
    return not is_others(path) or find_format(path) is not None


def _holds_both(directory: Path) -> bool:
    """Decide whether a directory holds a dump of modules and caches of the same run."""
    return (directory / MODULES_FOLDER).is_dir() and holds_caches(directory)


def refuse_unreadable(directory: Path) -> None:
    """Check that each folder below a directory can be listed, and each link and tensor file opened.

    Raises:
        CaptureError: Some cannot; each is named with the reason.
    """
    faults = list(_find_faults(directory))
    if faults:
        raise CaptureError(
            f"{directory} cannot be read whole",
            found=list_faults(faults),
            next_step="Mend the access to these, or copy them again from the host that wrote them.",
        )


def _find_faults(folder: Path) -> Iterator[str]:
    try:
        entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
    except OSError as error:
        yield _word(folder, error)
        return
    for entry in entries:
        path = Path(entry.path)
        is_link = entry.is_symlink()
        try:
            # Also of a link, which may lead nowhere, or in a circle.
            is_folder = path.stat() is not None and path.is_dir()
            if not is_folder and path.suffix in _TENSOR_SUFFIXES:
                path.open("rb").close()
        except OSError as error:
            yield _word(path, error)
            continue
        if is_folder and path.suffix in _TENSOR_SUFFIXES:
            yield f"{path}: a folder in place of a file"
        # A link may lead above itself.
        elif is_folder and not is_link:
            yield from _find_faults(path)


def _word(path: Path, error: OSError) -> str:
    link = f" (a link to {path.readlink()})" if path.is_symlink() else ""
    return f"{path}{link}: {error.strerror}"
