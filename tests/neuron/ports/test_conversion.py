"""Inputs of a port's loading: the layer's tensors, and config.json."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.model.spec import ModelSpec
from neuron.ports.target import target_config


class TestConversion:
    RENAMED = """
def renamed(tensors):
    return {name.replace("block_sparse_moe.", "moe."): tensors[name] for name in tensors}

class Inner(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.moe = self.block_sparse_moe
        del self.block_sparse_moe
    sites = None

    def forward(self, hidden_states, attention_mask, position_ids):
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        return residual + self.moe(self.post_attention_layernorm(residual))
"""

    def test_method_of_the_module(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(Inner):
    def convert_state_dict(self, tensors, config, layer_idx):
        assert isinstance(self, nn.Module) and config.num_experts == 8 and layer_idx == 0
        return renamed(tensors)
"""
        mine = tensors_of(write_port(self.RENAMED + source))
        assert torch.equal(mine["output"], tensors_of("reference")["output"])

    def test_attribute_of_the_factory(self, tensors_of: Any, write_port: Any) -> None:
        source = """
def Port(config, layer_idx):
    return Inner(config, layer_idx)

Port.convert_state_dict = lambda tensors, config, layer_idx: renamed(tensors)
"""
        mine = tensors_of(write_port(self.RENAMED + source))
        assert torch.equal(mine["output"], tensors_of("reference")["output"])

    def test_tensors_come_dequantised_under_the_hubs_relative_names_with_a_float32_router(
        self, run: Any, write_port: Any, toy: Path
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        assert "self_attn.q_proj.weight" in tensors and "block_sparse_moe.experts.7.w2.weight" in tensors
        assert not [name for name in tensors if "scale" in name or name.startswith("model.")]
        dtypes = {name: tensors[name].dtype for name in tensors}
        float32 = [name for name, dtype in dtypes.items() if dtype is torch.float32]
        assert float32 == ["block_sparse_moe.gate.weight", "block_sparse_moe.e_score_correction_bias"]
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        return tensors
"""
        target = write_port(source)
        result = run("single-layer", "--layer", 0, "--model", toy, "--target", target, "--seq-len", 4)
        assert result.exit_code == 0, result.stderr

    def test_mapping_may_be_changed_and_given_back(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.rank = nn.Buffer(torch.zeros(1, dtype=torch.int32))
        self.self_attn.q_norm.scale = self.self_attn.q_norm.weight
        del self.self_attn.q_norm.weight

    def convert_state_dict(self, tensors, config, layer_idx):
        tensors["rank"] = torch.arange(1, dtype=torch.int32) + 3
        tensors["self_attn.q_norm.scale"] = tensors.pop("self_attn.q_norm.weight")
        return tensors

    def forward(self, *arguments):
        assert self.rank.tolist() == [3]
        self.self_attn.q_norm.__dict__["weight"] = self.self_attn.q_norm.scale
        return super().forward(*arguments)
"""
        mine = tensors_of(write_port(source))
        assert torch.equal(mine["output"], tensors_of("reference")["output"])

    def test_tensor_may_be_set_over_with_another_shape(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    NAME = "self_attn.k_norm.weight"

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        norm = self.self_attn.k_norm
        norm.weight = nn.Parameter(torch.empty(1, *norm.weight.shape))

    def convert_state_dict(self, tensors, config, layer_idx):
        tensors[self.NAME] = tensors[self.NAME][None]
        return tensors
"""
        mine = tensors_of(write_port(source))
        assert torch.equal(mine["output"], tensors_of("reference")["output"])

    @pytest.mark.parametrize(
        ("value", "text"),
        [
            ("[1.0]", "1 no tensor: self_attn.k_norm.weight"),
            ("tensors[NAME].to(torch.float8_e4m3fn)", "is FP8 codes: without its scales it is no weight"),
        ],
    )
    def test_what_is_set_over_a_tensor_and_is_no_weight_is_refused(
        self, run_layer: Any, write_port: Any, value: str, text: str
    ) -> None:
        source = f"""
NAME = "self_attn.k_norm.weight"

class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        tensors[NAME] = {value}
        return tensors
"""
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert text in result.stderr

    @pytest.mark.parametrize("returned", ["None", "list(tensors)", "3"])
    def test_other_returns_are_refused(self, run_layer: Any, write_port: Any, returned: str) -> None:
        source = f"""
class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        return {returned}
"""
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert "convert_state_dict returned no state dict" in result.stderr

    def test_damaged_tensor_is_not_called_the_ports_fault(
        self, run: Any, write_port: Any, toy: Path, tmp_path: Path
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        for path in os.scandir(os.environ["MM2_MODEL"]):
            if path.name.endswith(".safetensors"):
                os.truncate(path, 100_000)
        return {name: tensors[name] for name in tensors}
"""
        folder = shutil.copytree(toy, tmp_path / "toy")
        target = write_port(source.replace('os.environ["MM2_MODEL"]', repr(str(folder))))
        result = run("single-layer", "--layer", 3, "--model", folder, "--target", target, "--random-input")
        assert result.exit_code == 3
        assert "cannot be read from" in result.stderr
        assert "convert_state_dict failed" not in result.stderr


class TestConfig:
    def test_keys_of_config_json_under_both_names(self, toy: Path) -> None:
        spec = ModelSpec.from_folder(toy)
        config = target_config(spec)
        for name, value in spec.raw.items():
            assert getattr(config, name) == value
        assert config.num_experts == config.num_local_experts == 32
        assert config.rope_parameters["rope_theta"] == config.rope_theta == 5_000_000
        assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == config.rotary_dim

    def test_hubs_names_are_there_where_transformers_wrote_the_config(self, toy: Path) -> None:
        raw = dict(ModelSpec.from_folder(toy).raw)
        raw["rope_parameters"] = {"rope_theta": raw.pop("rope_theta"), "partial_rotary_factor": 0.5}
        for name in ("rotary_dim", "scoring_func", "use_qk_norm", "use_routing_bias"):
            del raw[name]
        config = target_config(ModelSpec.from_config(raw))
        assert (config.rotary_dim, config.rope_theta, config.scoring_func) == (32, 5_000_000, "sigmoid")
        assert config.use_qk_norm is config.use_routing_bias is True

    def test_is_writable_and_the_next_call_gets_a_fresh_one(self, toy: Path) -> None:
        spec = ModelSpec.from_folder(toy)
        config = target_config(spec)
        config.hidden_size = 3
        config.quantization_config["fmt"] = "changed"
        assert target_config(spec).hidden_size == 256
        assert target_config(spec).quantization_config["fmt"] == "float8_e4m3fn"
