"""Tiny models of many architectures, made by transformers and saved as it saves them, and their logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.reference.modules import require_golden_extra

_SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
# More than nine experts, so that their order as text is not their order.
_EXPERTS = {"num_experts_per_tok": 2, "head_dim": 8}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "minimax_m2": {**_EXPERTS, "num_local_experts": 11, "rotary_dim": 4},
    "llama": {},
    "qwen2": {
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 2,
        "tie_word_embeddings": True,
    },
    "qwen3": {"head_dim": 8},
    "qwen3_moe": {**_EXPERTS, "num_experts": 11, "moe_intermediate_size": 16, "mlp_only_layers": [1]},
    "olmoe": {
        "num_experts_per_tok": 2,
        "num_experts": 11,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    },
    "mixtral": {**_EXPERTS, "num_local_experts": 11},
    "gpt2": {"tie_word_embeddings": True},
    # mm2 does not know these by heart.
    "gemma2": {"head_dim": 8},
    "gpt_oss": {"head_dim": 8},
    # Its final norm stands before its layers, where modules are listed.
    "opt": {"word_embed_proj_dim": 32, "ffn_dim": 48},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 0,
        "moe_intermediate_size": 16,
    },
}
Chain = Callable[[Any, torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """A checkpoint on disk, and the model that wrote it."""

    folder: Path
    model_type: str
    model: Any

    def logits(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = self.model(input_ids, attention_mask=attention_mask).logits
        return logits


Make = Callable[..., Made]


@pytest.fixture(scope="session")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """Makes a tiny model and saves it; the same one for the same arguments."""
    require_golden_extra("tests")
    made: dict[tuple[Any, ...], Made] = {}

    def make_one(
        model_type: str,
        *,
        shard_size: str = "60KB",
        pickled: bool = False,
        **config: Any,
    ) -> Made:
        key = (model_type, shard_size, pickled, json.dumps(config))
        if key not in made:
            folder = tmp_path_factory.mktemp(model_type)
            model = build_model(model_type, config)
            model.save_pretrained(folder, max_shard_size=shard_size)
            if pickled:
                turn_into_pickles(folder)
            made[key] = Made(folder=folder, model_type=model_type, model=model)
        return made[key]

    return make_one


def build_model(model_type: str, values: dict[str, Any]) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(model_type, **{**_SIZES, **ARCHITECTURES.get(model_type, {}), **values})
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        # Biases and norms that are all zero or one would hide a swap.
        if tensor.dim() == 1:
            tensor += torch.randn(tensor.shape, generator=generator).to(tensor) * 0.2
        if model_type == "minimax_m2" and name.endswith(("mlp.gate.weight", "e_score_correction_bias")):
            # As the hub stores them: more bits than BF16 holds.
            module, _, leaf = name.rpartition(".")
            exact = tensor.float() + torch.randn(tensor.shape, generator=generator) * 1e-3
            is_buffer = leaf in model.get_submodule(module)._buffers
            setattr(model.get_submodule(module), leaf, exact if is_buffer else torch.nn.Parameter(exact))
    return model


def turn_into_pickles(folder: Path) -> None:
    """Replace a folder's safetensors by .bin files of the same tensors."""
    from safetensors.torch import load_file

    for file in sorted(folder.glob("*.safetensors")):
        torch.save(load_file(file), folder / pickled_name(file.name))
        file.unlink()
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"] = {name: pickled_name(file) for name, file in content["weight_map"].items()}
        (folder / "pytorch_model.bin.index.json").write_text(json.dumps(content))
        index.unlink()


def pickled_name(name: str) -> str:
    return name.replace("model", "pytorch_model", 1).replace(".safetensors", ".bin")


@pytest.fixture(scope="session")
def input_ids() -> torch.Tensor:
    return torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(2))


@pytest.fixture(params=["none", "right", "left"])
def attention_mask(request: pytest.FixtureRequest) -> torch.Tensor | None:
    """No mask, and rows of unequal length padded on either side."""
    if request.param == "none":
        return None
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    return mask if request.param == "right" else mask.flip(1)


@pytest.fixture(scope="session")
def chain() -> Chain:
    """Runs components one after the other."""

    def run(parts: Any, input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> torch.Tensor:
        states = input_ids
        with torch.no_grad():
            for part in parts:
                states = part(states, attention_mask)
        return states

    return run
