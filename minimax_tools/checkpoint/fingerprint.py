"""ModelFingerprint: tells one model from another without reading all of it, stored as FP8 or not.

M2, M2.1 and M2.5 share config and tensor names: only values tell them apart, and norms, router gate and bias
are the few that are stored unquantised in an FP8 copy too.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from minimax_tools.checkpoint.names import (
    CORRECTION_BIAS,
    GATE,
    INPUT_NORM,
    K_NORM,
    POST_NORM,
    Q_NORM,
    layer_prefix,
)
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError
from minimax_tools.span import Span
from minimax_tools.spec import ModelSpec

_FINGERPRINTED_NAMES = (INPUT_NORM, POST_NORM, Q_NORM, K_NORM, GATE, CORRECTION_BIAS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFingerprint:
    """sha256 digests of a model's config, its tensors' names and shapes, and some values of each layer."""

    spec_digest: str
    tensors_digest: str
    layers: Mapping[int, str]

    @classmethod
    def of(cls, reader: CheckpointReader, spec: ModelSpec, span: Span) -> ModelFingerprint:
        """The fingerprint of a checkpoint, with the values of the layers of `span`.

        Raises:
            CheckpointError: A layer's norms, router gate or bias cannot be read.
        """
        return cls(
            spec_digest=spec.digest(),
            tensors_digest=reader.index.digest(),
            layers=MappingProxyType({layer: _layer_digest(reader, layer) for layer in span}),
        )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> ModelFingerprint:
        """The fingerprint that `as_json` gave.

        Raises:
            CaptureError: `data` is not of that form.
        """
        try:
            return cls(
                spec_digest=str(data["spec_digest"]),
                tensors_digest=str(data["tensors_digest"]),
                layers=MappingProxyType(
                    {int(layer): str(digest) for layer, digest in data["layers"].items()}
                ),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise CaptureError(
                "a model fingerprint cannot be read", found=repr(error), next_step="Make the capture again."
            ) from error

    def as_json(self) -> dict[str, Any]:
        """The fingerprint as plain JSON values; layer numbers become strings, as JSON's keys must be."""
        return {
            "spec_digest": self.spec_digest,
            "tensors_digest": self.tensors_digest,
            "layers": {str(layer): digest for layer, digest in self.layers.items()},
        }

    def differences(self, other: ModelFingerprint) -> list[str]:
        """One sentence for each difference between the models; of layers, those that both have count."""
        sentences = []
        if self.spec_digest != other.spec_digest:
            sentences.append(f"config.json differs ({_pair(self.spec_digest, other.spec_digest)})")
        if self.tensors_digest != other.tensors_digest:
            sentences.append(
                f"tensor names or shapes differ ({_pair(self.tensors_digest, other.tensors_digest)})"
            )
        return sentences + [
            f"layer {layer} has other norms, router gate or bias "
            f"({_pair(self.layers[layer], other.layers[layer])})"
            for layer in sorted(self.layers.keys() & other.layers.keys())
            if self.layers[layer] != other.layers[layer]
        ]


def _layer_digest(reader: CheckpointReader, layer: int) -> str:
    digest = hashlib.sha256()
    for name in _FINGERPRINTED_NAMES:
        # float32 holds BF16 exactly: a copy that stores a norm in the other dtype gives the same bytes.
        values = reader.read_weight(layer_prefix(layer) + name, torch.float32)
        digest.update(f"{name} {list(values.shape)}\n".encode())
        digest.update(values.numpy().data)
    return digest.hexdigest()


def _pair(digest: str, other: str) -> str:
    return f"sha256 {digest[:8]} against {other[:8]}"
