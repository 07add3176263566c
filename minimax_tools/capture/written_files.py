"""WrittenFiles: the files of a capture as this run left them, looked for at its end: nobody may have changed them.

| file | check |
|---|---|
| written or checked by this run, in the state that it was left in | none |
| the same, in another state, as copying a folder back gives | its content against its digests |
| written by another rank | is it there, of the size that its header tells |
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

from safetensors import SafetensorError, safe_open

from minimax_tools.capture.inspection import inspect_capture
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.open_files import file_state
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.shared_files import POLL_S, SETTLING_S
from minimax_tools.errors import CaptureError, list_faults
from minimax_tools.machine.file_digest import digest_file

_TENSORS = ".safetensors"


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

        Raises:
            CaptureError: Files are missing, or were changed; the message names them.
        """
        names = dict.fromkeys((*manifest.file_names(), manifest_name))
        own = {name: self._states[name] for name in names if name in self._states}
        faults = [f"{name} is missing" for name in own if self._state(name) is None]
        if not faults:
            changed = [name for name, state in own.items() if self._state(name) != state]
            faults = self._compare(changed, manifest, manifest_name)
        faults += self._look_for([name for name in names if name not in own], patience_s)
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
        texts = {} if manifest.digests is None else dict(manifest.digests.texts)
        faults = []
        for name in changed:
            path = self._directory / name
            if name == manifest_name:
                is_same = path.read_bytes() == manifest.as_text().encode()
            else:
                is_same = name not in texts or digest_file(path) == texts[name]
            if not is_same:
                faults.append(f"{name} has another content")
        if any(name.endswith(_TENSORS) for name in changed):
            faults += inspect_capture(Capture(self._directory, manifest)).faults
        return faults

    def _look_for(self, names: list[str], patience_s: float) -> list[str]:
        """Return the faults of files that other ranks wrote, once they show or the time is over."""
        deadline = time.monotonic() + patience_s
        while faults := [fault for name in names if (fault := self._fault(name)) is not None]:
            if time.monotonic() > deadline:
                break
            time.sleep(POLL_S)
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
