"""Digests of a checkpoint: one that tells models apart, and one of some bytes of every tensor.

M2, M2.1 and M2.5 share config and tensor names, so values decide. Norms, router gate and bias are digested: an FP8
copy stores them unquantised too. What is kept of a model's own results needs more: a tensor that was trained on,
converted or exchanged makes other results.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    GATE,
    INPUT_NORM,
    K_NORM,
    POST_NORM,
    Q_NORM,
    expected_layer_shapes,
    layer_prefix,
)
from minimax_tools.provenance import ModelFingerprint

# Bytes read at the beginning, in the middle and at the end of each tensor; smaller tensors are read whole.
_BLOCK_BYTES = 4096


def digest_content(index: TensorIndex) -> str:
    """Compute sha256 over names, dtypes, shapes and some bytes of all tensors; CheckpointError if one is unreadable."""
    digest = hashlib.sha256()
    by_file: dict[Path, list[str]] = {}
    for name, entry in index.entries.items():
        by_file.setdefault(entry.file, []).append(name)
    samples: dict[str, bytes] = {}
    for path, names in by_file.items():
        try:
            with path.open("rb", buffering=0) as file:
                for name in names:
                    entry = index.entries[name]
                    parts = []
                    for start, size in _blocks(entry.size_bytes):
                        file.seek(entry.offset + start)
                        parts.append(file.read(size))
                    samples[name] = b"".join(parts)
        except OSError as error:
            raise CheckpointError(
                f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
            ) from error
    for name, entry in index.entries.items():
        digest.update(f"{name} {entry.dtype} {list(entry.shape)}\n".encode())
        digest.update(samples[name])
    return digest.hexdigest()


def _blocks(size_bytes: int) -> list[tuple[int, int]]:
    """Return start and size of the blocks to read of a tensor."""
    if size_bytes <= 3 * _BLOCK_BYTES:
        return [(0, size_bytes)]
    starts = (0, (size_bytes - _BLOCK_BYTES) // 2, size_bytes - _BLOCK_BYTES)
    return [(start, _BLOCK_BYTES) for start in starts]


def fingerprinted_names(spec: ModelSpec, layer: int) -> tuple[str, ...]:
    """Return the names of a layer's tensors whose values tell models apart, relative to the layer."""
    names = (INPUT_NORM, POST_NORM, Q_NORM, K_NORM, GATE, CORRECTION_BIAS)
    shapes = expected_layer_shapes(spec, layer)
    return tuple(name for name in names if name in shapes)


def fingerprint_model(reader: CheckpointReader, spec: ModelSpec, layers: Span | range) -> ModelFingerprint:
    """Compute the fingerprint of some layers of a checkpoint.

    Other layers are left out: shards with these alone do not change it.

    Raises:
        CheckpointError: A layer's norms, router gate or bias cannot be read.
    """
    shape_digests = {layer: reader.index.digest(layer) for layer in layers}
    return ModelFingerprint(
        spec_digest=spec.digest(),
        tensors_digest=reader.index.digest(None),
        layers=MappingProxyType({layer: _digest_values(reader, spec, layer) for layer in layers}),
        layer_tensors=MappingProxyType(
            {layer: digest for layer, digest in shape_digests.items() if digest is not None}
        ),
    )


def _digest_values(reader: CheckpointReader, spec: ModelSpec, layer: int) -> str:
    digest = hashlib.sha256()
    for name in fingerprinted_names(spec, layer):
        # float32 holds BF16 exactly: copies in either dtype give the same bytes.
        values = reader.read_weight(layer_prefix(layer) + name, torch.float32)
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()
