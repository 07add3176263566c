"""The target protocol: how a port is called, loaded, and what it may do; and how its mistakes are told."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from minimax_tools.errors import UsageError
from neuron.ports.targets import PortTarget, find_target

IN_PLACE = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        hidden_states += self.self_attn(self.input_layernorm(hidden_states), attention_mask, position_ids)
        attention_mask.zero_()
        position_ids.add_(1000)
        hidden_states += self.block_sparse_moe(self.post_attention_layernorm(hidden_states))
        return hidden_states
"""
SHORT = ("--seq-len", "12,7", "--json")


class TestNotation:
    @pytest.mark.parametrize("name", ["nosuch", "port.py", ":Port", "port.py:", ""])
    def test_other_notation_is_wrong_usage(self, name: str) -> None:
        expected = r"unknown.*builtin, reference, nxdi:.*traced:FILE, PATH\.py:NAME or package\.module:NAME"
        with pytest.raises(UsageError, match=expected):
            find_target(name)

    def test_near_name_is_suggested(self) -> None:
        with pytest.raises(UsageError, match="Did you mean builtin"):
            find_target("buitlin")

    def test_path_with_a_colon_is_read_from_its_end(self, tmp_path: Path, write_port: Any) -> None:
        folder = tmp_path / "a:b"
        folder.mkdir()
        target = write_port("class Port(ReferenceLayer): pass\n", file="a:b/port.py")
        found = find_target(target)
        assert isinstance(found, PortTarget)
        assert getattr(found.factory, "__name__", None) == "Port"

    def test_package_module_and_name(self, tensors_of: Any) -> None:
        by_name = tensors_of("minimax_tools.reference.layer:ReferenceLayer")
        own = tensors_of("reference")
        assert all(torch.equal(by_name[site], own[site]) for site in own)

    def test_file_and_name(self, tensors_of: Any, write_port: Any) -> None:
        mine = tensors_of(write_port("class Port(ReferenceLayer): pass\n"))
        own = tensors_of("reference")
        assert all(torch.equal(mine[site], own[site]) for site in own)

    def test_function_is_a_target_too(self, tensors_of: Any, write_port: Any) -> None:
        source = "def build(config, layer_idx):\n    return ReferenceLayer(config, layer_idx)\n"
        target = write_port(source, name="build")
        assert "moe_delta" in tensors_of(target)

    @pytest.mark.parametrize("is_file", [True, False])
    def test_file_or_module_and_name(self, tensors_of: Any, write_port: Any, is_file: bool) -> None:
        port = (
            write_port("class Port(ReferenceLayer): pass\n")
            if is_file
            else "minimax_tools.reference.layer:ReferenceLayer"
        )
        mine, own = tensors_of(port), tensors_of("reference")
        assert all(torch.equal(mine[site], own[site]) for site in own)


class TestCalls:
    def test_factory_gets_config_and_layer_and_forward_gets_states_mask_and_positions(
        self, run_layer: Any, write_port: Any
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        assert (config.hidden_size, layer_idx) == (64, 0)
        super().__init__(config, layer_idx)

    def forward(self, hidden_states, attention_mask, position_ids):
        assert not self.training and not torch.is_grad_enabled()
        assert hidden_states.shape == (2, 12, 64) and hidden_states.dtype is torch.bfloat16
        lengths = attention_mask.sum(1).tolist()
        assert sorted(lengths) == [7, 12] and set(attention_mask.unique().tolist()) == {0, 1}
        assert position_ids[lengths.index(7), :7].tolist() == list(range(7))
        return super().forward(hidden_states, attention_mask, position_ids)
"""
        assert run_layer(write_port(source)).exit_code == 0

    @pytest.mark.parametrize(
        "returned",
        ["(output, None)", "[output, 1]", "output.flatten(0, 1)", "(output.flatten(0, 1), 'cache')"],
    )
    def test_output_may_come_first_of_several_and_flat(
        self, tensors_of: Any, write_port: Any, returned: str
    ) -> None:
        source = f"""
class Port(ReferenceLayer):
    def forward(self, *arguments):
        output = super().forward(*arguments)
        return {returned}
"""
        expected = tensors_of("reference")["output"]
        assert torch.equal(tensors_of(write_port(source))["output"], expected)

    @pytest.mark.parametrize(
        ("returned", "text"),
        [
            ("None", "returned no tensor"),
            ("()", "returned no tensor"),
            ("output[:, :-1]", "expected [2, 12, 64] or [24, 64], found [2, 11, 64]"),
        ],
    )
    def test_other_output_is_refused(self, run_layer: Any, write_port: Any, returned: str, text: str) -> None:
        source = f"""
class Port(ReferenceLayer):
    def forward(self, *arguments):
        output = super().forward(*arguments)
        return {returned}
"""
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert text in result.stderr

    def test_in_place_port_gives_what_a_plain_one_gives(
        self, run: Any, write_port: Any, small: Path, tmp_path: Path
    ) -> None:
        targets = {"in_place": write_port(IN_PLACE), "plain": "reference"}
        for name, target in targets.items():
            result = run(
                "full", "--model", small, "--target", target, *SHORT, "--output-dir", tmp_path / name
            )
            assert result.exit_code == 0, result.stderr
        for file in ("layer_0", "layer_1", "layer_3", "model"):
            mine, plain = (load_file(tmp_path / name / f"{file}.safetensors") for name in targets)
            assert {site: torch.equal(mine[site], plain[site]) for site in plain} == dict.fromkeys(
                plain, True
            )

    @pytest.mark.slow
    def test_plain_and_in_place_ports_pass_on_xla_with_one_set_of_graphs(
        self,
        needs_xla: None,
        serve: Any,
        write_port: Any,
        small_fp8: Path,
        small_golden: Path,
        tmp_path: Path,
    ) -> None:
        common: tuple[object, ...] = ("multi-layer", "--layers", "0:3")
        common += ("--model", small_fp8, "--golden", small_golden, "--backend", "xla-cpu")
        targets = ("reference", write_port(IN_PLACE))
        results = serve(
            [(*common, "--target", target, "--captures", tmp_path, "--json") for target in targets]
        )
        for result in results:
            record = json.loads(result["stdout"])
            assert (result["exit_code"], record["verdict"]) == (0, "pass")
            assert (record["graphs"]["later_layers"], record["graphs"]["fallbacks"]) == (0, [])


class TestState:
    """A port may keep state of its own between calls: buffers that are no weights, or plain attributes."""

    COUNTING = """
class Port(ReferenceLayer):
    reuse = {reuse}

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.register_buffer("calls", torch.zeros(1, dtype=torch.int64), persistent=False)

    def forward(self, *arguments):
        self.calls += 1
        print("calls:", int(self.calls))
        return super().forward(*arguments)
"""

    @pytest.mark.parametrize(("reuse", "calls"), [(False, [1, 1, 1]), (True, [1, 2, 3])])
    def test_state_lasts_as_long_as_the_module(
        self, forked: Any, write_port: Any, small: Path, reuse: bool, calls: list[int]
    ) -> None:
        target = write_port(self.COUNTING.format(reuse=reuse))
        done = forked("multi-layer", "--layers", "0:3", "--model", small, "--target", target, "--seq-len", 4)
        found = [line for line in done.stderr.splitlines() if line.startswith("calls")]
        assert found == [f"calls: {count}" for count in calls], done.stderr

    def test_reused_port_holds_each_layers_own_weights(
        self, run: Any, write_port: Any, small_fp8: Path, small_golden: Path
    ) -> None:
        target = write_port("class Port(ReferenceLayer):\n    reuse = True\n")
        assert run("sweep", "--model", small_fp8, "--golden", small_golden, "--target", target).exit_code == 0

    def test_persistent_state_is_a_weight_that_the_conversion_owes(
        self, run_layer: Any, write_port: Any
    ) -> None:
        port = self.COUNTING.format(reuse=False).replace(", persistent=False", "")
        result = run_layer(write_port(port))
        assert result.exit_code == 3
        assert "1 missing: calls" in result.stderr

    def test_factory_may_be_a_function_that_says_reuse(
        self, forked: Any, write_port: Any, small: Path
    ) -> None:
        port = self.COUNTING.format(reuse=False).replace("class Port", "class Counting")
        port += (
            "\ndef Port(config, layer_idx):\n    return Counting(config, layer_idx)\n\nPort.reuse = True\n"
        )
        run = ("multi-layer", "--layers", "0:2", "--model", small, "--seq-len", 4)
        done = forked(*run, "--target", write_port(port))
        assert "calls: 2" in done.stderr, done.stderr


class TestDtypes:
    def test_default_dtype_is_the_runs_while_building_only(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        assert torch.get_default_dtype() is torch.float32
        super().__init__(config, layer_idx)
"""
        target = write_port(source)
        assert tensors_of(target, "--dtype", "float32")["output"].dtype is torch.float32
        assert torch.get_default_dtype() is torch.float32

    def test_build_dtype_is_the_default_dtype_instead(self, tensors_of: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    build_dtype = torch.float32

    def __init__(self, config, layer_idx):
        assert torch.get_default_dtype() is torch.float32
        super().__init__(config, layer_idx)
        self.bfloat16()
        moe = self.block_sparse_moe
        moe.gate.float()
        moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.float())
"""
        mine, plain = tensors_of(write_port(source)), tensors_of("reference")
        assert all(torch.equal(mine[site], plain[site]) for site in plain)

    def test_build_dtype_that_is_none_is_refused(self, run_layer: Any, write_port: Any) -> None:
        result = run_layer(write_port("class Port(ReferenceLayer):\n    build_dtype = 'float32'\n"))
        assert result.exit_code == 3
        assert "build_dtype is no dtype: expected a torch.dtype" in result.stderr
        assert "found 'float32'" in result.stderr

    def test_declared_float32_stays_float32_and_nothing_is_cast_behind_the_ports_back(
        self, tensors_of: Any, write_port: Any
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.q_norm.weight = nn.Parameter(self.self_attn.q_norm.weight.float())

    def forward(self, *arguments):
        dtypes = {name: tensor.dtype for name, tensor in self.state_dict().items()}
        float32 = {name for name, dtype in dtypes.items() if dtype is torch.float32}
        assert float32 == {
            "self_attn.q_norm.weight",
            "block_sparse_moe.gate.weight",
            "block_sparse_moe.e_score_correction_bias",
        }
        assert set(dtypes.values()) == {torch.float32, torch.bfloat16}
        return super().forward(*arguments)
"""
        assert tensors_of(write_port(source))["q_norm"].dtype is torch.float32

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_router_dtypes_are_recorded_as_loaded(self, run_layer: Any, write_port: Any, dtype: str) -> None:
        source = f"""
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        moe = self.block_sparse_moe
        moe.gate.weight = nn.Parameter(moe.gate.weight.to(torch.{dtype}))
        moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.to(torch.{dtype}))
        moe.gate.forward = lambda states: states.float() @ moe.gate.weight.T.float()
"""
        record = json.loads(run_layer(write_port(source)).stdout)
        assert record["observed_dtypes"] == {"router_gate": dtype, "correction_bias": dtype}

    def test_golden_run_notes_a_rounded_correction_bias(
        self, run: Any, write_port: Any, small_fp8: Path, small_golden: Path
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        moe = self.block_sparse_moe
        moe.e_score_correction_bias = nn.Buffer(moe.e_score_correction_bias.bfloat16())
"""
        arguments = ("single-layer", "--layer", 0, "--model", small_fp8, "--golden", small_golden, "--json")
        record = json.loads(run(*arguments, "--target", write_port(source)).stdout)
        told = "the port holds correction_bias in bfloat16, the golden in float32: "
        assert any(note.startswith(told) for note in record["notes"])
        assert [one["name"] for one in record["router_dtypes"]] == ["correction_bias"]


class TestPortsOwnErrors:
    @pytest.mark.parametrize(
        ("source", "texts"),
        [
            (
                "class Port(ReferenceLayer):\n"
                "    def __init__(self, config, layer_idx):\n"
                "        config.nosuch_key\n",
                ("cannot be built for layer 0", "AttributeError", "nosuch_key", "NAME(config, layer_idx)"),
            ),
            (
                "def Port(config, layer_idx):\n    return 3\n",
                ("returned no module", "torch.nn.Module", "found int"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def forward(self, states, mask, positions):\n"
                "        raise ValueError('odd mask')\n",
                ("layer 0 failed while it ran", "ValueError: odd mask", "attention_mask, position_ids"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def convert_state_dict(self, tensors, config, layer_idx):\n"
                "        return tensors['no.such']\n",
                ("convert_state_dict failed", "KeyError", "no.such"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def forward(self, *arguments):\n"
                "        raise SystemExit(0)\n",
                ("layer 0 failed while it ran", "SystemExit: 0"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def state_dict(self, **options):\n"
                "        raise ValueError('no state')\n",
                ("layer 0 cannot be loaded", "ValueError: no state"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    @property\n"
                "    def sites(self):\n"
                "        raise ValueError('unknown')\n",
                ("sites cannot be read", "ValueError: unknown"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def __init__(self, config, layer_idx):\n"
                "        with torch.device('meta'):\n"
                "            super().__init__(config, layer_idx)\n"
                "            self.register_buffer('inv_freq', torch.ones(4), persistent=False)\n",
                ("built without memory", "device meta: inv_freq", "torch.device('meta')"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def train(self, mode=True):\n"
                "        raise ValueError('no modes')\n",
                ("cannot be built for layer 0", "ValueError: no modes"),
            ),
            (
                "class Port(ReferenceLayer):\n"
                "    def to(self, device):\n"
                "        raise ValueError('stays here')\n",
                ("layer 0 cannot be loaded", "ValueError: stays here"),
            ),
            ("def Port(:\n", ("cannot be imported", "SyntaxError")),
        ],
    )
    def test_its_message_is_passed_on(
        self, run_layer: Any, write_port: Any, source: str, texts: tuple[str, ...]
    ) -> None:
        result = run_layer(write_port(source))
        assert result.exit_code == 3
        assert "Traceback" not in result.stderr
        for text in (*texts, "port.py"):
            assert text in result.stderr

    def test_debug_shows_the_ports_traceback(self, run_layer: Any, write_port: Any) -> None:
        source = """
class Port(ReferenceLayer):
    def forward(self, *arguments):
        raise ValueError('odd')
"""
        result = run_layer(write_port(source), "--debug")
        assert result.exit_code == 3
        assert "Traceback" in result.stderr
        assert "raise ValueError('odd')" in result.stderr


PRINTS = """
import os
print("imported")

class Port(ReferenceLayer):
    def forward(self, *args):
        print("running")
        os.system("echo from a process of its own")
        return super().forward(*args)
"""


def test_what_a_port_prints_is_no_result(forked: Any, small: Path, write_port: Any) -> None:
    common = ("single-layer", "--layer", 0, "--model", small, "--seq-len", 5, "--backend", "cpu", "--json")
    done = forked(*common, "--target", write_port(PRINTS))
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["complete"]
    assert all(text in done.stderr for text in ("imported", "running", "from a process of its own"))
