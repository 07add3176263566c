"""Golden weights: the weights that a golden computed with, for what captures alone cannot tell.

With them, a comparison recomputes a layer from the port's own values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, IncomparableError
from minimax_tools.hub.checkpoint_folder import is_on_hub, resolve_config, resolve_model
from minimax_tools.json_codec import decode
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, head_name
from minimax_tools.provenance import ModelFingerprint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenWeights:
    """Weights of one layer, in the dtype that the golden computed in; router gate and correction bias in float32."""

    spec: ModelSpec
    tensors: LayerTensors  # by the hub's names within a layer; each access, from any thread, reads from the checkpoint


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """Weights behind the last layer, in the dtype that the golden computed in."""

    spec: ModelSpec
    norm: torch.Tensor  # weight of the final norm, [H], H hidden
    lm_head: torch.Tensor  # weight of the head, [vocab,H]


class WeightSource(Protocol):
    """Source of the weights that a golden computed with, layer by layer."""

    def open_head(self, reference: CaptureSource) -> AbstractContextManager[HeadWeights]:
        """Open the weights behind the last layer. Raise as `open_layer` does."""

    def open_layer(self, layer: int, reference: CaptureSource) -> AbstractContextManager[GoldenWeights]:
        """Open a layer's weights.

        Raises:
            IncomparableError: They are not those of the golden `reference`.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """Source of weights in a checkpoint, whose headers are read once if it is complete.

    Of a hub's model, only the shards of the layers asked for are fetched, and those of embedding, final norm and head.
    """

    model: str  # a folder, or a hub's id
    # Index of each folder that holds all shards
    _complete: dict[Path, TensorIndex] = field(default_factory=dict, init=False, repr=False, compare=False)
    # Spec of the model, once it is read
    _specs: dict[str, ModelSpec] = field(default_factory=dict, init=False, repr=False, compare=False)

    def read_spec(self) -> ModelSpec:
        """Read config.json, once. No shard is fetched or opened.

        Raises:
            CheckpointError: There is no such model, or mm2 does not compute it.
        """
        if self.model not in self._specs:
            self._specs[self.model] = ModelSpec.from_folder(resolve_config(self.model))
        return self._specs[self.model]

    @contextmanager
    def open_layer(self, layer: int, reference: CaptureSource) -> Iterator[GoldenWeights]:
        """Open a layer's weights (see `WeightSource`)."""
        layers = range(layer, layer + 1)
        spec = self.read_spec()
        folder = resolve_model(self.model, layers=layers)
        with self._open(folder, layers) as reader:
            tensors = LayerTensors.open(reader, spec, layer, _computed_dtype(reference))
            refuse_other_model(reference, fingerprint_model(reader, spec, layers), self.model)
            yield GoldenWeights(spec=spec, tensors=tensors)

    @contextmanager
    def open_head(self, reference: CaptureSource) -> Iterator[HeadWeights]:
        """Open the weights behind the last layer (see `WeightSource`)."""
        spec = self.read_spec()
        last = spec.num_hidden_layers - 1
        layers = range(last, last + 1)
        folder = resolve_model(self.model, layers=layers)
        with self._open(folder, layers) as reader:
            dtype = _computed_dtype(reference)
            # The last layer tells whose checkpoint it is: fingerprints have no values of the head.
            refuse_other_model(reference, fingerprint_model(reader, spec, layers), self.model)
            yield HeadWeights(
                spec=spec,
                norm=reader.read_weight(FINAL_NORM, dtype),
                lm_head=reader.read_weight(head_name(spec), dtype),
            )

    def _open(self, folder: Path, layers: range) -> CheckpointReader:
        reader = CheckpointReader(folder, index=self._complete.get(folder), layers=layers)
        # `absent` are shards that were not fetched: their headers will be read once they are here.
        if not reader.index.absent:
            self._complete[folder] = reader.index
        return reader


@contextmanager
def keep_layer_open(source: WeightSource | None) -> Iterator[WeightSource | None]:
    """Yield a source that keeps its last layer open, since several steps of a judgement ask for the same layer.

    The layer is closed when another one is asked for, or the block ends. None stays None.
    """
    with ExitStack() as stack:
        yield None if source is None else _KeepingSource(source, stack)


class _KeepingSource:
    """The source that `keep_layer_open` yields; `stack` holds the open layer."""

    def __init__(self, source: WeightSource, stack: ExitStack) -> None:
        self.open_head = source.open_head
        self._source = source
        self._stack = stack
        self._open: tuple[int, Path, GoldenWeights] | None = None

    @contextmanager
    def open_layer(self, layer: int, reference: CaptureSource) -> Iterator[GoldenWeights]:
        if self._open is None or self._open[:2] != (layer, reference.directory):
            self._open = None
            self._stack.close()
            weights = self._stack.enter_context(self._source.open_layer(layer, reference))
            self._open = (layer, reference.directory, weights)
        yield self._open[2]


def _computed_dtype(reference: CaptureSource) -> torch.dtype:
    """Return the dtype that a golden computed in; for a dump, which does not say, it is BF16."""
    description = reference.known_description
    return decode(torch.dtype, description.provenance.dtypes["weights"] if description else "bfloat16")


def find_weights(
    model: str | None, reference: CaptureSource, target: CaptureSource
) -> CheckpointWeights | None:
    """Find the weights of the checkpoint `model`; without a name, of the one that either capture was made from.

    None if none was named, and neither capture's own checkpoint is on this machine and still the golden's.

    Raises:
        CheckpointError: `model` is a folder without a model that mm2 computes. The hub is not asked before weights are.
    """
    if model is not None:
        named = CheckpointWeights(model=model)
        if not is_on_hub(model):
            named.read_spec()
        return named
    for source in (reference, target):
        description = source.known_description
        if description is None or not (Path(description.provenance.model_source) / "config.json").is_file():
            continue
        weights = CheckpointWeights(model=description.provenance.model_source)
        try:
            # Opening a layer refuses another model.
            with weights.open_layer(min(target.layers, default=0), reference):
                return weights
        except (IncomparableError, CheckpointError):
            # The folder no longer holds the golden's checkpoint.
            continue
    return None


def refuse_other_model(golden: CaptureSource, found: ModelFingerprint, model: str) -> None:
    """Refuse the checkpoint `model`, with the fingerprint `found`, if the golden was made of another.

    Raises:
        IncomparableError: The fingerprints differ; a golden without one passes.
    """
    description = golden.known_description
    if description is None:
        return
    differences = description.provenance.model.differences(found)
    if differences:
        raise IncomparableError(
            f"the golden {golden.directory} is not of the checkpoint {model}",
            found="; ".join(differences),
            next_step=f"Give --model the golden's checkpoint, {description.provenance.model_source} "
            "(FP8 and BF16 copies agree).",
        )
