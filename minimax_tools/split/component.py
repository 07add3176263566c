"""Component: a part of a split model, as a choice among the tensors of a checkpoint."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import Architecture
from minimax_tools.model.param_mapper import ParamMapper

COMPONENTS = ("bottom", "trunk", "top")


@dataclass(frozen=True, slots=True, kw_only=True)
class Component:
    """What a part of a split model consists of.

    Args:
        name: bottom, trunk or top.
        layers: Its decoder layers; may be none.
        include_embedding: Whether it begins with the embeddings.
        include_final_norm: Whether it has the norm behind the last layer.
        include_lm_head: Whether it ends in the logits; a head that is not stored is the token embedding.

    Raises:
        ValueError: The name is another one, or `layers` is no ascending run of layers.
    """

    name: str
    layers: range
    include_embedding: bool = False
    include_final_norm: bool = False
    include_lm_head: bool = False

    def __post_init__(self) -> None:
        if self.name not in COMPONENTS:
            raise ValueError(f"component is {self.name!r}, expected one of {', '.join(COMPONENTS)}")
        if self.layers.step != 1 or not 0 <= self.layers.start <= self.layers.stop:
            raise ValueError(f"the layers of {self.name} are {self.layers}, expected 0 <= first <= end")

    def select(self, names: Collection[str], model_type: str | Architecture) -> frozenset[str]:
        """Those of a checkpoint's tensors that belong to the component; a weight's scales come with it.

        Raises:
            CheckpointError: Listing what the checkpoint lacks: a layer, or an embedding, norm or head.
            UsageError: `model_type` is not known.
        """
        chosen, found_layers = set(), set()
        for name in names:
            layer = ParamMapper.get_layer_number(name, model_type)
            if layer is not None and layer in self.layers:
                chosen.add(name)
                found_layers.add(layer)
        missing = [f"layer {layer}" for layer in self.layers if layer not in found_layers]
        for part, found in self._parts(names, model_type):
            chosen |= found
            if not found:
                missing.append(part)
        if missing:
            raise CheckpointError(
                f"the checkpoint lacks tensors of {self.name}",
                expected=f"layers {self.layers.start} to {self.layers.stop - 1} and what else was asked for",
                found="nothing of " + ", ".join(missing[:12]) + (", …" if len(missing) > 12 else ""),
                next_step="Check the split points against num_hidden_layers, and model_type against config.json.",
            )
        return frozenset(chosen)

    def _parts(self, names: Collection[str], model_type: str | Architecture) -> list[tuple[str, set[str]]]:
        parts = []
        if self.include_embedding:
            found = {name for name in names if ParamMapper.is_embedding(name, model_type)}
            parts.append(("the embedding", found))
        if self.include_final_norm:
            found = {name for name in names if ParamMapper.is_final_norm(name, model_type)}
            parts.append(("the final norm", found))
        if self.include_lm_head:
            found = {name for name in names if ParamMapper.is_lm_head(name, model_type)}
            tied = {name for name in names if ParamMapper.is_token_embedding(name, model_type)}
            parts.append(("lm_head, nor an embedding that it is tied to", found or tied))
        return parts
