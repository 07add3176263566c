"""ModelFingerprint: tells one model from another without reading all of it, stored as FP8 or not.

M2, M2.1 and M2.5 share config and tensor names: only values tell them apart, and norms, router gate and bias
are the few that are stored unquantised in an FP8 copy too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from minimax_tools.checkpoint.reader import CheckpointReader
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

FINGERPRINTED_NAMES = (INPUT_NORM, POST_NORM, Q_NORM, K_NORM, GATE, CORRECTION_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """sha256 digests of a model's config, of tensors' names and shapes, and of some values of each layer.

    Where one side lacks a layer, or the shards of the tensors outside all layers, that is not compared: a folder
    that holds a few layers of a model agrees with the whole one.

    Args:
        spec_digest: Of what config.json says, the number of layers among it.
        tensors_digest: Of names and shapes of the tensors outside all layers; None where the folder lacks some.
        layers: Of each layer's norms, router gate and bias.
        layer_tensors: Of names and shapes of each layer's tensors.
    """

    spec_digest: str
    tensors_digest: str | None
    layers: Mapping[int, str]
    layer_tensors: Mapping[int, str] = field(default_factory=dict)

    @classmethod
    def of(cls, reader: CheckpointReader, spec: ModelSpec, layers: Span | range) -> ModelFingerprint:
        """The fingerprint of a checkpoint with these layers.

        Other layers are left out, here or not: it stays the same when more shards are fetched.

        Raises:
            CheckpointError: A layer's norms, router gate or bias cannot be read.
        """
        shapes = {layer: reader.index.digest(layer) for layer in layers}
        return cls(
            spec_digest=spec.digest(),
            tensors_digest=reader.index.digest(None),
            layers=MappingProxyType({layer: _layer_digest(reader, layer) for layer in layers}),
            layer_tensors=MappingProxyType({layer: digest for layer, digest in shapes.items() if digest}),
        )

    def differences(self, other: ModelFingerprint) -> list[str]:
        """One sentence for each difference between the models, in what both have."""
        sentences = []
        if self.spec_digest != other.spec_digest:
            sentences.append(f"config.json differs ({_pair(self.spec_digest, other.spec_digest)})")
        mine, theirs = self.tensors_digest, other.tensors_digest
        if mine is not None and theirs is not None and mine != theirs:
            sentences.append(f"tensor names or shapes outside the layers differ ({_pair(mine, theirs)})")
        sentences += _differing(
            self.layer_tensors, other.layer_tensors, "layer {} has other tensor names or shapes"
        )
        return sentences + _differing(
            self.layers, other.layers, "layer {} has other norms, router gate or bias"
        )


def _layer_digest(reader: CheckpointReader, layer: int) -> str:
    digest = hashlib.sha256()
    for name in FINGERPRINTED_NAMES:
        # float32 holds BF16 exactly: a copy that stores a norm in the other dtype gives the same bytes.
        values = reader.read_weight(layer_prefix(layer) + name, torch.float32)
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _differing(mine: Mapping[int, str], theirs: Mapping[int, str], sentence: str) -> list[str]:
    return [
        f"{sentence.format(layer)} ({_pair(mine[layer], theirs[layer])})"
        for layer in sorted(mine.keys() & theirs.keys())
        if mine[layer] != theirs[layer]
    ]


def _pair(digest: str, other: str) -> str:
    return f"sha256 {digest[:8]} against {other[:8]}"
