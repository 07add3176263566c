"""Bench of `bench_loading.py`: writes checkpoints into a scratch folder, and runs probes on them.

A probe is one measurement in a process of its own: one of the functions named below, called by `loading/probe.py`. Its
seconds begin after its imports, and its memory counts above the memory held then, the baseline.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import psutil
import torch
from page_cache import CacheState
from peaks import tree_bytes, watch

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.model.weight_names import layer_of
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from minimax_tools.synthetic.checkpoint import FP8, plan_tensors, synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

COULD_NOT_RUN = 3  # exit code
_SCRIPTS = Path(__file__).parents[1]
# Most runs of a probe: it is run again if the page cache did not stay as prepared.
_ATTEMPTS = 4
# Memory that a process needs beside the weights while a model loads.
_SPARE_BYTES = 2_000_000_000

# The probes, as MODULE:FUNCTION.
RUN_COMMAND = "loading.goldens:run_command"
FORWARD_STREAMED = "loading.goldens:forward_streamed"
FORWARD_OFFLOADED = "loading.rivals:forward_offloaded"
LOAD_WHOLE = "loading.rivals:load_whole"
READ_PLAINLY = "loading.reads:read_plainly"
LOAD_LAYERS = "loading.reads:load_layers"
DEQUANTISE = "loading.reads:dequantise_experts"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingScale:
    """Sizes of a measurement."""

    model: SyntheticModel  # the model that is loaded, streamed and offloaded
    large: SyntheticModel  # a model of few large layers, for packed experts
    shard_bytes: int  # largest size of a BF16 shard; FP8 shards have half of it
    expert: tuple[int, int, int]  # experts that are dequantised: their number, intermediate and hidden size
    rounds: int  # number of times that each ratio is measured


SCALES: Mapping[str, LoadingScale] = {
    # 5.05 GB in BF16: 16 layers of 307 MB.
    "full": LoadingScale(
        model=SyntheticModel(
            num_hidden_layers=16,
            hidden_size=1024,
            num_attention_heads=16,
            num_key_value_heads=4,
            head_dim=64,
            rotary_dim=32,
            num_local_experts=64,
            num_experts_per_tok=8,
            intermediate_size=768,
            vocab_size=32000,
        ),
        # Two of MiniMax-M2's own layers, 3.7 GB each in FP8, between its embedding and its head.
        large=replace(SyntheticModel.m2(), num_hidden_layers=2),
        shard_bytes=900_000_000,
        expert=(64, 1536, 3072),
        rounds=3,
    ),
    "toy": LoadingScale(
        model=SyntheticModel(num_local_experts=16, num_experts_per_tok=2),
        large=SyntheticModel(num_hidden_layers=2),
        shard_bytes=4_000_000,
        expert=(2, 256, 256),
        rounds=1,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeResult:
    """Result of a probe."""

    seconds: float  # seconds after the imports
    peak_bytes: int  # peak of anonymous memory above the baseline
    peak_resident_bytes: int  # peak of resident memory above the baseline, mapped files included
    rchar: int  # bytes that were read from files, the kernel's count of this name
    disk_bytes: int  # bytes that came from a disk
    extra_disk_bytes: int  # peak of the scratch folder's growth, without captures and import files
    values: Mapping[str, Any]  # numbers and digests by name, from the probe's function


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint and its sizes."""

    folder: Path
    shards: tuple[Path, ...]
    stored_bytes: int  # stored size of all tensors
    num_layers: int
    layer_bytes: int  # stored size of the tensors of layer 0
    whole_bytes: int  # memory of a process that loads all tensors in BF16

    @classmethod
    def of(cls, folder: Path) -> Checkpoint:
        """Open a checkpoint, whose headers are read."""
        entries = tuple(TensorIndex.from_folder(folder).entries.values())
        return cls(
            folder=folder,
            shards=tuple(sorted({entry.file for entry in entries})),
            stored_bytes=sum(entry.size_bytes for entry in entries),
            num_layers=len({layer_of(entry.name) for entry in entries} - {None}),
            layer_bytes=sum(entry.size_bytes for entry in entries if layer_of(entry.name) == 0),
            whole_bytes=sum(_bf16_bytes(entry) for entry in entries) + _SPARE_BYTES,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingBench:
    """Checkpoints in a scratch folder, and probes on them."""

    scratch: Path
    scale: LoadingScale
    seq_lens: tuple[int, ...]  # () for mm2's default rows

    @contextmanager
    def checkpoint(
        self, name: str, *, dtype: torch.dtype, model: SyntheticModel | None = None
    ) -> Iterator[Checkpoint]:
        """Write a synthetic checkpoint, of the scale's model or another, and delete it when the block ends."""
        folder = self.scratch / name
        shard_bytes = self.scale.shard_bytes // (2 if dtype == FP8 else 1)  # as many shards as in BF16
        say(f"writing {name}")
        synthesize(folder, model=model or self.scale.model, dtype=dtype, shard_size_bytes=shard_bytes, seed=0)
        try:
            yield Checkpoint.of(folder)
        finally:
            shutil.rmtree(folder)

    @contextmanager
    def folder(self, name: str) -> Iterator[Path]:
        """Make a folder, and delete it when the block ends."""
        path = self.scratch / name
        path.mkdir()
        try:
            yield path
        finally:
            shutil.rmtree(path)

    def golden(
        self,
        checkpoint: Checkpoint,
        capture: Path,
        *options: str,
        cache: CacheState = CacheState.ANY,
        idle: bool = False,
        command: tuple[str, ...] = ("extract-all",),
    ) -> ProbeResult:
        """Make a golden in the directory `capture` by a command of `mm2-gpu`, with its defaults except for `options`.

        With `idle` it leaves out most of the reading, so that the rest of the work is measured; see `IdleReader`.
        """
        words = [*command, "--model", str(checkpoint.folder), "--output-dir", str(capture), "--overwrite"]
        words += ["--seq-len", ",".join(map(str, self.seq_lens))] if self.seq_lens else []
        words += ["--quiet", *options]
        return self.probe(
            RUN_COMMAND,
            cache=cache,
            checkpoint=checkpoint,
            # The option `--stream off` loads the whole model.
            needs_bytes=checkpoint.whole_bytes if "off" in options else 0,
            words=words,
            idle=idle,
        )

    def probe(
        self,
        place: str,
        *,
        cache: CacheState = CacheState.ANY,
        checkpoint: Checkpoint | None = None,
        needs_bytes: int = 0,
        **arguments: Any,
    ) -> ProbeResult:
        """Call a function in a process of its own.

        Args:
            place: The function, as `loading.goldens:run_command`.
            cache: State of the page cache at the beginning; if it did not last, the probe runs again.
            checkpoint: The checkpoint whose files `cache` is about; None if the state does not matter.
            needs_bytes: Memory that must be free; with less, the benchmark ends.
            arguments: Arguments of the function.
        """
        require_memory(needs_bytes, place)
        for _ in range(_ATTEMPTS):
            if checkpoint is not None:
                cache.prepare(checkpoint.shards)
            measured = self._run(place, arguments)
            if checkpoint is None or cache.fits(measured.disk_bytes, checkpoint.stored_bytes):
                break
            say(f"  the page cache did not stay {cache.value}: once more")
        else:
            stop(f"the page cache does not stay {cache.value}: free some memory, or use a folder on a disk")
        return measured

    def _run(self, place: str, arguments: Mapping[str, Any]) -> ProbeResult:
        report = self.scratch / "reports" / "report.json"
        report.parent.mkdir(exist_ok=True)
        report.unlink(missing_ok=True)
        words = [sys.executable, "-m", "loading.probe", place, json.dumps(arguments), str(report)]
        environment, before_bytes = self._environment(), self._scratch_bytes()
        watched = watch(words, environment=environment, gauges={"scratch": self._scratch_bytes})
        if watched.exit_code != 0 or not report.exists():
            stop(f"{place} ended with {watched.exit_code}: {json.dumps(arguments)}")
        record = json.loads(report.read_text(encoding="utf-8"))
        measured = ProbeResult(
            seconds=record["seconds"],
            peak_bytes=watched.peak_anonymous_bytes - record["baseline_bytes"],
            peak_resident_bytes=watched.peak_resident_bytes - record["baseline_resident_bytes"],
            rchar=record["io"]["rchar"],
            disk_bytes=record["io"]["read_bytes"],
            extra_disk_bytes=watched.peaks["scratch"] - before_bytes - record["temporary_bytes"],
            values=record["values"],
        )
        say(f"{place} {dict(arguments)}: {measured}")
        if record["late_imports"]:
            say(f"  imported late: {' '.join(record['late_imports'])}")
        return measured

    def _scratch_bytes(self) -> int:
        """Measure the scratch folder without captures and reports, in bytes."""
        return tree_bytes(self.scratch, without=(self.scratch / "captures", self.scratch / "reports"))

    def _environment(self) -> dict[str, str]:
        temporary = self.scratch / "tmp"
        temporary.mkdir(exist_ok=True)
        # Temporary files of a probe count as disk space that it wrote: they must lie in the scratch folder.
        return {
            "PJRT_DEVICE": "CPU",
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, (str(_SCRIPTS), os.environ.get("PYTHONPATH")))),
            "TMPDIR": str(temporary),
            "HF_HOME": str(temporary),
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_VERBOSITY": "error",
        }


def bf16_layer_bytes(model: SyntheticModel) -> int:
    """Compute the size of a layer's weights in BF16."""
    plan = plan_tensors(model, dtype=torch.bfloat16)
    return sum(tensor.size_bytes for tensor in plan if layer_of(tensor.name) == 0)


def require_memory(num_bytes: int, purpose: str) -> None:
    """End the benchmark if a run needs more than the free memory."""
    available = psutil.virtual_memory().available
    if available < num_bytes:
        stop(f"{purpose} needs {num_bytes / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free")


def stop(message: str) -> NoReturn:
    """End the benchmark with the exit code of one that could not run."""
    say(f"Error: {message}")
    sys.exit(COULD_NOT_RUN)


def say(message: str) -> None:
    """Print progress to stderr."""
    print(message, file=sys.stderr, flush=True)


def _bf16_bytes(entry: TensorEntry) -> int:
    return entry.size_bytes * 2 if entry.dtype == FLOAT8_E4M3FN else entry.size_bytes
