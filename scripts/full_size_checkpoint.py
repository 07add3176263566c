"""Make a checkpoint with all 62 layers of MiniMax-M2's true dimensions: 230 GB that take 17.5 GB of disk.

A few distinct layers are synthesized as by `mm2-split synthesize`. Each other layer clones the FP8 codes of one
distinct layer, which XFS and btrfs can do. Its norms, router gate, correction bias and FP8 scales are its own: a value
is a code times a scale, so no two layers are equal, and the residual stream grows as in a true checkpoint. Readers see
an ordinary checkpoint in the hub's layout, of 187 shards.

| shards | hold | on disk |
|---|---|---|
| the first | embedding, final norm, lm_head | written |
| one per layer | small tensors: norms, router gate, correction bias, FP8 scales | written |
| some per layer | FP8 codes of attention and experts | written for distinct layers, cloned for the others |

Without a disk that has reflinks, root makes one in a file. Direct I/O keeps clones out of the cache below it:

    truncate -s 24G m2.img && mkfs.xfs -q -m reflink=1 m2.img && mkdir m2disk
    mount $(losetup --find --show --direct-io=on m2.img) m2disk

Example: python scripts/full_size_checkpoint.py --output m2disk/m2
"""

from __future__ import annotations

import argparse
import errno
import json
import math
import shutil
import struct
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import encode_header
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.errors import CannotRunError, Mm2Error, UsageError
from minimax_tools.model.weight_names import layer_of
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from minimax_tools.synthetic.checkpoint import FP8, plan_tensors, write_tensor
from minimax_tools.synthetic.random_weights import SyntheticWeights
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import write_tokenizer

# Clones begin and end on a multiple of this, in both files.
BLOCK_BYTES = 4096
_FICLONERANGE = 0x4020940D  # linux/fs.h; Python's fcntl has a name for it since 3.13 only
_CLONE_RANGE = struct.Struct("=qQQQ")  # source's descriptor, its offset, the size, the target's offset
# Error numbers of a file system without reflinks.
_NO_REFLINKS = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS)

# Two shards for the codes of a true-size layer, each about as large as the hub's.
_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """A shard to write, or to clone from `source`: a shard that differs only in the names of its tensors."""

    file_name: str
    tensors: tuple[TensorSize, ...]
    source: PlannedShard | None = None

    @property
    def data_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def written_bytes(self) -> int:
        """Bytes of the data that take disk space."""
        return self.data_bytes if self.source is None else 0


def plan_shards(model: SyntheticModel, *, num_distinct_layers: int) -> tuple[PlannedShard, ...]:
    """Plan the shards of an FP8 checkpoint, each shard behind the one that it clones.

    Layer n takes the codes of layer `n % num_distinct_layers`.

    Raises:
        ValueError: The number of distinct layers is below 1, or above that of all layers.
    """
    if not 1 <= num_distinct_layers <= model.num_hidden_layers:
        raise ValueError(f"{num_distinct_layers} distinct layers of {model.num_hidden_layers}")
    groups = _group_tensors(plan_tensors(model, dtype=FP8))
    files = {key: f"model-{number:05}-of-{len(groups):05}.safetensors" for number, key in enumerate(groups)}
    shards: dict[_ShardKey, PlannedShard] = {}
    for key, tensors in groups.items():
        is_clone = key.part > 0 and key.layer >= num_distinct_layers
        source = shards[_ShardKey(key.layer % num_distinct_layers, key.part)] if is_clone else None
        shards[key] = PlannedShard(file_name=files[key], tensors=tuple(tensors), source=source)
    return tuple(shards.values())


def write_shards(folder: Path, shards: Sequence[PlannedShard], weights: SyntheticWeights) -> None:
    """Write the shards into the folder in their order, one tensor in memory at a time.

    Raises:
        CannotRunError: The folder's file system has no reflinks.
    """
    for shard in shards:
        # The header ends on a block boundary: a clone begins there.
        header = encode_header(shard.tensors, alignment=BLOCK_BYTES)
        with (folder / shard.file_name).open("wb") as file:
            file.write(header)
            if shard.source is None:
                for tensor in shard.tensors:
                    write_tensor(file, tensor, weights)
        if shard.source is not None:
            clone_range(
                folder / shard.source.file_name,
                folder / shard.file_name,
                source_offset=len(encode_header(shard.source.tensors, alignment=BLOCK_BYTES)),
                target_offset=len(header),
                size_bytes=shard.data_bytes,
            )
        origin = "written" if shard.source is None else f"cloned from {shard.source.file_name}"
        print(f"{shard.file_name}: {shard.data_bytes} bytes {origin}", file=sys.stderr)


class _ShardKey(NamedTuple):
    """A shard's place in the order of shards."""

    layer: int  # -1 for tensors outside the layers
    part: int  # 0 for tensors that are never cloned, then 1, 2, … for FP8 codes


def _group_tensors(tensors: Sequence[TensorSize]) -> dict[_ShardKey, list[TensorSize]]:
    """Return the tensors of each shard, in the order of shards."""
    groups: dict[_ShardKey, list[TensorSize]] = {}
    filled_bytes: dict[int, int] = {}
    for tensor in tensors:
        layer = layer_of(tensor.name)
        if layer is None:
            key = _ShardKey(-1, 0)
        elif tensor.dtype != FLOAT8_E4M3FN:
            key = _ShardKey(layer, 0)
        else:
            filled_bytes[layer] = filled_bytes.get(layer, 0) + tensor.size_bytes
            # Rounded up: the tensor that fills a shard still belongs to it.
            key = _ShardKey(layer, math.ceil(filled_bytes[layer] / _SHARD_BYTES))
        groups.setdefault(key, []).append(tensor)
    return dict(sorted(groups.items()))


def clone_range(
    source: Path, target: Path, *, source_offset: int, target_offset: int, size_bytes: int
) -> None:
    """Let `target` share bytes of `source`, and grow as needed; both files lie on one file system.

    Offsets and size are multiples of `BLOCK_BYTES`.

    Raises:
        CannotRunError: The file system has no reflinks.
    """
    if size_bytes == 0:
        return  # to the kernel a size of 0 means: up to the end
    import fcntl  # not at the top: other systems than Linux may lack it

    with source.open("rb") as source_file, target.open("rb+") as target_file:
        request = _CLONE_RANGE.pack(source_file.fileno(), source_offset, size_bytes, target_offset)
        try:
            fcntl.ioctl(target_file.fileno(), _FICLONERANGE, request)
        except OSError as error:
            if error.errno not in _NO_REFLINKS:
                raise
            raise CannotRunError(
                f"{target} cannot share data of {source}",
                expected="a file system with reflinks: XFS or btrfs",
                found=str(error),
                next_step="Name an --output there; --help says how root makes one.",
            ) from error


def main() -> int:
    """Make the checkpoint, and print its sizes; return 3 if this machine cannot, 2 for wrong usage, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="new folder, on XFS or btrfs")
    parser.add_argument("--num-hidden-layers", type=int, default=62, help="layers (default: %(default)s)")
    parser.add_argument("--distinct-layers", type=int, default=4, help="layers with codes of their own")
    parser.add_argument("--seed", type=int, default=0, help="seed of every number (default: %(default)s)")
    arguments = parser.parse_args()
    model = replace(SyntheticModel.m2(), num_hidden_layers=arguments.num_hidden_layers)
    try:
        make_checkpoint(
            arguments.output, model, num_distinct_layers=arguments.distinct_layers, seed=arguments.seed
        )
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def make_checkpoint(output: Path, model: SyntheticModel, *, num_distinct_layers: int, seed: int) -> None:
    """Write the checkpoint into a new folder; a failed run leaves nothing.

    Raises:
        UsageError: The folder exists.
        CannotRunError: Its file system has no reflinks, or too little room.
    """
    if output.exists():
        raise UsageError(f"{output} exists", expected="a new folder", next_step="Name another --output.")
    began_s = time.monotonic()
    shards = plan_shards(model, num_distinct_layers=num_distinct_layers)
    written_bytes, all_bytes = (
        sum(getattr(shard, size) for shard in shards) for size in ("written_bytes", "data_bytes")
    )
    output.parent.mkdir(parents=True, exist_ok=True)
    free_bytes = shutil.disk_usage(output.parent).free
    if free_bytes < written_bytes:
        raise CannotRunError(
            f"too little disk at {output.parent}",
            expected=f"{written_bytes} bytes free",
            found=f"{free_bytes}",
        )
    partial = output.with_name(f".{output.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        partial.mkdir()
        token_ids = write_tokenizer(partial, vocab_size=model.vocab_size)
        weight_map = {tensor.name: shard.file_name for shard in shards for tensor in shard.tensors}
        index = {"metadata": {"total_size": all_bytes}, "weight_map": weight_map}
        for name, value in (
            ("config.json", model.config(dtype=FP8, token_ids=token_ids)),
            (INDEX_FILE, index),
        ):
            (partial / name).write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
        write_shards(partial, shards, SyntheticWeights(model.spec(), seed=seed))
        # This checks each header against the index.
        TensorIndex.from_folder(partial)
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    print(
        f"{output}: {model.num_hidden_layers} layers, {num_distinct_layers} of them distinct, "
        f"{all_bytes / 1e9:.1f} GB on {written_bytes / 1e9:.1f} GB of disk, {time.monotonic() - began_s:.0f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
