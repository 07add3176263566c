"""Inputs of a port's loading: the layer's tensors, a copy of the checkpoint without FP8, config.json, its options."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch

from gpu_reference.cli import main as mm2_gpu
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.model.spec import ModelSpec
from neuron.ports.nxdi import NxdiTarget
from neuron.ports.target import target_config
from neuron.ports.targets import find_target
from neuron.ports.vllm_neuron_model import plain_checkpoint


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

    METHOD = """
class Port(Inner):
    def convert_state_dict(self, tensors, config, layer_idx):
        assert isinstance(self, nn.Module) and config.num_experts == 8 and layer_idx == 0
        return renamed(tensors)
"""
    ATTRIBUTE = """
def Port(config, layer_idx):
    return Inner(config, layer_idx)

Port.convert_state_dict = lambda tensors, config, layer_idx: renamed(tensors)
"""
    CHANGED_MAPPING = """
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
    OTHER_SHAPE = """
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

    @pytest.mark.parametrize(
        "source",
        [RENAMED + METHOD, RENAMED + ATTRIBUTE, CHANGED_MAPPING, OTHER_SHAPE],
        ids=[
            "method_of_the_module",
            "attribute_of_the_factory",
            "mapping_changed",
            "tensor_of_another_shape",
        ],
    )
    def test_port_converts_as_it_likes(self, tensors_of: Any, write_port: Any, source: str) -> None:
        assert torch.equal(tensors_of(write_port(source))["output"], tensors_of("reference")["output"])

    def test_tensors_come_dequantised_under_the_hubs_relative_names_with_a_float32_router(
        self, run: Any, write_port: Any, small_fp8: Path
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
        result = run("single-layer", "--layer", 0, "--model", small_fp8, "--target", target, "--seq-len", 4)
        assert result.exit_code == 0, result.stderr

    NO_STATE = "convert_state_dict returned no state dict"

    @pytest.mark.parametrize(
        ("conversion", "text"),
        [
            ("tensors[NAME] = [1.0]", "1 no tensor: self_attn.k_norm.weight"),
            (
                "tensors[NAME] = tensors[NAME].to(torch.float8_e4m3fn)",
                "is FP8 codes: without its scales it is no weight",
            ),
            ("return None", NO_STATE),
            ("return list(tensors)", NO_STATE),
            ("return 3", NO_STATE),
        ],
    )
    def test_what_is_no_weight_or_state_dict_is_refused(
        self, run_layer: Any, write_port: Any, conversion: str, text: str
    ) -> None:
        source = f"""
NAME = "self_attn.k_norm.weight"

class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        {conversion}
        return tensors
"""
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert text in result.stderr

    def test_damaged_tensor_is_not_called_the_ports_fault(
        self, run: Any, write_port: Any, small_fp8: Path, tmp_path: Path
    ) -> None:
        folder = shutil.copytree(small_fp8, tmp_path / "model")
        source = f"""
class Port(ReferenceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        for path in os.scandir({str(folder)!r}):
            if path.name.endswith(".safetensors"):
                os.truncate(path, 100_000)
        return {{name: tensors[name] for name in tensors}}
"""
        target = write_port(source)
        result = run("single-layer", "--layer", 3, "--model", folder, "--target", target, "--random-input")
        assert result.exit_code == 3
        assert "cannot be read from" in result.stderr
        assert "convert_state_dict failed" not in result.stderr


class TestConfig:
    def test_keys_of_config_json_under_both_names(self, small_fp8: Path) -> None:
        spec = ModelSpec.from_folder(small_fp8)
        config = target_config(spec)
        for name, value in spec.raw.items():
            assert getattr(config, name) == value
        assert config.num_experts == config.num_local_experts == 8
        assert config.rope_parameters["rope_theta"] == config.rope_theta == 5_000_000
        assert config.rope_parameters["partial_rotary_factor"] * config.head_dim == config.rotary_dim

    def test_is_writable_and_the_next_call_gets_a_fresh_one(self, small_fp8: Path) -> None:
        spec = ModelSpec.from_folder(small_fp8)
        config = target_config(spec)
        config.hidden_size = 3
        config.quantization_config["fmt"] = "changed"
        assert target_config(spec).hidden_size == 64
        assert target_config(spec).quantization_config["fmt"] == "float8_e4m3fn"


class TestOptions:
    """A port's `mm2_neuron_config`, as its captures record it."""

    def test_options_of_the_class_come_after_those_of_its_module(self) -> None:
        class Layer:
            mm2_neuron_config: ClassVar[dict[str, object]] = {
                "cast_type": "as-declared",
                "dtype": torch.float32,
            }

        module = ModuleType("port")
        module.mm2_neuron_config = {"cast_type": "config", "seq_len": 64}  # type: ignore[attr-defined]
        target = NxdiTarget(name="nxdi:port:Layer", factory=Layer, module=module, source_digest="")
        assert target.port_config == {"cast_type": "as-declared", "seq_len": 64, "dtype": torch.float32}

    def test_options_of_a_class_of_torch_are_recorded_too(self, run_layer: Any, write_port: Any) -> None:
        result = run_layer(
            write_port(
                'mm2_neuron_config = {"fused": True, "tile": 32}\n'
                'class Port(ReferenceLayer):\n    mm2_neuron_config = {"tile": 64}\n'
            )
        )
        assert result.exit_code == 0, result.output
        provenance = Capture.open(json.loads(result.stdout)["directory"]).description.provenance
        assert provenance.port_config == {"fused": True, "tile": 64}
        assert find_target("builtin").port_config == {}

    def test_captures_record_the_values_of_config_json(
        self, judge_layer: Any, command: Any, small_fp8: Path, small_golden: Path
    ) -> None:
        config = json.loads((small_fp8 / "config.json").read_text())
        assert Capture.open(small_golden).description.provenance.model_config == config
        _, record = judge_layer("builtin")
        provenance = Capture.open(record["directory"]).description.provenance
        assert (provenance.model_config, provenance.port_config) == (config, {})
        shown = json.loads(command(mm2_gpu, "show", small_golden, "--json").stdout)
        assert shown["description"]["provenance"]["model_config"]["rope_theta"] == config["rope_theta"]


class TestPlainCheckpoint:
    def test_the_copy_of_an_fp8_checkpoint_has_its_values_and_no_scales(self, small_fp8: Path) -> None:
        spec = ModelSpec.from_folder(small_fp8)
        with (
            CheckpointReader(small_fp8) as reader,
            plain_checkpoint(reader, spec, dtype=torch.bfloat16) as folder,
        ):
            expected = ModelTensors.open(reader, spec, torch.bfloat16)
            with CheckpointReader(folder) as copied:
                assert set(copied.index.names) == set(expected)
                for name in expected:
                    assert copied.index[name].dtype.as_torch() is expected[name].dtype
                    assert torch.equal(copied.read(name), expected[name])
            assert "quantization_config" not in json.loads((folder / "config.json").read_text())
            ModelSpec.from_folder(folder)
        assert not folder.exists()

    def test_a_checkpoint_without_fp8_is_read_where_it_lies(self, small: Path) -> None:
        spec = ModelSpec.from_folder(small)
        with (
            CheckpointReader(small) as reader,
            plain_checkpoint(reader, spec, dtype=torch.bfloat16) as folder,
        ):
            assert folder == small

    def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
        self, small_fp8: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda _: type("Usage", (), {"free": 1000}))
        text = "too small for a copy of the checkpoint without FP8(?s:.*)Set TMPDIR"
        with CheckpointReader(small_fp8) as reader, pytest.raises(CheckpointError, match=text):
            plain_checkpoint(reader, ModelSpec.from_folder(small_fp8), dtype=torch.bfloat16).__enter__()
