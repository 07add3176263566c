"""Module paths of a model: embeddings, decoder layers, final norm and head; and the part that a tensor belongs to.

Paths are compared segment by segment: `model.layers.1` does not contain `model.layers.10`. Modules that merely resemble
decoder layers (`visual.blocks.0`, `encoder.layers.0`, `mtp.layers.0`) are not counted as layers.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minimax_tools.errors import UsageError
from minimax_tools.model.families import FAMILIES


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The module paths of one architecture, alternatives in each tuple; ValueError for a required role without any."""

    model_type: str  # the architecture's name in config.json
    layers: tuple[str, ...]  # the list of decoder layers, without a layer's number
    token_embeddings: tuple[str, ...]  # a checkpoint without lm_head uses this matrix as its lm_head
    other_embeddings: tuple[str, ...] = ()  # added to the token embedding, such as learned positions
    final_norms: tuple[str, ...]  # norm after the last layer
    lm_heads: tuple[str, ...]  # projection to logits
    # None if unknown. Modules that predict further tokens may be stored as layers with higher numbers; these are none.
    num_layers: int | None = None

    def __post_init__(self) -> None:
        for paths in (self.layers, self.token_embeddings, self.final_norms, self.lm_heads):
            if not paths or not all(paths):
                raise ValueError(f"architecture {self.model_type} lacks a path: {self}")
        if self.num_layers is not None and self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}, expected at least 1")

    @classmethod
    def of(cls, model_type: str) -> Architecture:
        """Return the architecture of a `model_type` of config.json; raise UsageError, which lists the known ones."""
        try:
            return ARCHITECTURES[model_type]
        except KeyError:
            raise UsageError(
                f"mm2 does not know by heart how a checkpoint of model_type {model_type!r} names its tensors",
                expected="one of " + ", ".join(ARCHITECTURES),
                found=repr(model_type),
                next_step="Give the Architecture itself; minimax_tools.split.module_tree reads it from "
                "a model's config.json where transformers knows the model.",
            ) from None

    def layer_of(self, name: str) -> int | None:
        """Return the decoder layer that a tensor or its block scales belong to; None for all other tensors."""
        match = _layer_pattern(self.layers).match(name)
        if match is None:
            return None
        layer = int(match[1])
        return layer if self.num_layers is None or layer < self.num_layers else None


@functools.cache
def _layer_pattern(paths: tuple[str, ...]) -> re.Pattern[str]:
    # \d would also match other scripts' digits.
    return re.compile(rf"(?:{'|'.join(map(re.escape, paths))})\.(0|[1-9][0-9]*)\.")


def _llama_like(model_type: str, *, prefix: str = "") -> Architecture:
    """Return the architecture of a model, or of the text model that a larger one stores under a prefix."""
    # Bare paths belong to a checkpoint of the base model, saved without the wrapper that has the head.
    trunks = (f"model.{prefix}", prefix, f"{prefix}model.") if prefix else ("model.", "")
    return Architecture(
        model_type=model_type,
        layers=tuple(f"{trunk}layers" for trunk in trunks),
        token_embeddings=tuple(f"{trunk}embed_tokens" for trunk in trunks),
        final_norms=tuple(f"{trunk}norm" for trunk in trunks),
        lm_heads=("lm_head", f"{prefix}lm_head") if prefix else ("lm_head",),
    )


_GPT2 = Architecture(
    model_type="gpt2",
    layers=("transformer.h", "h"),
    token_embeddings=("transformer.wte", "wte"),
    other_embeddings=("transformer.wpe", "wpe"),
    final_norms=("transformer.ln_f", "ln_f"),
    lm_heads=("lm_head",),
)

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        **{
            model_type: _llama_like(model_type, prefix=family.stored_names.prefix)
            for model_type, family in FAMILIES.items()
        },
        **{model_type: _llama_like(model_type) for model_type in ("llama", "qwen2", "qwen3")},
        "gpt2": _GPT2,
    }
)


PART_EMBEDDING, PART_NORM, PART_HEAD, PART_REST = "embedding", "final norm", "lm_head", "rest"


class ParamMapper:
    """Questions about the part of a model that a tensor belongs to.

    `model_type` is config.json's name for a family in `ARCHITECTURES`, or the `Architecture` itself; an unknown one is
    a UsageError. Block scales and biases belong to the part of their weight.
    """

    @staticmethod
    def is_embedding(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor embeds token ids or positions."""
        architecture = _architecture(model_type)
        return _lies_under(name, architecture.token_embeddings + architecture.other_embeddings)

    @staticmethod
    def is_token_embedding(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor embeds token ids."""
        return _lies_under(name, _architecture(model_type).token_embeddings)

    @staticmethod
    def get_layer_number(name: str, model_type: str | Architecture) -> int | None:
        """Return the decoder layer that a tensor belongs to; None for all other tensors."""
        return _architecture(model_type).layer_of(name)

    @staticmethod
    def is_final_norm(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor belongs to the norm after the last layer."""
        return _lies_under(name, _architecture(model_type).final_norms)

    @staticmethod
    def is_lm_head(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor belongs to the projection to logits."""
        return _lies_under(name, _architecture(model_type).lm_heads)


def part_of(name: str, model_type: str | Architecture) -> int | str:
    """Return the part that a tensor belongs to: a layer's number, or one of the `PART_` names.

    `PART_REST` is everything else, such as modules that predict further tokens.
    """
    layer = ParamMapper.get_layer_number(name, model_type)
    if layer is not None:
        return layer
    if ParamMapper.is_embedding(name, model_type):
        return PART_EMBEDDING
    if ParamMapper.is_final_norm(name, model_type):
        return PART_NORM
    return PART_HEAD if ParamMapper.is_lm_head(name, model_type) else PART_REST


def _architecture(model_type: str | Architecture) -> Architecture:
    return model_type if isinstance(model_type, Architecture) else Architecture.of(model_type)


def _lies_under(name: str, paths: tuple[str, ...]) -> bool:
    """Decide whether a tensor lies at or below one of `paths`."""
    return any(name == path or name.startswith(path + ".") for path in paths)
