"""Proof: tensors read from a capture, checked against the digests in its manifest, each once a process.

| tensor | checked against |
|---|---|
| site | its entry; a golden's statistics too, if nothing else shows that tensor and digest were changed together |
| inputs, float32 twin, noise floor | the manifest's digests |
| float32 twin | also the golden's tensor: its shape, and finite values wherever the golden has them |
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import safetensors.torch
import torch
from safetensors import safe_open

from minimax_tools.capture.manifest import Entry, Manifest, TensorDigest, describe_tensor
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.errors import CaptureError
from minimax_tools.machine.files import digest_file
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.metrics.tensor_statistics import TensorStatistics
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.remote.cache import ADDRESS_NAME
from minimax_tools.stored_dtype import dtype_name

# A layer has three files (sites, twins, floor), the model outside its layers too, and the inputs have one.
_MOST_OPEN = 8
# A tensor of a mapped file is copied up to this size, which is cheaper than to map the file again for it.
_COPIED_BYTES = 2**20
# A file of up to this size is read whole: a floor has hundreds of tensors, and each costs more to ask for than to read.
_SMALL_FILE_BYTES = 2**22
FileState: TypeAlias = "tuple[int, int, int]"
# What is given to both the model and its float32 twin has no twin of its own.
_WITHOUT_TWIN = (str(Site.INPUT), str(ModelSite.EMBEDDING))
# Values squared and summed in float32 at a time: so the sum over all blocks is exact to 1e-6.
_BLOCK_ELEMENTS = 1 << 17
# Relative, of a norm; leaves room for that error.
_STATISTICS_TOLERANCE = 1e-4
# A tensor of up to this size is hashed in less time than a thread takes to be told of it.
_SMALL_BYTES = 1 << 14


class CheckRunner:
    """Checks that have passed, and those that wait on the thread; a check raises CaptureError if it fails.

    The key says what is checked, such as a file and a tensor in it. A key that has passed is not checked again.
    """

    def __init__(self) -> None:
        self._passed: set[Hashable] = set()
        self._pending: dict[Hashable, Future[None]] = {}
        self._thread: ThreadPoolExecutor | None = None  # only within `beside`

    def run(self, key: Hashable, check: Callable[[], None]) -> None:
        """Run a check that has not passed before: on the thread within `beside`, else now."""
        if self._thread is None:
            self.run_now(key, check)
        elif key not in self._passed and key not in self._pending:
            self._pending[key] = self._thread.submit(check)

    def run_now(self, key: Hashable, check: Callable[[], None]) -> None:
        """Run a check that has not passed before."""
        if key not in self._passed:
            check()
            self._passed.add(key)

    @contextmanager
    def beside(self) -> Iterator[None]:
        """Run checks on a thread while a block runs; the block ends when all of them have run."""
        if self._thread is not None:
            # The outer block waits for the checks of this one.
            yield
            return
        with ThreadPoolExecutor(1) as self._thread:
            try:
                yield
            finally:
                # Checks asked for from here on run at once; those that wait are waited for, in order.
                self._thread = None
                pending, self._pending = self._pending, {}
                for key, check in pending.items():
                    check.result()
                    self._passed.add(key)


def file_state(path: Path | str) -> FileState:
    """Return the state of a file, which changes when it is replaced or written: inode, time in ns, size in bytes."""
    status = os.stat(path)  # noqa: PTH116 - twice as fast, and asked before each tensor
    return status.st_ino, status.st_mtime_ns, status.st_size


class OpenFiles:
    """The safetensors files read last from a directory, each kept open until it is replaced.

    Args:
        directory: Folder of the files.
        hold: Called with a file's name before it is read: a mirror fetches the file then.
    """

    def __init__(self, directory: Path, *, hold: Callable[[str], None] | None = None) -> None:
        self._directory = directory
        self._hold = hold
        self._open = lru_cache(maxsize=_MOST_OPEN)(_OpenFile.of)
        self._states: dict[str, FileState] = {}

    def read(self, file: str, name: str) -> torch.Tensor | None:
        """Read a tensor that no other reader shares; None if the file holds none of that name."""
        if self._hold is not None:
            self._hold(file)
        path = self._path_of(file)
        state = self._states[file] = file_state(path)
        opened = self._open(path, state)
        if name not in opened.names:
            return None
        tensor = opened.read(name)
        # Two reads from one open file share memory, which a caller may change.
        if not opened.is_mapped or tensor.nbytes <= _COPIED_BYTES:
            return tensor.clone()
        mapping: Any = safe_open(path, framework="pt")
        large: torch.Tensor = mapping.get_tensor(name)
        return large

    def state(self, file: str) -> FileState:
        """Return the state in which a file was read last; the present one if it was not read."""
        return self._states.get(file) or file_state(self._path_of(file))

    def _path_of(self, file: str) -> str:
        # As text: one is built for each tensor, and `Path` takes several times as long.
        return f"{self._directory}/{file}"


class _OpenFile(NamedTuple):
    names: frozenset[str]
    read: Callable[[str], torch.Tensor]
    is_mapped: bool  # False for a file that was read whole

    @classmethod
    def of(cls, path: str, state: FileState) -> _OpenFile:
        if state[-1] <= _SMALL_FILE_BYTES:
            # `load` knows fewer dtypes than `safe_open`.
            with suppress(KeyError):
                tensors = safetensors.torch.load(Path(path).read_bytes())
                return cls(frozenset(tensors), tensors.__getitem__, is_mapped=False)
        opened: Any = safe_open(path, framework="pt")  # it has no public type
        return cls(frozenset(opened.keys()), opened.get_tensor, is_mapped=True)


class Proof:
    """Checks of the tensors read from one capture, through `files`."""

    def __init__(self, directory: Path, manifest: Manifest, files: OpenFiles) -> None:
        self._directory = directory
        self._manifest = manifest
        self._files = files
        self._is_golden = manifest.description.side == GOLDEN_SIDE
        self._checks = CheckRunner()
        self._is_certified: bool | None = None

    @property
    def owner(self) -> str:
        """The capture in words, `the golden DIR` or `the run DIR`."""
        return f"the {'golden' if self._is_golden else 'run'} {address_of(self._directory)}"

    @property
    def next_step(self) -> str:
        """Advice for a damaged capture."""
        if self._is_golden:
            return "Copy the golden again from where it was made, or make it again: mm2-gpu extract-all."
        return "Copy the run again from where it was made, or run the port again: mm2-test sweep."

    def refuse(self, fault: str, *, expected: str | None = None, found: str | None = None) -> CaptureError:
        """Return an error about the capture; `fault` goes on after its name, such as `is damaged: …`."""
        owner, next_step = self.owner, self.next_step
        if (self._directory / ADDRESS_NAME).exists():
            # Each file was right when it came.
            owner = f"the copy of {owner} on this machine"
            next_step = f"Remove the file from {self._directory}: it is fetched again."
        return CaptureError(f"{owner} {fault}", expected=expected, found=found, next_step=next_step)

    @property
    def is_certified(self) -> bool:
        """True if a certificate belongs to the tensors that the manifest lists."""
        # Kept: it hashes the whole manifest.
        if self._is_certified is None:
            self._is_certified = self._manifest.is_certified
        return self._is_certified

    def beside(self) -> AbstractContextManager[None]:
        """Check digests on a thread while a block runs; the block ends when all that was read in it is checked."""
        return self._checks.beside()

    def check_entry(self, entry: Entry, tensor: torch.Tensor) -> None:
        """Raise if a site's tensor is not the one that its entry describes; within `beside`, at the block's end."""
        self._checks.run(self._key(entry.file, entry.site), lambda: self._check_entry(entry, tensor))

    def check_tensor(self, file: str, name: str, tensor: torch.Tensor | None, *, place: str) -> None:
        """Raise if a tensor without an entry does not have its digest; None stands for one that its file lacks.

        `place` names the tensor in messages.
        """
        expected = self._manifest.digests.get(file, {}).get(name)
        if tensor is None and expected is None:
            return
        if tensor is None:
            fault = f"{file} lacks {place}, which its manifest lists"
        else:
            fault = f"{place} in {file} has no digest in its manifest"
        if tensor is None or expected is None:
            raise self.refuse(f"was changed after it was written: {fault}")
        run = self._checks.run if tensor.nbytes > _SMALL_BYTES else self._checks.run_now
        run(self._key(file, name), lambda: self._check_digest(file, place, tensor, expected))

    def check_text(self, name: str) -> None:
        """Raise if a JSON file does not have its digest, or is there without one, or missing with one."""
        path, expected = self._directory / name, self._manifest.text_digests.get(name)
        found = digest_file(path) if path.exists() else None
        if expected != found:
            raise self.refuse(
                f"was changed after it was written: {name}",
                expected="no such file" if expected is None else f"sha256 {expected[:16]}…",
                found="none" if found is None else f"sha256 {found[:16]}…",
            )

    def check_twin(
        self,
        site: Site | ModelSite,
        twin: torch.Tensor,
        *,
        place: str,
        file: str,
        shape: tuple[int, ...] | None,
        read_golden: Callable[[], tuple[torch.Tensor | None, torch.Tensor]],
    ) -> None:
        """Raise if a tensor cannot be the float32 twin of a site, named `place` in messages.

        It has the golden's `shape`, if the site was captured, and is finite where that is: `read_golden` reads
        its tensor and the mask, int64 [B,S], if the twin is not. It is float32; the chosen experts' is int64.
        """
        fault = f"is damaged: {place} in {file} is no float32 twin"
        expected = tuple(twin.shape) if shape is None else shape
        dtype = torch.int64 if site is Site.ROUTER_EXPERTS else torch.float32

        def check() -> None:
            if twin.dtype != dtype or tuple(twin.shape) != expected:
                raise self.refuse(
                    fault,
                    expected=f"{dtype_name(dtype)} {list(expected)}",
                    found=f"{dtype_name(twin.dtype)} {list(twin.shape)}",
                )
            num_wrong = 0 if _is_finite(twin) else _count_nonfinite_twins(site, twin, *read_golden())
            if num_wrong:
                raise self.refuse(
                    fault, expected="a number wherever the golden holds one", found=f"{num_wrong} NaN or Inf"
                )

        # Not on the thread: `read_golden` reads files of the capture, which one thread does at a time.
        self._checks.run_now(self._key(file, f"{site} as a twin"), check)

    def _check_entry(self, entry: Entry, tensor: torch.Tensor) -> None:
        place = name_place(entry.site, entry.layer)
        self._check_digest(entry.file, place, tensor, entry.digest)
        if self._needs_statistics(entry) and not _matches_statistics(tensor, entry.statistics):
            raise self.refuse(
                f"was changed after it was written: {place} in {entry.file} has other statistics than its "
                "manifest says"
            )

    def _needs_statistics(self, entry: Entry) -> bool:
        """Decide whether only statistics can show that a golden's tensor was changed along with its digest.

        With a certificate, the certificate shows it. With a twin, the noise floor does.
        """
        has_twin = self._manifest.description.noise_floor == "full" and entry.site not in _WITHOUT_TWIN
        return self._is_golden and not has_twin and not self.is_certified

    def _check_digest(self, file: str, place: str, tensor: torch.Tensor, expected: TensorDigest) -> None:
        found = describe_tensor(tensor)
        if found != expected:
            raise self.refuse(
                f"was damaged or changed after it was written: {place} in {file} does not match its manifest",
                expected=str(expected),
                found=str(found),
            )

    def _key(self, file: str, name: str) -> tuple[str, str, FileState]:
        """Return the key of a tensor in the file as it was read: a replaced file is checked again."""
        try:
            return file, name, self._files.state(file)
        except OSError as error:
            raise self.refuse(f"is damaged: {file} cannot be read", found=str(error)) from error


def name_place(site: str, layer: int | None) -> str:
    """Name a site, or what is stored of it, in messages."""
    return str(site) if layer is None else f"{site} of layer {layer}"


def _is_finite(tensor: torch.Tensor) -> bool:
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _count_nonfinite_twins(
    site: Site | ModelSite, twin: torch.Tensor, golden: torch.Tensor | None, mask: torch.Tensor
) -> int:
    """Count values on real tokens that are NaN or Inf in the twin alone; without a golden, in the twin."""
    is_real = mask.bool()
    is_wrong = ~token_rows(twin, site)[is_real].isfinite()
    if golden is not None:
        is_wrong &= token_rows(golden, site)[is_real].isfinite()
    return int(is_wrong.sum())


def _matches_statistics(tensor: torch.Tensor, statistics: TensorStatistics) -> bool:
    """Decide whether a tensor has the extremes and the norm in its statistics, as far as these can tell."""
    if tensor.numel() == 0:
        return True
    low, high = (float(value) for value in tensor.aminmax())
    num_nonfinite = statistics.num_nan + statistics.num_inf
    # Statistics leave NaN and Inf out, so of a tensor with some only their presence is compared.
    if not (math.isfinite(low) and math.isfinite(high)):
        return num_nonfinite > 0
    if num_nonfinite or (low, high) != (statistics.min, statistics.max):
        return False
    blocks = tensor.reshape(-1).split(_BLOCK_ELEMENTS)
    norm = math.sqrt(sum(float(block.float().square().sum()) for block in blocks))
    return not math.isfinite(norm) or math.isclose(
        norm, statistics.l2 or 0.0, rel_tol=_STATISTICS_TOLERANCE, abs_tol=1e-30
    )
