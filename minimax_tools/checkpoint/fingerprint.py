"""Digests that tell models apart without reading all of their weights.

M2, M2.1 and M2.5 share config and tensor names, so values decide. Norms, router gate and bias are digested: an FP8
copy stores them unquantised too.

Digest of a checkpoint's bytes: a few from every tensor, so that no changed tensor goes unnoticed, nor all are read.

`ModelFingerprint` tells models apart, by values that their FP8 and BF16 copies share. What is kept of a model's own
results needs more: a tensor that was trained on, converted or exchanged makes other results.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
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
    layer_prefix,
)

# Bytes read at the beginning, in the middle and at the end of each tensor; smaller tensors are read whole.
_BLOCK_BYTES = 4096


def digest_content(index: TensorIndex) -> str:
    """Compute sha256 over names, dtypes, shapes and some bytes of all tensors of a checkpoint.

    Raises:
        CheckpointError: A shard cannot be read.
    """
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


FINGERPRINTED_NAMES = (INPUT_NORM, POST_NORM, Q_NORM, K_NORM, GATE, CORRECTION_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """sha256 digests of a model's config, of tensors' names and shapes, and of some values of each layer.

    Parts that one side lacks are not compared: a folder with some layers of a model agrees with the whole model.
    """

    spec_digest: str  # of the quantities in config.json, number of layers included
    # Of names and shapes of the tensors outside all layers; None if the folder lacks some.
    tensors_digest: str | None
    layers: Mapping[int, str]  # of the values of each layer's norms, router gate and bias
    layer_tensors: Mapping[int, str] = field(default_factory=dict)  # of names and shapes of their tensors

    @classmethod
    def of(cls, reader: CheckpointReader, spec: ModelSpec, layers: Span | range) -> ModelFingerprint:
        """Compute the fingerprint of some layers of a checkpoint.

        Other layers are left out: shards with these alone do not change it.

        Raises:
            CheckpointError: A layer's norms, router gate or bias cannot be read.
        """
        shape_digests = {layer: reader.index.digest(layer) for layer in layers}
        return cls(
            spec_digest=spec.digest(),
            tensors_digest=reader.index.digest(None),
            layers=MappingProxyType({layer: _digest_values(reader, layer) for layer in layers}),
            layer_tensors=MappingProxyType(
                {layer: digest for layer, digest in shape_digests.items() if digest is not None}
            ),
        )

    def differences(self, other: ModelFingerprint) -> list[str]:
        """Return one sentence for each difference between the models, in the parts that both have."""
        sentences = []
        if self.spec_digest != other.spec_digest:
            sentences.append(f"config.json differs ({_format_pair(self.spec_digest, other.spec_digest)})")
        digest, other_digest = self.tensors_digest, other.tensors_digest
        if digest is not None and other_digest is not None and digest != other_digest:
            pair = _format_pair(digest, other_digest)
            sentences.append(f"tensor names or shapes outside the layers differ ({pair})")
        sentences += _layer_differences(
            self.layer_tensors, other.layer_tensors, "has other tensor names or shapes"
        )
        return sentences + _layer_differences(
            self.layers, other.layers, "has other norms, router gate or bias"
        )


def _digest_values(reader: CheckpointReader, layer: int) -> str:
    digest = hashlib.sha256()
    for name in FINGERPRINTED_NAMES:
        # float32 holds BF16 exactly: copies in either dtype give the same bytes.
        values = reader.read_weight(layer_prefix(layer) + name, torch.float32)
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _layer_differences(digests: Mapping[int, str], others: Mapping[int, str], predicate: str) -> list[str]:
    """Return one sentence for each layer that both have with different digests; `predicate` says what differs."""
    return [
        f"layer {layer} {predicate} ({_format_pair(digests[layer], others[layer])})"
        for layer in sorted(digests.keys() & others.keys())
        if digests[layer] != others[layer]
    ]


def _format_pair(digest: str, other: str) -> str:
    return f"sha256 {digest[:8]} against {other[:8]}"
