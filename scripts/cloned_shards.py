"""Shards of a checkpoint whose first layers, the distinct ones, lend their FP8 codes to all other layers.

| shards | hold | on disk |
|---|---|---|
| the first | embedding, final norm, lm_head | written |
| one per layer | small tensors: norms, router gate, correction bias, FP8 scales | written |
| some per layer | FP8 codes of attention and experts | written for distinct layers, cloned for the others |

A clone is a file that shares its source's data on disk. No two layers are equal: a value of an FP8 matrix is a code
times a scale, and only codes repeat. The scales also hold the magnitude of a layer. So the residual stream grows as in
a checkpoint without clones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from reflinks import BLOCK_BYTES, clone_range

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import encode_header
from minimax_tools.model.weight_names import layer_of
from minimax_tools.stored_dtype import FLOAT8_E4M3FN, StoredDtype
from minimax_tools.synthetic.checkpoint import FP8, plan_tensors, write_tensor
from minimax_tools.synthetic.random_weights import SyntheticWeights
from minimax_tools.synthetic.toy_model import SyntheticModel

_log = logging.getLogger(__name__)

# Two shards for the codes of a true-size layer, each about as large as the hub's.
_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """A shard to write, or to clone from `source`: a shard that differs only in the names of its tensors.

    Raises:
        ValueError: `source` holds other shapes or dtypes, or the data do not fill whole blocks.
    """

    file_name: str
    tensors: tuple[TensorSize, ...]
    source: PlannedShard | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            return
        if self._shapes_and_dtypes != self.source._shapes_and_dtypes:
            raise ValueError(f"{self.file_name} differs from {self.source.file_name} in shapes or dtypes")
        if self.data_bytes % BLOCK_BYTES:
            raise ValueError(
                f"{self.file_name} holds {self.data_bytes} bytes: blocks of {BLOCK_BYTES} are cloned"
            )

    @property
    def data_bytes(self) -> int:
        """Size of the tensors in bytes."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def written_bytes(self) -> int:
        """Bytes of the data that take disk space."""
        return self.data_bytes if self.source is None else 0

    @property
    def _shapes_and_dtypes(self) -> list[tuple[tuple[int, ...], StoredDtype]]:
        return [(tensor.shape, tensor.dtype) for tensor in self.tensors]


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
        _log.info("%s: %d bytes %s", shard.file_name, shard.data_bytes, origin)


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
