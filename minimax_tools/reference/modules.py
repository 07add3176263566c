"""transformers' own MiniMax-M2 modules, and where mm2's sites show in them.

`transformers` is imported inside the functions: this file imports on a host without it.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.capture.taps import Tap
from minimax_tools.errors import MissingExtraError, UsageError
from minimax_tools.sites import Site

if TYPE_CHECKING:
    from transformers import MiniMaxM2Config

# Relative to a decoder layer; q_rope and k_rope come through the recording attention function.
LAYER_TAPS: Mapping[Site, Tap] = MappingProxyType(
    {
        Site.INPUT: Tap(path="input_layernorm", point="input"),
        Site.INPUT_NORM: Tap(path="input_layernorm"),
        Site.Q_PROJ: Tap(path="self_attn.q_proj"),
        Site.K_PROJ: Tap(path="self_attn.k_proj"),
        Site.V_PROJ: Tap(path="self_attn.v_proj"),
        Site.Q_NORM: Tap(path="self_attn.q_norm"),
        Site.K_NORM: Tap(path="self_attn.k_norm"),
        Site.ATTN_CONTEXT: Tap(path="self_attn.o_proj", point="input"),
        Site.ATTN_DELTA: Tap(path="self_attn.o_proj"),
        Site.ATTN_RESIDUAL: Tap(path="post_attention_layernorm", point="input"),
        Site.POST_NORM: Tap(path="post_attention_layernorm"),
        Site.ROUTER_LOGITS: Tap(path="mlp.gate", index=0),
        Site.ROUTER_WEIGHTS: Tap(path="mlp.gate", index=1),
        Site.ROUTER_EXPERTS: Tap(path="mlp.gate", index=2),
        Site.MOE_DELTA: Tap(path="mlp"),
        Site.OUTPUT: Tap(path=""),
    }
)
# Attribute of an attention module that receives its post-RoPE queries [B,N,S,D] and keys [B,K,S,D].
RECORD_ROPE = "mm2_record_rope"
_RECORDING_PREFIX = "mm2_recording_"


def require_golden_extra(needed_for: str) -> None:
    """Check that transformers and accelerate are installed.

    Raises:
        MissingExtraError: One of them is not.
    """
    for package in ("transformers", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, extra="golden", needed_for=needed_for)
    # Goldens run on torch's own devices; without this, accelerate would start torch_xla where it is installed.
    os.environ.setdefault("USE_TORCH_XLA", "0")


def read_config(folder: Path, *, num_hidden_layers: int) -> MiniMaxM2Config:
    """transformers' config of a checkpoint, cut to its first layers."""
    from transformers import MiniMaxM2Config

    config = MiniMaxM2Config.from_pretrained(folder)
    config.num_hidden_layers = num_hidden_layers
    return config


def recording_attention(implementation: str) -> str:
    """Register an attention function that records q_rope and k_rope and then calls `implementation`.

    Returns:
        The name to give transformers as `attn_implementation`.

    Raises:
        UsageError: transformers has no such implementation.
    """
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
    from transformers.models.minimax_m2 import modeling_minimax_m2

    known = {"eager": modeling_minimax_m2.eager_attention_forward, **dict(ALL_ATTENTION_FUNCTIONS.items())}
    if implementation not in known or implementation not in ALL_MASK_ATTENTION_FUNCTIONS:
        choices = sorted(name for name in known if name in ALL_MASK_ATTENTION_FUNCTIONS and "mm2" not in name)
        raise UsageError(f"--attn-implementation {implementation!r} is unknown", expected=", ".join(choices))
    name = _RECORDING_PREFIX + implementation
    ALL_ATTENTION_FUNCTIONS.register(name, _recording(known[implementation]))
    ALL_MASK_ATTENTION_FUNCTIONS.register(name, ALL_MASK_ATTENTION_FUNCTIONS[implementation])
    return name


def _recording(attend: Callable[..., Any]) -> Callable[..., Any]:
    def attention(
        module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        record = getattr(module, RECORD_ROPE, None)
        if record is not None:
            record(query, key)
        return attend(module, query, key, value, *args, **kwargs)

    return attention
