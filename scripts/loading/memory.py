"""Figures of memory: peaks, as multiples of a layer's size. Each golden and each probe is a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from figures import Figure

from loading.bench import LOAD_WHOLE, Checkpoint, LoadingBench, bf16_layer_bytes, say
from minimax_tools.synthetic.checkpoint import FP8

# Packed experts compute eagerly. The goldens that they are held against must do so too, to be equal byte for byte.
_EAGER = ("--experts-implementation", "eager")
# A golden that holds one layer at a time.
_ALONE = ("--stream", "on", "--no-prefetch")


def measure_peaks(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    """Yield the peaks of goldens and of `from_pretrained`, and whether streamed and whole goldens are equal."""
    layer_bytes = checkpoint.layer_bytes
    with bench.folder("captures") as captures:
        alone = bench.golden(checkpoint, captures / "alone", *_ALONE)
        prefetching = bench.golden(checkpoint, captures / "prefetching", "--stream", "on", "--prefetch")
        whole = bench.golden(checkpoint, captures / "whole", "--stream", "off")
        equal = _are_equal(captures / "alone", captures / "whole")
        equal &= _are_equal(captures / "prefetching", captures / "whole")
    model = str(checkpoint.folder)
    loaded = bench.probe(LOAD_WHOLE, needs_bytes=checkpoint.whole_bytes, model=model)
    yield Figure.at_most("peak_anonymous_over_layer", alone.peak_bytes / layer_bytes, 1.25)
    yield Figure.at_most("peak_anonymous_over_layer_prefetching", prefetching.peak_bytes / layer_bytes, 2.2)
    yield Figure.plain("peak_anonymous_over_layer_golden_whole", whole.peak_bytes / layer_bytes)
    yield Figure.plain("peak_anonymous_over_layer_from_pretrained", loaded.peak_bytes / layer_bytes)
    yield Figure.plain("peak_resident_over_layer", alone.peak_resident_bytes / layer_bytes)
    yield Figure.plain("peak_resident_over_layer_from_pretrained", loaded.peak_resident_bytes / layer_bytes)
    yield Figure.plain("from_pretrained_load_s", loaded.values["load_s"])
    yield Figure.exactly("streamed_capture_equals_whole", float(equal), 1)


def measure_packed(bench: LoadingBench, checkpoint: Checkpoint) -> Iterator[Figure]:
    """Yield the peaks of goldens of small FP8 layers, and whether packed experts (left in FP8) give the same golden."""
    with bench.folder("captures") as captures:
        packed = bench.golden(checkpoint, captures / "packed", *_ALONE, "--packed-experts", *_EAGER)
        unpacked = bench.golden(checkpoint, captures / "unpacked", *_ALONE, *_EAGER)
        bench.golden(checkpoint, captures / "whole", "--stream", "off", *_EAGER)
        equal = _are_equal(captures / "packed", captures / "whole")
        equal &= _are_equal(captures / "unpacked", captures / "whole")
    yield Figure.plain(
        "peak_anonymous_packed_over_small_fp8_layer", packed.peak_bytes / checkpoint.layer_bytes
    )
    yield Figure.plain(
        "peak_anonymous_over_layer_from_fp8", unpacked.peak_bytes / bf16_layer_bytes(bench.scale.model)
    )
    yield Figure.exactly("packed_capture_equals_eager_whole", float(equal), 1)


def measure_packed_large(bench: LoadingBench) -> Iterator[Figure]:
    """Yield the peak of a golden of large packed FP8 layers; with small ones, the rest of the process would show."""
    with (
        bench.checkpoint("large", dtype=FP8, model=bench.scale.large) as checkpoint,
        bench.folder("captures") as captures,
    ):
        packed = bench.golden(checkpoint, captures / "packed", *_ALONE, "--packed-experts", *_EAGER)
    yield Figure.at_most(
        "peak_anonymous_packed_over_fp8_layer", packed.peak_bytes / checkpoint.layer_bytes, 1.15
    )


def _are_equal(capture: Path, other: Path) -> bool:
    """Decide whether two captures hold the same tensor files; manifests differ in versions and options."""
    names = {path.name for folder in (capture, other) for path in folder.glob("*.safetensors")}
    differing = [name for name in sorted(names) if _read(capture / name) != _read(other / name)]
    if differing:
        say(f"  {capture.name} and {other.name} differ in {' '.join(differing)}")
    return not differing


def _read(path: Path) -> bytes | None:
    return path.read_bytes() if path.exists() else None
