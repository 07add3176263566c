"""The part of a model that a tensor belongs to, by the tensor's name."""

from __future__ import annotations

from minimax_tools.model.architecture import Architecture

PART_EMBEDDING, PART_NORM, PART_HEAD, PART_REST = "embedding", "final norm", "lm_head", "rest"


class ParamMapper:
    """Questions about the part of a model that a tensor belongs to.

    `model_type` is config.json's name for a family in `ARCHITECTURES`, or the `Architecture` itself. Every method
    raises `UsageError` for an unknown `model_type`. Block scales and biases belong to the part of their weight.
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
