"""Names and headers of each tool's dumps; nothing in a file is called."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.formats import FORMATS, find_format, read_dump
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import open_source
from minimax_tools.dumps.piece import DumpPiece
from minimax_tools.dumps.site_finder import read_dims
from minimax_tools.errors import CaptureError
from minimax_tools.model.site_layouts import Partial, Replicated, Sharded
from minimax_tools.model.sites import Site

TENSOR = torch.zeros(2, 3, dtype=torch.bfloat16)


def save(value: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save(value, path)
    return path


def only_piece(directory: Path, name: str) -> DumpPiece:
    found = find_format(directory)
    assert found == name
    (piece,) = read_dump(directory, found).pieces
    assert (piece.shape, piece.dtype) == ((2, 3), "bfloat16")
    return piece


def save_sglang(folder: Path, name: str, index: int = 1, **meta: Any) -> None:
    """Write a file of SGLang's dumper."""
    full = {"step": 0, "rank": 0, "dump_index": index, "name": name}
    file = "___".join(f"{key}={value}" for key, value in full.items()) + ".pt"
    save({"value": TENSOR, "meta": full | meta}, folder / file)


def save_named(directory: Path, format_: str, name: str) -> None:
    """Write the tensor under a name of a tool's, which for SGLang may say its layer."""
    match format_:
        case "nxdi":
            save(TENSOR, directory / f"captured_tensors_{name}.pt")
        case "msprobe":
            save(TENSOR, directory / "step3" / "rank1" / "dump_tensor_data" / f"{name}.pt")
        case "sglang":
            tag, _, bare = name.rpartition("@")
            save_sglang(directory, bare, **({"layer_id": int(tag)} if tag else {}))
        case "transformers":
            save_file({"data": TENSOR}, directory / f"{name}.safetensors")
            (directory / "Net_debug_tree_FULL_TENSORS.json").write_text("{}")
        case "vllm-neuron":
            save(TENSOR, directory / "dp0" / "prefill_s64_0" / name / "rank1.pt")


@pytest.mark.parametrize(
    ("format_", "name", "place", "step"),
    [
        ("nxdi", "cte_step_1_module_layers.0.self_attn_output", "layers.0.self_attn:output", "1"),
        ("nxdi", "cte_step_1_module_layers.0.self_attn_input", "layers.0.self_attn:input", "1"),
        ("nxdi", "ctx_step_1_module_layers.0.mlp_output_1", "layers.0.mlp:output[1]", "1"),
        ("nxdi", "cte_step_1_module_layers.0.mlp_inputs_0", "layers.0.mlp:input[0]", "1"),
        ("nxdi", "cte_step_1_module_layers.0_inputs_kwargs_states", "layers.0:input[states]", "1"),
        ("nxdi", "cte_step_1_module_layers.0.self_output_output", "layers.0.self_output:output", "1"),
        (
            "nxdi",
            "tkg_step_12_module_layers.0.input_layernorm_output",
            "layers.0.input_layernorm:output",
            "12",
        ),
        ("nxdi", "cte_step_1_manual_tensor_3", "manual_tensor_3:output", "1"),
        ("vllm-neuron", "model.layers.0.mlp", "model.layers.0.mlp:output", "prefill_s64_0"),
        ("msprobe", "Module.model.norm.RMSNorm.forward.0.output.0", "model.norm:output[0]", "3"),
        ("msprobe", "Module.model.norm.RMSNorm.forward.2.input.1", "model.norm:input[1]", "3.2"),
        ("msprobe", "Module.model.Model.forward.0.kwargs.input_ids", "model:input[input_ids]", "3"),
        ("msprobe", "Module..ForCausalLM.forward.0.output.logits", ":output[logits]", "3"),
        ("sglang", "3@attn_out", "layers.3.attn_out:output", "0"),
        ("sglang", "input_ids", "input_ids:output", "0"),
        ("sglang", "3@non_intrusive__model.layers.3.mlp.output", "model.layers.3.mlp:output", "0"),
        ("sglang", "3@non_intrusive__model.layers.3.output.1", "model.layers.3:output[1]", "0"),
        ("sglang", "non_intrusive__layers.3.self_output.inputs.0", "layers.3.self_output:input[0]", "0"),
        ("sglang", "non_intrusive__inputs.positions", ":input[positions]", "0"),
        ("transformers", "Net.model.layers.0.mlp.gate_outputs_2", "model.layers.0.mlp.gate:output[2]", ""),
        ("transformers", "Net.model.norm_outputs", "model.norm:output", ""),
        ("transformers", "Net.model.layers.0_inputs_args_0", "model.layers.0:input[0]", ""),
        ("transformers", "Net.layers.0_inputs_kwargs_hidden_states", "layers.0:input[hidden_states]", ""),
        ("transformers", "Net_inputs_kwargs_inputs_embeds", ":input[inputs_embeds]", ""),
        ("transformers", "Net_outputs_logits", ":output[logits]", ""),
    ],
)
def test_names_tell_the_module_the_point_and_the_pass(
    format_: str, name: str, place: str, step: str, tmp_path: Path
) -> None:
    save_named(tmp_path, format_, name)
    piece = only_piece(tmp_path, format_)
    assert str(piece) == place
    assert step in ("", piece.step)
    assert piece.rank == (1 if format_ in ("vllm-neuron", "msprobe") else 0)


class TestNxdi:
    def test_metadata_goes_before_the_name(self, tmp_path: Path) -> None:
        name = "captured_tensors_cte_step_1_module_a_output_output.pt"
        save(TENSOR, tmp_path / name)
        entry = {"module_name": "a_output", "tensor_type": "output"}
        (tmp_path / "capture_metadata.json").write_text(json.dumps({"tensors": {name: entry}}))
        assert only_piece(tmp_path, "nxdi").module == "a_output"

    def test_first_of_a_record_is_not_taken_for_attentions_result(self, tmp_path: Path) -> None:
        name = "captured_tensors_cte_step_1_module_layers.0.self_attn_output.pt"
        save(TENSOR, tmp_path / name)
        entry = {"module_name": "layers.0.self_attn", "tensor_type": "output"}
        (tmp_path / "capture_metadata.json").write_text(json.dumps({"tensors": {name: entry}}))
        assert str(only_piece(tmp_path, "nxdi")) == "layers.0.self_attn:output[first]"
        assert open_source(tmp_path).layers == ()

    def test_damaged_metadata_is_named(self, tmp_path: Path) -> None:
        save(TENSOR, tmp_path / "captured_tensors_cte_step_1_module_a_output.pt")
        (tmp_path / "capture_metadata.json").write_text("[]")
        with pytest.raises(CaptureError, match=r"capture_metadata\.json is damaged"):
            read_dump(tmp_path, "nxdi")

    def test_prefill_is_the_first_pass(self, tmp_path: Path) -> None:
        for step in (10, 2, 1):
            phase = "cte" if step == 1 else "tkg"
            save(TENSOR, tmp_path / f"captured_tensors_{phase}_step_{step}_module_layers.0.mlp_output.pt")
        capture = open_source(tmp_path)
        assert isinstance(capture, DumpCapture)
        assert capture.found.dump.steps == ("1", "2", "10")
        assert capture.found.passes == (("1",),)
        assert any("of 3 passes 1 is read, not 2, 10" in note for note in capture.notes)


class TestVllmNeuron:
    def test_prefills_come_first_and_replicas_are_told_apart(self, tmp_path: Path) -> None:
        for replica, name in ((0, "decode_b2_0"), (0, "prefill_s64_0"), (1, "prefill_s64_0")):
            save(TENSOR, tmp_path / f"dp{replica}" / name / "norm" / "rank0.pt")
        dump = read_dump(tmp_path, "vllm-neuron")
        assert dump.steps == ("dp0/prefill_s64_0", "dp1/prefill_s64_0", "dp0/decode_b2_0")
        assert read_dump(tmp_path / "dp0", "vllm-neuron").steps == ("prefill_s64_0", "decode_b2_0")


class TestMsprobe:
    def test_functions_and_backward_passes_are_left_out(self, tmp_path: Path) -> None:
        folder = tmp_path / "step0" / "rank0" / "dump_tensor_data"
        for name in ("Torch.matmul.0.forward.output.0", "Module.norm.RMSNorm.backward.0.output.0"):
            save(TENSOR, folder / f"{name}.pt")
        assert read_dump(tmp_path, "msprobe").pieces == ()


class TestSglang:
    def test_name_dumped_again_is_the_next_pass(self, tmp_path: Path) -> None:
        for index in (9, 10):
            save_sglang(tmp_path, "norm", index)
        dump = read_dump(tmp_path, "sglang")
        assert [(piece.step, "dump_index=9_" in piece.file) for piece in dump.pieces] == [
            ("0", True),
            ("0.1", False),
        ]

    def test_batch_behind_the_last_module_is_of_the_last_pass(self, tmp_path: Path) -> None:
        for index, name in enumerate(("positions", "norm", "norm", "positions")):
            save_sglang(tmp_path, name, index)
        dump = read_dump(tmp_path, "sglang")
        assert [(piece.module, piece.step) for piece in dump.pieces] == [
            ("positions", "0"),
            ("norm", "0"),
            ("norm", "0.1"),
            ("positions", "0.1"),
        ]

    def test_other_parallelism_is_refused(self, tmp_path: Path) -> None:
        info = {"tp_rank": 0, "tp_size": 1, "cp_rank": 0, "cp_size": 2}
        save_sglang(tmp_path, "x", dims="t[cp] h", sglang_parallel_info=info)
        with pytest.raises(CaptureError, match=r"is divided along an axis.*of a run with cp"):
            read_dump(tmp_path, "sglang")

    @pytest.mark.parametrize(
        ("changed", "expected"),
        [
            ({"step": True}, "a whole number as step"),
            ({"step": -1}, "a whole number as step"),
            ({"rank": 10**500}, "a whole number as rank"),
            ({"dump_index": "1"}, "a whole number as dump_index"),
            ({"layer_id": True}, "a whole number as layer_id"),
            ({"dims": ["b", "s", "h"]}, "text as dims"),
            ({"sglang_parallel_info": [1]}, "a dict as sglang_parallel_info"),
            ({"sglang_parallel_info": {"tp_rank": 0, "tp_size": True}}, "a whole number as tp_size"),
        ],
    )
    def test_fact_of_another_kind_is_refused_by_name(
        self, changed: dict[str, Any], expected: str, tmp_path: Path
    ) -> None:
        save_sglang(tmp_path, "x", sglang_parallel_info=None)
        assert read_dump(tmp_path, "sglang").steps == ("0",)
        save_sglang(tmp_path, "x", **changed)
        with pytest.raises(
            CaptureError, match=rf"name=x\.pt is of another layout: expected {expected}, found"
        ):
            read_dump(tmp_path, "sglang")

    @pytest.mark.parametrize(
        ("dims", "layout"),
        [
            ("b s h", Replicated()),
            ("b s h[tp] # dp:=moe_dp", Sharded(dim=2)),
            ("t (num_heads*head_dim)[tp]", Sharded(dim=1)),
            ("t h[tp:partial]", Partial()),
            ("t 1 h[sp,tp]", Sharded(dim=2)),
        ],
    )
    def test_dims_say_how_ranks_hold_it(self, dims: str, layout: object) -> None:
        assert read_dims(dims) == layout


class TestTransformers:
    def test_trace_without_tensors_says_how_to_keep_them(self, tmp_path: Path) -> None:
        (tmp_path / "Net_debug_tree_FULL_TENSORS.json").write_text("{}")
        with pytest.raises(CaptureError, match="use_repr=False"):
            open_source(tmp_path)


class Call:
    """Pickles to a call."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


class TestMalicious:
    @pytest.mark.parametrize(
        "path",
        [
            "captured_tensors_cte_step_1_module_layers.0.mlp_output.pt",
            "dp0/prefill_s64_0/layers.0.mlp/rank0.pt",
            "step0/rank0/dump_tensor_data/Module.layers.0.mlp.Mlp.forward.0.output.0.pt",
            "step=0___rank=0___dump_index=1___name=layers.0.mlp.pt",
        ],
    )
    def test_nothing_in_a_file_is_called(self, path: str, tmp_path: Path) -> None:
        made = tmp_path / "made"
        attack = Call(subprocess.call, ["touch", str(made)])
        meta = {"step": 0, "rank": 0, "dump_index": 1, "name": "layers.0.mlp", "attack": attack}
        value = {"value": (TENSOR, attack), "meta": meta} if "dump_index" in path else (TENSOR, attack)
        save(value, tmp_path / "dump" / path)
        capture = open_source(tmp_path / "dump")
        assert Site.MOE_DELTA in capture.sites(0)
        assert capture.read(0, Site.MOE_DELTA).shape == (2, 3)
        assert not made.exists()

    def test_file_that_is_a_call_alone_is_named_as_one_without_a_tensor(self, tmp_path: Path) -> None:
        made = tmp_path / "made"
        save(
            Call(subprocess.call, ["touch", str(made)]),
            tmp_path / "dump" / "captured_tensors_cte_step_1_module_layers.0.mlp_output.pt",
        )
        with pytest.raises(CaptureError, match=r"mlp_output\.pt holds no tensor"):
            read_dump(tmp_path / "dump", "nxdi")
        assert not made.exists()


class TestFindFormat:
    @pytest.mark.parametrize("name", FORMATS)
    def test_named_format_must_be_there(self, name: str, tmp_path: Path) -> None:
        with pytest.raises(CaptureError, match=f"holds no {name} capture"):
            DumpCapture.open(tmp_path, NameMap(), format_=name)

    def test_ranks_in_folders_of_their_own_are_one_dump(self, tmp_path: Path) -> None:
        for rank in (0, 1):
            folder = tmp_path / f"rank{rank}"
            save(
                TENSOR + rank,
                folder / "captured_tensors_cte_step_1_module_layers.0.self_attn.q_proj_output.pt",
            )
        capture = open_source(tmp_path)
        assert capture.read(0, Site.Q_PROJ).tolist() == [[0, 0, 0, 1, 1, 1]] * 2

    def test_folder_above_names_the_one_below(self, tmp_path: Path) -> None:
        save(TENSOR, tmp_path / "run" / "captured_tensors_cte_step_1_module_a_output.pt")
        with pytest.raises(CaptureError, match="Name one of the captures in it: run"):
            open_source(tmp_path)
