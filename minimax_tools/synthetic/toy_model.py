"""The model of a synthetic checkpoint: its quantities, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.family import Family
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from minimax_tools.synthetic.toy_tokenizer import TokenIds

# Widths are multiples of 8, so that every tensor of a shard begins at a multiple of 8 bytes.
_ALIGNMENT = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticModel:
    """Quantities of a synthetic model, named as `ModelSpec` names them; UsageError if they describe none.

    The defaults are a toy of MiniMax-M2, 15 MB in FP8. Sizes that the family derives from others are not written.
    """

    num_hidden_layers: int = 4
    hidden_size: int = 256
    num_attention_heads: int = 8
    num_key_value_heads: int = 2
    head_dim: int = 64
    rotary_dim: int = 32
    num_local_experts: int = 32
    num_experts_per_tok: int = 4
    intermediate_size: int = 128
    vocab_size: int = 512
    model_type: str = "minimax_m2"

    def __post_init__(self) -> None:
        try:
            self.spec()
        except CheckpointError as error:
            raise UsageError(
                f"these quantities describe no {self.family.title}", found=error.found
            ) from error
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            if getattr(self, name) % _ALIGNMENT:
                raise UsageError(
                    f"{name} is {getattr(self, name)}",
                    expected=f"a multiple of {_ALIGNMENT}: tensors lie aligned",
                )

    @property
    def family(self) -> Family:
        """The model's family."""
        return FAMILIES[self.model_type]

    @classmethod
    def of_true_size(cls, family: Family) -> SyntheticModel:
        """Return the true dimensions of a family's model."""
        return cls(model_type=family.model_type, **family.true_sizes)

    @classmethod
    def m2(cls) -> SyntheticModel:
        """Return the true dimensions of MiniMax-M2: 230 GB in FP8."""
        return cls.of_true_size(MINIMAX_M2)

    @classmethod
    def toy(cls, family: Family) -> SyntheticModel:
        """Return a toy of a family."""
        return cls(model_type=family.model_type, **family.toy_sizes)

    def resized(self, **sizes: int) -> SyntheticModel:
        """Return the model with other sizes; UsageError for one that the family derives from others."""
        derived = self.family.derived_sizes & sizes.keys()
        if derived:
            raise UsageError(
                f"the {' and '.join(sorted(derived))} of a model of {self.family.title} cannot be chosen",
                expected="sizes that its config.json names",
                next_step="Leave it out: it follows from the other sizes.",
            )
        return SyntheticModel(**{**asdict(self), **sizes})

    def spec(self) -> ModelSpec:
        """Return the spec that config.json describes."""
        return ModelSpec.from_config(self._config())

    def config(self, *, dtype: torch.dtype, token_ids: TokenIds) -> dict[str, Any]:
        """Return the content of config.json for linear layers stored in `dtype`."""
        import torch

        # The dtype of norms and embedding; FP8 is for linear layers alone.
        other_dtype = torch.float32 if dtype == torch.float32 else torch.bfloat16
        config = {
            **self._config(),
            **asdict(token_ids),
            "torch_dtype": str(other_dtype).removeprefix("torch."),
        }
        if self.family.text_key is not None:
            outer = {key: config.pop(key) for key in ("architectures", "model_type", "torch_dtype")}
            config = {**outer, self.family.text_key: config}
        if dtype == torch.float8_e4m3fn:
            config["quantization_config"] = {
                "activation_scheme": "dynamic",
                "fmt": "float8_e4m3fn",
                "quant_method": "fp8",
                "weight_block_size": [BLOCK_SIZE, BLOCK_SIZE],
                "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
            }
        return config

    def _config(self) -> dict[str, Any]:
        family = self.family
        sizes = {name: size for name, size in asdict(self).items() if name != "model_type"}
        keys = {
            family.size_key(name): size for name, size in sizes.items() if name not in family.derived_sizes
        }
        return {
            "architectures": [f"{family.transformers_prefix}ForCausalLM"],
            "model_type": family.model_type,
            **keys,
            **family.other_keys(sizes),
        }


PRESETS: Mapping[str, SyntheticModel] = MappingProxyType(
    {
        name: model
        for family in FAMILIES.values()
        for name, model in (
            (family.toy_preset, SyntheticModel.toy(family)),
            (family.preset, SyntheticModel.of_true_size(family)),
        )
    }
)
