"""The model of a synthetic checkpoint: its quantities, and its config.json."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from minimax_tools.errors import CheckpointError, UsageError
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.model.spec import ModelSpec

if TYPE_CHECKING:
    import torch

    from minimax_tools.synthetic.toy_tokenizer import TokenIds

# Widths are multiples of 8, so that every tensor of a shard begins at a multiple of 8 bytes.
_ALIGNMENT = 8
# As in MiniMax-M2's config.json.
_MAX_POSITION_EMBEDDINGS = 196608


@dataclass(frozen=True, slots=True, kw_only=True)
class SyntheticModel:
    """Quantities of a synthetic MiniMax-M2, under Hugging Face's names; UsageError if they describe none.

    The defaults are a toy of 15 MB in FP8.
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

    def __post_init__(self) -> None:
        try:
            self.spec()
        except CheckpointError as error:
            raise UsageError("these quantities describe no MiniMax-M2", found=error.found) from error
        for name in ("hidden_size", "head_dim", "intermediate_size"):
            if getattr(self, name) % _ALIGNMENT:
                raise UsageError(
                    f"{name} is {getattr(self, name)}",
                    expected=f"a multiple of {_ALIGNMENT}: tensors lie aligned",
                )

    @classmethod
    def m2(cls) -> SyntheticModel:
        """Return the true dimensions of MiniMax-M2: 230 GB in FP8."""
        return cls(
            num_hidden_layers=62,
            hidden_size=3072,
            num_attention_heads=48,
            num_key_value_heads=8,
            head_dim=128,
            rotary_dim=64,
            num_local_experts=256,
            num_experts_per_tok=8,
            intermediate_size=1536,
            vocab_size=200064,
        )

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
        return {
            "architectures": ["MiniMaxM2ForCausalLM"],
            "model_type": "minimax_m2",
            **asdict(self),
            "attn_type_list": [1] * self.num_hidden_layers,
            "attention_dropout": 0.0,
            "hidden_act": "silu",
            "initializer_range": 0.02,
            "max_position_embeddings": _MAX_POSITION_EMBEDDINGS,
            "mtp_transformer_layers": 1,
            "num_mtp_modules": 3,
            "output_router_logits": False,
            "qk_norm_type": "per_layer",
            "rms_norm_eps": 1e-06,
            "rope_theta": 5000000,
            "router_aux_loss_coef": 0.001,
            "router_jitter_noise": 0.0,
            "scoring_func": "sigmoid",
            "shared_intermediate_size": 0,
            "tie_word_embeddings": False,
            "use_cache": True,
            "use_mtp": True,
            "use_qk_norm": True,
            "use_routing_bias": True,
        }


PRESETS: Mapping[str, SyntheticModel] = MappingProxyType({"toy": SyntheticModel(), "m2": SyntheticModel.m2()})
