"""Golden weights: a layer's weights, for what captures alone cannot tell."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from minimax_tools.capture.source import CaptureSource
from minimax_tools.checkpoint.fingerprint import ModelFingerprint
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.command_line.options import DTYPES
from minimax_tools.errors import CheckpointError, IncomparableError
from minimax_tools.hub.checkpoint_folder import resolve_config, resolve_model
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, head_name


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GoldenWeights:
    """Weights of one layer.

    Args:
        tensors: By the hub's relative names, in the dtype that the golden computed in. Each is read when it is asked
            for, and may be asked for by several threads.
    """

    spec: ModelSpec
    tensors: LayerTensors


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeadWeights:
    """Weights behind the last layer, in the dtype that the golden computed in.

    Args:
        norm: [H], of the final norm.
        lm_head: [vocab,H].
    """

    spec: ModelSpec
    norm: torch.Tensor
    lm_head: torch.Tensor


class WeightSource(Protocol):
    """Gives the weights that a golden computed with, layer by layer."""

    def open_head(self, reference: CaptureSource) -> AbstractContextManager[HeadWeights]:
        """Open the weights behind the last layer.

        Raises:
            CheckpointError: They cannot be read.
        """

    def open_layer(self, layer: int, reference: CaptureSource) -> AbstractContextManager[GoldenWeights]:
        """Open a layer's weights.

        Raises:
            IncomparableError: They are not those of the golden `reference`.
            CheckpointError: They cannot be read.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointWeights:
    """The weights of a checkpoint; of a hub's model the shards of the layers asked for are fetched.

    The headers of a checkpoint that is whole are read once.

    Args:
        model: A folder, or a hub's id.
    """

    model: str
    _whole: dict[Path, TensorIndex] = field(default_factory=dict, init=False, repr=False, compare=False)

    @contextmanager
    def open_layer(self, layer: int, reference: CaptureSource) -> Iterator[GoldenWeights]:
        """Open a layer's weights (see `WeightSource`)."""
        layers = range(layer, layer + 1)
        folder = resolve_model(self.model, layers=layers)
        spec = ModelSpec.from_folder(folder)
        with self._open(folder, layers) as reader:
            tensors = LayerTensors.open(reader, spec, layer, _computed_dtype(reference))
            refuse_other_model(reference, ModelFingerprint.of(reader, spec, layers), self.model)
            yield GoldenWeights(spec=spec, tensors=tensors)

    @contextmanager
    def open_head(self, reference: CaptureSource) -> Iterator[HeadWeights]:
        """Open the weights behind the last layer (see `WeightSource`)."""
        spec = ModelSpec.from_folder(resolve_config(self.model))
        last = spec.num_hidden_layers - 1
        folder = resolve_model(self.model, layers=range(last, last + 1))
        with self._open(folder, range(last, last + 1)) as reader:
            dtype = _computed_dtype(reference)
            yield HeadWeights(
                spec=spec,
                norm=reader.read_weight(FINAL_NORM, dtype),
                lm_head=reader.read_weight(head_name(spec), dtype),
            )

    def _open(self, folder: Path, layers: range) -> CheckpointReader:
        reader = CheckpointReader(folder, index=self._whole.get(folder), layers=layers)
        if not reader.index.absent:
            self._whole[folder] = reader.index
        return reader


@contextmanager
def keep_layer_open(source: WeightSource | None) -> Iterator[WeightSource | None]:
    """Give a source that keeps the layer open which was asked for last: several parts of a judgement ask for it."""
    with ExitStack() as stack:
        yield None if source is None else _Kept(source, stack)


class _Kept:
    """A source whose last layer stays open; no two are open at once."""

    def __init__(self, source: WeightSource, stack: ExitStack) -> None:
        self._source = source
        self._stack = stack
        self._key: tuple[int, Path] | None = None
        self._weights: GoldenWeights | None = None

    def open_head(self, reference: CaptureSource) -> AbstractContextManager[HeadWeights]:
        return self._source.open_head(reference)

    @contextmanager
    def open_layer(self, layer: int, reference: CaptureSource) -> Iterator[GoldenWeights]:
        key = (layer, reference.directory)
        if self._weights is None or key != self._key:
            self._weights = None
            self._stack.close()
            self._weights = self._stack.enter_context(self._source.open_layer(layer, reference))
            self._key = key
        yield self._weights


def _computed_dtype(reference: CaptureSource) -> torch.dtype:
    description = reference.known_description
    return DTYPES[description.provenance.dtypes["weights"] if description else "bfloat16"]


def find_weights(
    model: str | None, reference: CaptureSource, target: CaptureSource
) -> CheckpointWeights | None:
    """Find the weights of the named checkpoint, else of the one that either capture was made from.

    Args:
        model: As `--model` names it; None to look for the captures' own, which may not be on this machine.
        reference: The golden.
        target: The device run.

    Returns:
        None where no checkpoint was named, and neither capture's own is here and still the golden's.
    """
    if model is not None:
        return CheckpointWeights(model=model)
    for source in (reference, target):
        description = source.known_description
        if description is None or not (Path(description.provenance.model_source) / "config.json").is_file():
            continue
        found = CheckpointWeights(model=description.provenance.model_source)
        try:
            with found.open_layer(min(target.layers, default=0), reference):
                return found
        except (IncomparableError, CheckpointError):
            # What lies there today is no longer what the golden was made of.
            continue
    return None


def refuse_other_model(golden: CaptureSource, found: ModelFingerprint, model: str) -> None:
    """Refuse a checkpoint that the golden was not made of; one that does not say what it was made of may be of any.

    Args:
        golden: The golden.
        found: Of the checkpoint, or of some of its layers.
        model: The checkpoint, as it was given.

    Raises:
        IncomparableError: They differ.
    """
    description = golden.known_description
    if description is None:
        return
    differences = description.provenance.model.differences(found)
    if differences:
        raise IncomparableError(
            f"the golden {golden.directory} is not of the checkpoint {model}",
            found="; ".join(differences),
            next_step=f"Give --model the checkpoint that it was made of, {description.provenance.model_source} "
            "(FP8 and BF16 copies agree).",
        )
