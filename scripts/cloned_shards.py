"""Shards of a checkpoint in which most layers share the FP8 codes of a few.

| shard | holds | on disk |
|---|---|---|
| the first | embedding, final norm, lm_head | written |
| one per layer | small tensors: norms, router gate, correction bias, FP8 scales | written |
| some per layer | FP8 codes of attention and experts | written for the distinct layers, cloned for all others |

No two layers are equal: a value of an FP8 matrix is a code times a scale, and only codes repeat. The scales also
hold the magnitude of a layer, so that the residual stream grows as in a whole synthesis.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from reflinks import BLOCK_BYTES, clone_range

from minimax_tools.checkpoint.expected_tensors import TensorSize
from minimax_tools.checkpoint.header import encode_header
from minimax_tools.model.weight_names import layer_of
from minimax_tools.synthetic.checkpoint import FP8, plan_tensors, write_tensor
from minimax_tools.synthetic.random_weights import SyntheticWeights
from minimax_tools.synthetic.toy_model import SyntheticModel

_log = logging.getLogger(__name__)

# Two shards for the codes of a true-size layer, each about as large as the hub's.
_SHARD_BYTES = 2_000_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedShard:
    """A shard to write, or to clone from `source`, which differs in the names of the tensors alone.

    Raises:
        ValueError: `source` holds other shapes or dtypes, or the data do not fill whole blocks.
    """

    file_name: str
    tensors: tuple[TensorSize, ...]
    source: PlannedShard | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            return
        if _forms(self) != _forms(self.source):
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


def plan_shards(model: SyntheticModel, *, num_distinct_layers: int) -> tuple[PlannedShard, ...]:
    """Plan the shards of an FP8 checkpoint, whose layers take the codes of layer `layer % num_distinct_layers`.

    Raises:
        ValueError: There are no distinct layers, or more than layers.
    """
    if not 1 <= num_distinct_layers <= model.num_hidden_layers:
        raise ValueError(f"{num_distinct_layers} distinct layers of {model.num_hidden_layers}")
    groups = _group_tensors(plan_tensors(model, dtype=FP8))
    files = {key: f"model-{number:05}-of-{len(groups):05}.safetensors" for number, key in enumerate(groups)}
    shards: dict[_Key, PlannedShard] = {}
    for key, tensors in groups.items():
        layer, part = key
        is_clone = part > 0 and layer >= num_distinct_layers
        source = shards[layer % num_distinct_layers, part] if is_clone else None
        shards[key] = PlannedShard(file_name=files[key], tensors=tuple(tensors), source=source)
    return tuple(shards.values())


def write_shards(folder: Path, shards: Sequence[PlannedShard], weights: SyntheticWeights) -> None:
    """Write the shards into the folder, sources before clones, one tensor in memory at a time.

    Raises:
        CannotRunError: The folder's file system has no reflinks.
    """
    for shard in shards:
        # The header ends on a block boundary: a clone begins there.
        header = encode_header(shard.tensors, alignment=BLOCK_BYTES)
        with (folder / shard.file_name).open("wb") as file:
            file.write(header)
            for tensor in shard.tensors if shard.source is None else ():
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


_Key = tuple[int, int]  # layer, part: part 0 is what is never cloned


def _group_tensors(tensors: Sequence[TensorSize]) -> dict[_Key, list[TensorSize]]:
    groups: dict[_Key, list[TensorSize]] = {}
    filled_bytes: dict[int, int] = {}
    for tensor in tensors:
        layer = layer_of(tensor.name)
        if layer is None:
            key = (-1, 0)
        elif tensor.dtype != FP8:
            key = (layer, 0)
        else:
            filled_bytes[layer] = filled_bytes.get(layer, 0) + tensor.size_bytes
            key = (layer, -(-filled_bytes[layer] // _SHARD_BYTES))
        groups.setdefault(key, []).append(tensor)
    return dict(sorted(groups.items()))


def _forms(shard: PlannedShard) -> list[tuple[tuple[int, ...], torch.dtype]]:
    return [(tensor.shape, tensor.dtype) for tensor in shard.tensors]
