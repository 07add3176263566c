"""Module paths of a model: embeddings, decoder layers, final norm and head.

Paths are compared segment by segment: `model.layers.1` does not contain `model.layers.10`. Modules that merely resemble
decoder layers (`visual.blocks.0`, `encoder.layers.0`, `mtp.layers.0`) are none.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minimax_tools.errors import UsageError

# int() would read digits of other scripts too; no checkpoint uses them.
_NUMBER = re.compile("0|[1-9][0-9]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """The module paths of one architecture; a tensor under any path of a field counts.

    Args:
        model_type: Name in config.json.
        layers: Paths of the list of decoder layers, without the number.
        token_embeddings: Paths of the token embedding; an absent lm_head is tied to it.
        other_embeddings: Paths of what is added to it before the first layer, such as learned positions.
        final_norms: Paths of the norm after the last layer.
        lm_heads: Paths of the projection to logits.
        num_layers: Number of decoder layers, if known. Some checkpoints store modules that predict further tokens
            as layers after the last one.

    Raises:
        ValueError: A role has no path, or `num_layers` is no positive number.
    """

    model_type: str
    layers: tuple[str, ...]
    token_embeddings: tuple[str, ...]
    other_embeddings: tuple[str, ...] = ()
    final_norms: tuple[str, ...]
    lm_heads: tuple[str, ...]
    num_layers: int | None = None

    def __post_init__(self) -> None:
        for role in (self.layers, self.token_embeddings, self.final_norms, self.lm_heads):
            if not role or not all(role):
                raise ValueError(f"architecture {self.model_type} lacks a path: {self}")
        if self.num_layers is not None and self.num_layers < 1:
            raise ValueError(f"num_layers is {self.num_layers}, expected at least 1")

    @classmethod
    def of(cls, model_type: str) -> Architecture:
        """Return the architecture of a `model_type` that mm2 knows.

        Raises:
            UsageError: The `model_type` is unknown; the known ones are listed.
        """
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
        for path in self.layers:
            number, dot, _ = name.removeprefix(path + ".").partition(".")
            if name.startswith(path + ".") and dot and _NUMBER.fullmatch(number):
                layer = int(number)
                return layer if self.num_layers is None or layer < self.num_layers else None
        return None


def lies_under(name: str, paths: tuple[str, ...]) -> bool:
    """Decide whether a tensor lies at or below one of `paths`."""
    return any(name == path or name.startswith(path + ".") for path in paths)


def _llama_like(model_type: str) -> Architecture:
    # Bare paths belong to a checkpoint of the base model, saved without the wrapper that has the head.
    return Architecture(
        model_type=model_type,
        layers=("model.layers", "layers"),
        token_embeddings=("model.embed_tokens", "embed_tokens"),
        final_norms=("model.norm", "norm"),
        lm_heads=("lm_head",),
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
            model_type: _llama_like(model_type)
            for model_type in ("minimax_m2", "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral")
        },
        "gpt2": _GPT2,
    }
)


class ParamMapper:
    """The parts of a model, told apart by the names of their tensors.

    `model_type` comes from config.json (see `ARCHITECTURES`); for other models it is an `Architecture`. Block scales
    and biases belong to the part of their weight. Every method raises `UsageError` for an unknown `model_type`.
    """

    @staticmethod
    def is_embedding(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor embeds token ids or positions."""
        architecture = _architecture(model_type)
        return lies_under(name, architecture.token_embeddings + architecture.other_embeddings)

    @staticmethod
    def is_token_embedding(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor embeds token ids; a tied lm_head is the same matrix."""
        return lies_under(name, _architecture(model_type).token_embeddings)

    @staticmethod
    def get_layer_number(name: str, model_type: str | Architecture) -> int | None:
        """Return the decoder layer that a tensor belongs to; None if it belongs to none."""
        return _architecture(model_type).layer_of(name)

    @staticmethod
    def is_final_norm(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor belongs to the norm after the last layer."""
        return lies_under(name, _architecture(model_type).final_norms)

    @staticmethod
    def is_lm_head(name: str, model_type: str | Architecture) -> bool:
        """Decide whether a tensor belongs to the projection to logits; if none does, the head is tied."""
        return lies_under(name, _architecture(model_type).lm_heads)


def _architecture(model_type: str | Architecture) -> Architecture:
    return model_type if isinstance(model_type, Architecture) else Architecture.of(model_type)
