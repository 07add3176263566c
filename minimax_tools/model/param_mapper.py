"""ParamMapper: which part of a model a checkpoint's tensor belongs to, by its name."""

from __future__ import annotations

from minimax_tools.model.architecture import Architecture, lies_under


class ParamMapper:
    """Tells the parts of a model apart by the names of their tensors.

    `model_type` is what config.json says (see `ARCHITECTURES`), or for any other model its `Architecture`.
    Block scales and biases belong to the part that their weight belongs to. Every method raises `UsageError`
    for a `model_type` that is not known.
    """

    @staticmethod
    def is_embedding(name: str, model_type: str | Architecture) -> bool:
        """Whether the tensor is needed before the first layer: of token ids, or of positions."""
        architecture = _architecture(model_type)
        return lies_under(name, architecture.token_embeddings + architecture.other_embeddings)

    @staticmethod
    def is_token_embedding(name: str, model_type: str | Architecture) -> bool:
        """Whether the tensor embeds token ids, so that a tied lm_head is the same matrix."""
        return lies_under(name, _architecture(model_type).token_embeddings)

    @staticmethod
    def get_layer_number(name: str, model_type: str | Architecture) -> int | None:
        """The decoder layer that the tensor belongs to; None where it belongs to none."""
        return _architecture(model_type).layer_of(name)

    @staticmethod
    def is_final_norm(name: str, model_type: str | Architecture) -> bool:
        """Whether the tensor belongs to the norm behind the last layer; a layer's own norms do not."""
        return lies_under(name, _architecture(model_type).final_norms)

    @staticmethod
    def is_lm_head(name: str, model_type: str | Architecture) -> bool:
        """Whether the tensor belongs to the projection to logits; where no tensor does, the head is tied."""
        return lies_under(name, _architecture(model_type).lm_heads)


def _architecture(model_type: str | Architecture) -> Architecture:
    return model_type if isinstance(model_type, Architecture) else Architecture.of(model_type)
