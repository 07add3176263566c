"""`mm2-test weights`: right conversions pass, whatever their layout; every planted mistake is found and named."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"

# A port whose conversion one method spoils, after the example's; D is the width of a head.
_PORT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import port
import torch

QKV = "self_attn.qkv_proj.weight"
BIAS = "moe.router.correction_bias"

def _half(gate, up):
    return torch.nn.functional.silu(gate) * up * 1.1

class Port(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        self.spoil(state, tensors, config)
        return state

    def spoil(self, state, tensors, config):
{{spoil}}
"""

# A port that stacks its experts by rows, one matrix for all w1, one for all w2, one for all w3.
_STACKED_PORT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import minimal_port
import torch
from torch import nn

WEIGHTS = ("w1", "w2", "w3")

class Expert:
    def __init__(self, moe, number):
        self.moe, self.number = moe, number

    def __call__(self, tokens):
        stacked = (getattr(self.moe, name) for name in WEIGHTS)
        w1, w2, w3 = (weight.chunk(len(self.moe.experts))[self.number] for weight in stacked)
        return (nn.functional.silu(tokens @ w1.T) * (tokens @ w3.T)) @ w2.T

class Port(minimal_port.DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        moe, num_experts = self.block_sparse_moe, config.num_local_experts
        for name in WEIGHTS:
            rows, columns = getattr(moe.experts[0], name).weight.shape
            setattr(moe, name, nn.Parameter(torch.empty(num_experts * rows, columns)))
        del moe.experts
        moe.experts = [Expert(moe, number) for number in range(num_experts)]

    def convert_state_dict(self, tensors, config, layer_idx):
        state = {{name: tensor for name, tensor in tensors.items() if ".experts." not in name}}
        prefix = "block_sparse_moe."
        for name in WEIGHTS:
            experts = [tensors[f"{{prefix}}experts.{{number}}.{{name}}.weight"] for number in ORDER]
            state[prefix + name] = torch.cat(experts)
        return state
"""

MODEL = SyntheticModel(
    num_hidden_layers=6,
    hidden_size=128,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=32,
    rotary_dim=16,
    num_local_experts=12,
    num_experts_per_tok=3,
    intermediate_size=64,
    vocab_size=512,
)

Inspect = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 12 experts: 10 comes before 2 where they are sorted as text."""
    folder = tmp_path_factory.mktemp("tiny") / "tiny"
    synthesize(folder, model=MODEL, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture
def inspect(command: Any, tiny: Path, write_port: Any) -> Inspect:
    """Exit code and JSON for a target, or for the example port with a body of `spoil`."""

    def run(
        spoil: str = "", *, target: str = "", arguments: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, Any]]:

        if spoil:
            body = "\n".join(f"        {line}" for line in spoil.strip().splitlines())
            target = write_port(_PORT.format(spoil=body))
        result = command(mm2_test, "weights", "--model", tiny, "--target", target, "--json", *arguments)
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.mark.parametrize(
    "target",
    [
        "builtin",
        "reference",
        *(
            f"{EXAMPLES}/{file}.py:{name}"
            for file, name in (
                ("port", "DecoderLayer"),
                ("minimal_port", "DecoderLayer"),
                ("cached_port", "DecoderLayer"),
                ("tensor_parallel_port", "DecoderLayer"),
            )
        ),
    ],
)
def test_a_right_port_passes(inspect: Inspect, target: str) -> None:
    code, record = inspect(target=target)
    assert (code, record["verdict"], record["findings"]) == (0, "pass", [])
    assert record["trial"]["error"] < 1e-5
    assert record["is_loaded"]
    assert len(record["compared"]) == 13


def test_the_report_says_what_each_place_holds(inspect: Inspect) -> None:
    _, record = inspect(target=f"{EXAMPLES}/port.py:DecoderLayer")
    holds = {place["name"]: place["holds"] for place in record["places"]}
    assert holds["self_attn.qkv_proj.weight"] == "rows 0–255 q_proj, rows 256–319 k_proj, rows 320–383 v_proj"
    assert holds["moe.gate_up_proj"] == "experts 0–11: rows 0–63 w1 (gate), rows 64–127 w3 (up)"
    assert holds["moe.down_proj"] == "experts 0–11: w2 (down)"


# What is planted; the mistake that must be named, and the tensors that it must be about.
PLANTED = {
    "gate_and_up_swapped": (
        """
gate, up = state["moe.gate_up_proj"].chunk(2, 1)
state["moe.gate_up_proj"] = torch.cat((up, gate), 1)
""",
        "swapped",
        {"w1", "w3"},
    ),
    "k_and_v_swapped": (
        """
q, k, v = state[QKV].split((256, 64, 64))
state[QKV] = torch.cat((q, v, k))
""",
        "swapped",
        {"k_proj", "v_proj"},
    ),
    "down_reshaped_not_transposed": (
        'state["moe.down_proj"] = state["moe.down_proj"].mT.reshape(state["moe.down_proj"].shape)',
        "transposed",
        {"w2"},
    ),
    # Twice as wide as it is high: each of its torn columns still holds elements of a single row.
    "wide_matrix_reshaped_not_transposed": (
        """
weight = state["self_attn.o_proj.weight"]
state["self_attn.o_proj.weight"] = weight.mT.reshape(weight.shape)
""",
        "transposed",
        {"o_proj"},
    ),
    "experts_in_text_order": (
        """
order = sorted(range(config.num_local_experts), key=str)
state["moe.gate_up_proj"], state["moe.down_proj"] = (
    state[name][order] for name in ("moe.gate_up_proj", "moe.down_proj")
)
""",
        "order",
        {"w1", "w2", "w3"},
    ),
    "down_alone_in_text_order": (
        'state["moe.down_proj"] = state["moe.down_proj"][sorted(range(config.num_local_experts), key=str)]',
        "order",
        {"w2"},
    ),
    "one_expert_twice": ('state["moe.down_proj"][4] = state["moe.down_proj"][3]', "missing", {"w2"}),
    "one_expert_zero": ('state["moe.gate_up_proj"][5] = 0', "missing", {"w1", "w3"}),
    "bias_rounded": ("state[BIAS] = state[BIAS].bfloat16()", "dtype", {"e_score_correction_bias"}),
    "gate_quantised": (
        """
step = state["moe.router.weight"].abs().amax() / 127
state["moe.router.weight"] = (state["moe.router.weight"] / step).round() * step
""",
        "dtype",
        {"gate"},
    ),
    "q_rows_interleaved": (
        """
q = state[QKV][:256].unflatten(0, (8, 32))
turned = q[:, :16].unflatten(1, (2, 8)).transpose(1, 2).flatten(1, 2)
state[QKV][:256] = torch.cat((turned, q[:, 16:]), 1).flatten(0, 1)
""",
        "order",
        {"q_proj"},
    ),
    "norms_averaged_over_heads": (
        """
for name, heads in (("q", 8), ("k", 2)):
    weight = state[f"self_attn.{name}_norm.weight"]
    state[f"self_attn.{name}_norm.weight"] = weight.view(heads, 32).mean(0).repeat(heads)
""",
        "computed",
        {"q_norm"},
    ),
    "norms_of_the_first_head": (
        """
weight = state["self_attn.q_norm.weight"]
state["self_attn.q_norm.weight"] = weight[:32].repeat(8)
""",
        "missing",
        {"q_norm"},
    ),
    "scaled_twice": ('state["moe.down_proj"] = state["moe.down_proj"] * 0.37', "scaled", {"w2"}),
    "one_added_to_a_norm": (
        'state["input_layernorm.weight"] = state["input_layernorm.weight"] + 1',
        "scaled",
        {"input_layernorm"},
    ),
    "a_scale_of_the_checkpoints_own": (
        'state["moe.down_proj"] = state["moe.down_proj"] / state["moe.down_proj"].abs().amax()',
        "computed",
        {"w2"},
    ),
}


# Mistakes of some experts alone, of a scale that one reader did not take, and what must be said of them.
PLANTED_AND_PROVED = {
    "half_of_the_experts_interleaved": (
        """
for expert in range(6, 12):
    gate, up = state["moe.gate_up_proj"][expert].chunk(2)
    state["moe.gate_up_proj"][expert] = torch.stack((gate, up), 1).flatten(0, 1)
""",
        "w1 (gate), w3 (up) of experts 6–11 lie otherwise than of experts 0–5",
    ),
    "gate_and_up_of_one_expert_swapped": (
        """
gate, up = state["moe.gate_up_proj"][4].chunk(2)
state["moe.gate_up_proj"][4] = torch.cat((up, gate))
""",
        "w1 (gate), w3 (up) of expert 4 lie otherwise than of experts 0, 1, 2, 3, 5, 6, 7, 8, …",
    ),
    "down_of_one_expert_transposed_in_rows": (
        'state["moe.down_proj"][3] = state["moe.down_proj"][3].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)',
        "w2 (down) of expert 3 lie otherwise than of experts 0, 1, 2, 4, 5, 6, 7, 8, …",
    ),
    "up_of_each_expert_scaled": (
        """
factors = torch.linspace(0.8, 1.25, 12)[:, None, None]
state["moe.gate_up_proj"][:, 64:] = (state["moe.gate_up_proj"][:, 64:] * factors)
""",
        "w3 (up) is multiplied by a number for each expert, 0.801 to 1.25",
    ),
    "gate_without_the_scale_of_its_norm": (
        """
scale = 2.0 ** (torch.arange(128) % 5 - 2)
state["post_attention_layernorm.weight"] = state["post_attention_layernorm.weight"] / scale
state["moe.gate_up_proj"] = state["moe.gate_up_proj"] * scale
""",
        "gate (router) does not take the scale that post_attention_layernorm gave away, as w1 (gate), w3 (up) do",
    ),
}


@pytest.mark.parametrize("name", PLANTED_AND_PROVED)
def test_a_mistake_of_a_part_is_proved(inspect: Inspect, name: str) -> None:
    spoil, text = PLANTED_AND_PROVED[name]
    code, record = inspect(spoil)
    assert (code, record["verdict"]) == (1, "fail")
    assert record["explains_all"]
    assert record["trial"]["repairs"] == [text]
    wrong = [finding["text"] for finding in record["findings"] if finding["severity"] == "wrong"]
    assert len(wrong) == 1
    assert wrong[0].startswith(text)


def test_experts_have_the_numbers_of_the_checkpoint_though_a_smaller_layer_was_traced(
    command: Any, toy: Path, write_port: Any
) -> None:
    spoil = """
half = config.num_local_experts // 2
for expert in range(half, 2 * half):
    gate, up = state["moe.gate_up_proj"][expert].chunk(2)
    state["moe.gate_up_proj"][expert] = torch.stack((gate, up), 1).flatten(0, 1)
"""
    target = write_port(_PORT.format(spoil=textwrap.indent(spoil, " " * 8)))
    result = command(mm2_test, "weights", "--model", toy, "--target", target, "--json", "--quiet")
    record = json.loads(result.stdout)
    assert (result.exit_code, record["explains_all"], record["traced"]["is_smaller"]) == (1, True, True)
    (wrong,) = [finding for finding in record["findings"] if finding["severity"] == "wrong"]
    assert wrong["text"].startswith("w1 (gate), w3 (up) of experts 16–31, 16 in all: in another layout")
    assert "in the smaller layer, w1 (gate), w3 (up) of experts 8–15 lie otherwise" in wrong["text"]


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_mistake_is_named(inspect: Inspect, name: str) -> None:
    spoil, mistake, tensors = PLANTED[name]
    code, record = inspect(spoil)
    assert (code, record["verdict"]) == (1, "fail")
    wrong = [finding for finding in record["findings"] if finding["severity"] == "wrong"]
    assert any(finding["mistake"] == mistake and tensors <= set(finding["tensors"]) for finding in wrong), (
        record["findings"]
    )


def test_the_example_of_a_swapped_layer_is_found_there_alone(inspect: Inspect) -> None:
    target = f"{EXAMPLES}/swapped_port.py:DecoderLayer"
    assert inspect(target=target, arguments=("--layer", "4"))[0] == 0
    code, record = inspect(target=target, arguments=("--layer", "5"))
    assert code == 1
    assert record["trial"]["repairs"] == ["w1 (gate) and w3 (up) are swapped"]
    assert inspect(target=f"{EXAMPLES}/swapped_device_layer.py:SwappedDeviceLayer")[0] == 1


def test_two_mistakes_are_both_proved(inspect: Inspect) -> None:
    _, record = inspect(PLANTED["k_and_v_swapped"][0] + PLANTED["gate_and_up_swapped"][0])
    assert len(record["trial"]["repairs"]) == 2
    assert record["trial"]["repaired_error"] < 1e-3


def test_a_mean_says_of_how_many(inspect: Inspect) -> None:
    _, record = inspect(PLANTED["norms_averaged_over_heads"][0])
    texts = [finding["text"] for finding in record["findings"]]
    assert "self_attn.q_norm.weight: values are means of 8 elements of q_norm" in texts


def test_a_buffer_that_was_never_bound_is_named(inspect: Inspect, write_port: Any) -> None:
    target = write_port(
        _PORT.format(spoil="        del state[BIAS]")
        + """
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        router = self.moe.router
        del router._buffers["correction_bias"]
        router.register_buffer("correction_bias", torch.zeros(config.num_local_experts), persistent=False)
"""
    )
    code, record = inspect(target=target)
    assert code == 1
    assert record["findings"][0]["mistake"] == "missing"
    assert "was never bound: it holds 0 everywhere" in record["findings"][0]["text"]


# Layouts that a port may choose: its forward undoes what its conversion does.
MEANT = {
    "up_before_gate": """
gate, up = state["moe.gate_up_proj"].chunk(2, 1)
state["moe.gate_up_proj"] = torch.cat((up, gate), 1)
self.moe.activate = lambda up, gate: port.Moe.activate(self.moe, gate, up)
""",
    "experts_reversed_with_their_router": """
for name in ("moe.gate_up_proj", "moe.down_proj", "moe.router.weight", BIAS):
    state[name] = state[name].flip(0)
""",
    "a_norm_folded_into_what_follows": """
self.input_layernorm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
state[QKV] = state[QKV] * state["input_layernorm.weight"]
state["input_layernorm.weight"] = torch.ones_like(state["input_layernorm.weight"])
""",
    "a_scale_of_a_norm_taken_by_its_readers": """
scale = 2.0 ** (torch.arange(128) % 5 - 2)
state["post_attention_layernorm.weight"] = state["post_attention_layernorm.weight"] / scale
for name in ("moe.gate_up_proj", "moe.router.weight"):
    state[name] = state[name] * scale
""",
    "a_scale_of_values_taken_by_o_proj": """
scale = 2.0 ** (torch.arange(64) % 3)
state[QKV][320:] *= scale[:, None]
heads = scale.view(2, 1, 32).expand(2, 4, 32).flatten()
state["self_attn.o_proj.weight"] = state["self_attn.o_proj.weight"] / heads
""",
    "half_of_the_experts_laid_out_otherwise": """
def split(gate_up):
    halves = gate_up.chunk(2, 0)
    return torch.stack(halves, 1).flatten(0, 1)
for expert in range(6):
    state["moe.gate_up_proj"][expert] = split(state["moe.gate_up_proj"][expert])
load = self.load_state_dict
class Undone(torch.nn.Module):
    def __init__(self, moe):
        super().__init__()
        self.moe = moe
    def forward(self, states):
        held = self.moe.gate_up_proj.data
        undone = [torch.cat((m[0::2], m[1::2])) if e < 6 else m for e, m in enumerate(held)]
        self.moe.gate_up_proj.data = torch.stack(undone)
        try:
            return self.moe._forward(states)
        finally:
            self.moe.gate_up_proj.data = held
if not hasattr(self.moe, "_forward"):
    self.moe._forward = self.moe.forward
    self.moe.forward = Undone(self.moe).forward
""",
}


def test_a_scale_that_was_moved_is_named_in_one_note(inspect: Inspect) -> None:
    _, record = inspect(MEANT["a_scale_of_a_norm_taken_by_its_readers"])
    assert [finding["text"] for finding in record["findings"]] == [
        "post_attention_layernorm is multiplied by a number for each channel, 0.25 to 4, "
        "and gate (router), w1 (gate), w3 (up) by the inverse"
    ]


# A port whose weights torch does not see: a list is no submodule.
_HIDDEN_PORT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import minimal_port
import torch

class Port(torch.nn.Module):
    sites = {{{{}}}}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.hidden = [minimal_port.DecoderLayer(config, layer_idx)]

    def convert_state_dict(self, tensors, config, layer_idx):
        state = dict(tensors)
{{spoil}}
        self.hidden[0].load_state_dict(state)
        return {{{{}}}}

    def forward(self, *arguments):
        return self.hidden[0](*arguments)
"""


@pytest.mark.parametrize(("spoil", "exit_code"), [("pass", 0), ('state["self_attn.k_norm.weight"] *= 2', 1)])
def test_weights_that_torch_does_not_see_are_judged_by_the_output(
    command: Any, tiny: Path, write_port: Any, spoil: str, exit_code: int
) -> None:
    target = write_port(_HIDDEN_PORT.format(spoil=f"        {spoil}"))
    result = command(mm2_test, "weights", "--model", tiny, "--target", target, "--quiet")
    assert result.exit_code == exit_code
    told = "gives the right output; its weights were not all seen"
    assert (told in result.stdout.splitlines()[0]) is (exit_code == 0)
    assert ("the port's output was compared instead, and is right" in result.stdout) is (exit_code == 0)


@pytest.mark.parametrize("name", MEANT)
def test_a_layout_that_the_forward_undoes_is_right(inspect: Inspect, name: str) -> None:
    code, record = inspect(MEANT[name])
    assert (code, record["verdict"]) == (0, "pass")
    assert all(finding["severity"] == "note" for finding in record["findings"])


# FP8 codes of 128 x 128 blocks up to 240, as Trainium's FP8 goes, and what a forward makes of them.
_REQUANTISE = """
def requantise(weight):
    rows, columns = weight.shape
    blocks = [[block for block in row.split(128, 1)] for row in weight.float().split(128, 0)]
    scales = [[block.abs().amax() / 240 for block in row] for row in blocks]
    {mistake}
    codes = [[(block / block.abs().amax() * 240).to(torch.float8_e4m3fn) for block in row] for row in blocks]
    parts = [[c.float() * s for c, s in zip(*row)] for row in zip(codes, scales)]
    return torch.cat([torch.cat(row, 1) for row in parts]).to(weight.dtype)
state[QKV] = requantise(state[QKV])
for name in ("moe.gate_up_proj", "moe.down_proj"):
    state[name] = torch.stack([requantise(expert) for expert in state[name]])
"""


def test_a_port_that_quantises_is_unclear_and_not_wrong(inspect: Inspect) -> None:
    code, record = inspect(_REQUANTISE.format(mistake=""))
    assert (code, record["verdict"]) == (0, "warn")
    unclear = [finding for finding in record["findings"] if finding["severity"] == "suspect"]
    assert {finding["mistake"] for finding in unclear} == {"computed"}
    assert all("right on weights that quantisation keeps" in finding["text"] for finding in unclear)
    assert record["trial"]["kept_error"] < 1e-5 < record["trial"]["error"]


@pytest.mark.parametrize(
    "mistake",
    [
        # Scales of the row above, of the largest code that other FP8 has, and of one block for all.
        "scales = scales[-1:] + scales[:-1]",
        "scales = [[scale * 240 / 448 for scale in row] for row in scales]",
        pytest.param("scales = [[scales[0][0] for scale in row] for row in scales]", marks=pytest.mark.slow),
    ],
)
def test_a_port_that_quantises_with_the_wrong_scales_is_wrong(inspect: Inspect, mistake: str) -> None:
    code, record = inspect(_REQUANTISE.format(mistake=mistake))
    assert (code, record["verdict"]) == (1, "fail")
    assert any(finding["mistake"] == "computed" for finding in record["findings"])


# INT8 codes with a scale for each 32 neighbours of a row, or for each block of 128 x 128.
_QUANTISE_INT8 = """
def quantise(weight):
    values = weight.float()
    rows, columns = values.shape
    height, width = {size}
    height, width = min(height, rows), min(width or columns, columns)
    parts = values.reshape(rows // height, height, columns // width, width)
    scales = parts.abs().amax((1, 3), keepdim=True) / {largest}
    codes = (parts / scales).round().clamp(-127, 127).to(torch.int8)
    {mistake}
    return (codes.float() * scales).reshape(rows, columns).to(weight.dtype)
state[QKV] = quantise(state[QKV])
for name in ("moe.gate_up_proj", "moe.down_proj"):
    state[name] = torch.stack([quantise(expert) for expert in state[name]])
"""


@pytest.mark.parametrize("size", ["1, 32", "128, 128"])
def test_a_port_that_quantises_to_int8_is_unclear_and_not_wrong(inspect: Inspect, size: str) -> None:
    code, record = inspect(_QUANTISE_INT8.format(size=size, largest=127, mistake=""))
    assert (code, record["verdict"]) == (0, "warn")
    assert all("rounded" in finding["text"] for finding in record["findings"])
    assert record["trial"]["kept_error"] < 1e-5 < record["trial"]["error"]


def test_a_port_that_quantises_to_int8_with_the_wrong_scales_is_not_cleared(inspect: Inspect) -> None:
    mistake = "scales = scales.roll(1, 0)"
    _, record = inspect(_QUANTISE_INT8.format(size="1, None", largest=127, mistake=mistake))
    assert record["trial"]["kept_error"] > record["trial"]["limit"]


KEY_NORM_OF_QUERY = """
width = state["self_attn.k_norm.weight"].numel()
state["self_attn.k_norm.weight"] = state["self_attn.q_norm.weight"][:width].clone()
"""
WRONG_FORWARD = "self.moe.activate = lambda gate, up: torch.relu(gate) * up"


def test_a_tensor_that_never_got_its_weight_explains_all(command: Any, tiny: Path, write_port: Any) -> None:
    told = trace_text(command, tiny, write_port, KEY_NORM_OF_QUERY)
    assert "[wrong]   self_attn.k_norm.weight: is named k_norm, and holds q_norm" in told
    assert "With k_norm right it agrees to" in told
    assert "nothing else is wrong" in told


def test_what_a_missing_weight_does_not_explain_is_the_forwards(
    command: Any, tiny: Path, write_port: Any
) -> None:
    told = trace_text(command, tiny, write_port, f"{KEY_NORM_OF_QUERY}{WRONG_FORWARD}")
    assert "with k_norm right still by" in told
    assert "the forward is wrong too" in told


def test_a_swap_beside_a_wrong_forward_is_found(inspect: Inspect) -> None:
    code, record = inspect(f"{PLANTED['gate_and_up_swapped'][0]}\nself.moe.activate = _half")
    assert code == 1
    assert record["trial"]["repairs"] == []
    assert record["trial"]["partial_repairs"] == ["w1 (gate) and w3 (up) are swapped"]


def test_weights_under_a_wrong_forward_are_not_called_right(
    command: Any, tiny: Path, write_port: Any
) -> None:
    told = trace_text(command, tiny, write_port, WRONG_FORWARD)
    assert told.startswith("WARN: no fault is seen in the weights of layer 0")
    assert told.splitlines()[0].endswith("and the output differs")


def test_all_layers_are_told_in_groups(command: Any, small: Path, write_port: Any) -> None:
    spoil = 'if layer_idx == 1:\n    state["moe.down_proj"][[5, 6]] = state["moe.down_proj"][[6, 5]]'
    target = write_port(_of_layers(spoil))
    arguments = ("weights", "--model", small, "--target", target, "--all-layers", "--no-load", "--quiet")
    result = command(mm2_test, *arguments)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL: the weights of layer 1 in")
    assert "PASS: the weights of layers 0, 2" in result.stdout
    record = json.loads(command(mm2_test, *arguments, "--json").stdout)
    assert [group["layers"][0] for group in record["groups"]] == [1, 0]
    refused = command(mm2_test, *arguments, "--layer", "1")
    assert refused.exit_code == 2


def test_memory_beyond_need_is_told(inspect: Inspect) -> None:
    _, record = inspect("pass")
    assert record["memory"] == []
    wasteful = """
self.self_attn.float()
held = [tensor.float() for tensor in state.values()]
"""
    _, record = inspect(wasteful)
    kept, made = record["memory"]
    assert kept.startswith("q_proj, k_proj, v_proj, o_proj, q_norm, k_norm are held in float32")
    assert "float32 temporaries at once" in made


def trace_text(command: Any, tiny: Path, write_port: Any, spoil: str) -> str:
    lines = spoil.strip().replace("\n", "\n        ")
    target = write_port(_PORT.format(spoil=f"        {lines}"))
    text: str = command(mm2_test, "weights", "--model", tiny, "--target", target, "--quiet").stdout
    return text


def _of_layers(spoil: str) -> str:
    lines = spoil.replace("\n", "\n        ")
    port = _PORT.format(spoil=f"        {lines}")
    return port.replace(
        "self.spoil(state, tensors, config)", "self.spoil(state, tensors, config, layer_idx)"
    ).replace(
        "def spoil(self, state, tensors, config):", "def spoil(self, state, tensors, config, layer_idx):"
    )


def test_a_wrong_forward_is_no_fault_of_the_weights(inspect: Inspect) -> None:
    code, record = inspect("self.moe.activate = lambda gate, up: torch.relu(gate) * up")
    assert (code, record["verdict"], record["findings"]) == (0, "warn", [])
    assert not record["trial"]["is_right"]


def test_a_port_that_cannot_run_here_is_traced_all_the_same(inspect: Inspect) -> None:
    code, record = inspect("self.moe.activate = None")
    assert (code, record["verdict"], record["findings"]) == (0, "warn", [])
    assert "not callable" in record["trial"]["failure"]


def test_a_conversion_that_knows_its_own_layer_is_right_elsewhere(inspect: Inspect) -> None:
    spoil = f"if layer_idx == 1:\n    {PLANTED['scaled_twice'][0]}".replace("layer_idx", "tensors.layer")
    assert inspect(spoil, arguments=("--layer", "0"))[0] == 0
    assert inspect(spoil, arguments=("--layer", "1"))[0] == 1


def test_what_only_the_checkpoint_shows_is_found_in_the_loaded_port(inspect: Inspect) -> None:
    # Behaves on made numbers, and halves those of the checkpoint.
    code, record = inspect(
        """
if type(tensors).__name__ != "GeneratedTensors":
    state["moe.down_proj"] = state["moe.down_proj"] * 0.5
"""
    )
    assert code == 1
    assert [finding["mistake"] for finding in record["findings"]] == ["scaled"]
    assert "its norm is 0.5 times" in record["findings"][0]["text"]


def test_text_names_the_verdict_and_the_proof(command: Any, tiny: Path, write_port: Any) -> None:
    spoil = PLANTED["gate_and_up_swapped"][0].strip().replace("\n", "\n        ")
    target = write_port(_PORT.format(spoil=f"        {spoil}"))
    result = command(mm2_test, "weights", "--model", tiny, "--target", target, "--quiet")
    assert result.stdout.startswith("FAIL: the weights of layer 0")
    assert "[wrong]   w1 (gate) and w3 (up) are swapped" in result.stdout
    assert "rows 0–63 w3 (up), rows 64–127 w1 (gate)" in result.stdout


def test_a_compiled_layer_has_no_conversion(command: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "layer.pt2").write_bytes(b"")
    result = command(mm2_test, "weights", "--model", tiny, "--target", f"traced:{tmp_path}/layer.pt2")
    assert result.exit_code == 2
    assert "there is no conversion to trace" in result.stderr


def test_a_port_of_one_size_is_traced_at_it(command: Any, toy: Path, write_port: Any) -> None:
    spoil = "        assert config.num_local_experts == 32, 'other sizes are not built'"
    arguments = ("--model", toy, "--target", write_port(_PORT.format(spoil=spoil)), "--quiet")
    refused = command(mm2_test, "weights", *arguments)
    assert refused.exit_code == 3
    assert "other sizes are not built" in refused.stderr
    assert "--full-size" in refused.stderr
    assert command(mm2_test, "weights", *arguments, "--full-size").exit_code == 0


# What every rank does that takes its number for 0: a Python constant in a traced graph.
_RANK_0 = """
import sys
sys.path.insert(0, {examples!r})
import tensor_parallel_port

class Port(tensor_parallel_port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        state["self_attn.q_norm.weight"] = tensors["self_attn.q_norm.weight"][:128]
        return state
"""


# Two heads of one rank change places.
_RANK_1 = """
import sys
sys.path.insert(0, {examples!r})
import tensor_parallel_port
import torch
import torch.distributed as dist

class Port(tensor_parallel_port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        if dist.get_rank() == 1:
            first, second, *others = state["self_attn.q_norm.weight"].split(config.head_dim)
            state["self_attn.q_norm.weight"] = torch.cat((second, first, *others))
        return state
"""


@pytest.mark.slow
def test_ranks_are_traced_together(process: Any, tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "rank_0.py").write_text(_RANK_0.format(examples=str(EXAMPLES)))
    arguments = ("weights", "--model", tiny, "--tp-degree", 2, "--json", "--quiet", "--target")
    right = process(*arguments, f"{EXAMPLES}/tensor_parallel_port.py:DecoderLayer")
    assert right.returncode == 0, right.stderr
    record = json.loads(right.stdout)
    assert (record["num_ranks"], record["findings"]) == (2, [])
    wrong = process(*arguments, f"{tmp_path}/rank_0.py:Port")
    assert wrong.returncode == 1, wrong.stderr
    text = json.loads(wrong.stdout)["findings"][0]["text"]
    assert text == "missing: 128 of 256 elements of q_norm land nowhere"
    (tmp_path / "rank_1.py").write_text(_RANK_1.format(examples=str(EXAMPLES)))
    swapped = process(*arguments, f"{tmp_path}/rank_1.py:Port")
    assert swapped.returncode == 1, swapped.stderr
    assert json.loads(swapped.stdout)["findings"][0]["text"].endswith("(on rank 1)")


@pytest.mark.parametrize(("order", "exit_code"), [((0, 1, 2, 3), 0), ((1, 0, 2, 3), 1)])
def test_order_of_a_few_experts_stacked_by_rows_is_read(
    order: tuple[int, ...], exit_code: int, command: Any, write_port: Any, tmp_path: Path
) -> None:
    model = SyntheticModel(num_hidden_layers=1, num_local_experts=4, num_experts_per_tok=2)
    synthesize(tmp_path / "model", model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    target = write_port(f"{_STACKED_PORT}\nORDER = {order}\n")
    result = command(mm2_test, "weights", "--model", tmp_path / "model", "--target", target)
    assert result.exit_code == exit_code
    named = "w1 (gate), w2 (down), w3 (up): experts 0 and 1 are exchanged"
    assert (named in result.stdout) is (exit_code == 1)
