"""`mm2-test weights`: right conversions pass, whatever their layout; every planted mistake is found and named."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"

_IMPORTS = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import minimal_port
import port
import tensor_parallel_port
import torch
import torch.distributed as dist
"""

# A port whose conversion one method spoils, after the example's.
_PORT = """
GATE_UP, DOWN = "moe.gate_up_proj", "moe.down_proj"
ROUTER, BIAS = "moe.router.weight", "moe.router.correction_bias"
QKV, O_PROJ = "self_attn.qkv_proj.weight", "self_attn.o_proj.weight"
Q_NORM, K_NORM = "self_attn.q_norm.weight", "self_attn.k_norm.weight"
FIRST_NORM, SECOND_NORM = "input_layernorm.weight", "post_attention_layernorm.weight"
# A scale of 128 channels that BF16 keeps.
SCALE = 2.0 ** (torch.arange(128) % 5 - 2)

def swapped(weight, dim):
    return torch.cat(weight.chunk(2, dim)[::-1], dim)

def interleaved(weight, dim):
    return torch.stack(weight.chunk(2, dim), dim + 1).flatten(dim, dim + 1)

def torn(weight):
    return weight.mT.reshape(weight.shape)

def in_text_order(weight):
    return weight[sorted(range(len(weight)), key=str)]

class Port(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        self.spoil(state, tensors, config)
        return state

    def spoil(self, state, tensors, config):
{spoil}
"""


def _spoilt(spoil: str) -> str:
    return _IMPORTS + _PORT.format(spoil=textwrap.indent(spoil.strip(), " " * 8))


# A port that stacks its experts by rows, one matrix for all w1, one for all w2, one for all w3.
_STACKED_PORT = """
WEIGHTS = ("w1", "w2", "w3")

class Expert:
    def __init__(self, moe, number):
        self.moe, self.number = moe, number

    def __call__(self, tokens):
        stacked = (getattr(self.moe, name) for name in WEIGHTS)
        w1, w2, w3 = (weight.chunk(len(self.moe.experts))[self.number] for weight in stacked)
        return (torch.nn.functional.silu(tokens @ w1.T) * (tokens @ w3.T)) @ w2.T

class Port(minimal_port.DecoderLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        moe, num_experts = self.block_sparse_moe, config.num_local_experts
        for name in WEIGHTS:
            rows, columns = getattr(moe.experts[0], name).weight.shape
            setattr(moe, name, torch.nn.Parameter(torch.empty(num_experts * rows, columns)))
        del moe.experts
        moe.experts = [Expert(moe, number) for number in range(num_experts)]

    def convert_state_dict(self, tensors, config, layer_idx):
        state = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
        prefix = "block_sparse_moe."
        for name in WEIGHTS:
            experts = [tensors[f"{prefix}experts.{number}.{name}.weight"] for number in ORDER]
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
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """`tiny`: 12 experts, of which 10 comes before 2 as text; `few`: stacked by rows all are listed in a text."""
    folder = tmp_path_factory.mktemp("models")
    few = replace(MODEL, num_local_experts=4, num_experts_per_tok=2)
    for name, model in (("tiny", MODEL), ("few", few)):
        synthesize(folder / name, model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return {name: folder / name for name in ("tiny", "few")}


@pytest.fixture
def inspect(command: Any, models: dict[str, Path], write_port: Any) -> Inspect:
    """Exit code and JSON for a target, or for the example port with a body of `spoil`."""

    def run(
        spoil: str = "", *, target: str = "", arguments: tuple[str, ...] = ()
    ) -> tuple[int, dict[str, Any]]:
        target = target or write_port(_spoilt(spoil))
        result = command(
            mm2_test, "weights", "--model", models["tiny"], "--target", target, "--json", *arguments
        )
        return result.exit_code, json.loads(result.stdout)

    return run


@pytest.mark.parametrize(
    "target",
    ["builtin", "reference"]
    + [f"{EXAMPLES}/{file}_port.py:DecoderLayer" for file in ("minimal", "cached", "tensor_parallel")],
)
def test_a_right_port_passes(inspect: Inspect, target: str) -> None:
    code, record = inspect(target=target)
    assert (code, record["verdict"], record["findings"]) == (0, "pass", [])
    assert record["trial"]["error"] < 1e-5
    assert record["is_loaded"]
    assert len(record["compared"]) == 13


K_NORM_OF_QUERY = "state[K_NORM] = state[Q_NORM][:64].clone()"
INTERLEAVED_HEADS = """
q = state[QKV][:256].unflatten(0, (8, 32))
state[QKV][:256] = torch.cat((interleaved(q[:, :16], 1), q[:, 16:]), 1).flatten(0, 1)
"""
QUANTISED_GATE = """
step = state[ROUTER].abs().amax() / 127
state[ROUTER] = (state[ROUTER] / step).round() * step
"""
TEXT_ORDER = "for name in (GATE_UP, DOWN): state[name] = in_text_order(state[name])"
OWN_SCALE = "state[DOWN] = state[DOWN] / state[DOWN].abs().amax()"

# What is planted; the mistake that must be named, and the tensors that it must be about. REPORTS has more of them.
PLANTED = {
    "down_reshaped_not_transposed": ("state[DOWN] = torn(state[DOWN])", "transposed", "w2"),
    # Twice as wide as it is high: each of its torn columns still holds elements of a single row.
    "wide_matrix_reshaped_not_transposed": ("state[O_PROJ] = torn(state[O_PROJ])", "transposed", "o_proj"),
    "experts_in_text_order": (TEXT_ORDER, "order", "w1 w2 w3"),
    "down_alone_in_text_order": ("state[DOWN] = in_text_order(state[DOWN])", "order", "w2"),
    "one_expert_twice": ("state[DOWN][4] = state[DOWN][3]", "missing", "w2"),
    "one_expert_zero": ("state[GATE_UP][5] = 0", "missing", "w1 w3"),
    "bias_rounded": ("state[BIAS] = state[BIAS].bfloat16()", "dtype", "e_score_correction_bias"),
    "gate_quantised": (QUANTISED_GATE, "dtype", "gate"),
    "q_rows_interleaved": (INTERLEAVED_HEADS, "order", "q_proj"),
    "norms_of_the_first_head": ("state[Q_NORM] = state[Q_NORM][:32].repeat(8)", "missing", "q_norm"),
    "scaled_twice": ("state[DOWN] = state[DOWN] * 0.37", "scaled", "w2"),
    "one_added_to_a_norm": ("state[FIRST_NORM] = state[FIRST_NORM] + 1", "scaled", "input_layernorm"),
    "a_scale_of_the_checkpoints_own": (OWN_SCALE, "computed", "w2"),
}

HALF_INTERLEAVED = """
half = config.num_local_experts // 2
state[GATE_UP][half:] = interleaved(state[GATE_UP][half:], 1)
"""
HALVES_OF_ROWS = "state[DOWN][3].unflatten(0, (2, -1)).transpose(0, 1).flatten(0, 1)"
# A forward that takes gate and up from rows in turns.
TAKES_TURNS = """
def activate(gate, up):
    columns = torch.cat((gate, up), -1)
    return port.Moe.activate(self.moe, columns[..., 0::2], columns[..., 1::2])
self.moe.activate = activate
"""
GATE_WITHOUT_SCALE = """
state[SECOND_NORM] = state[SECOND_NORM] / SCALE
state[GATE_UP] = state[GATE_UP] * SCALE
"""

# Mistakes of some experts alone, of a scale that one reader did not take, and what must be said of them.
PLANTED_AND_PROVED = {
    "half_of_the_experts_interleaved": (
        HALF_INTERLEAVED,
        "w1 (gate), w3 (up) of experts 6–11 lie otherwise than of experts 0–5",
    ),
    "gate_and_up_in_turns": (
        "state[GATE_UP] = interleaved(state[GATE_UP], 1)",
        "rows of w1 (gate) and w3 (up) take turns, and the forward takes them for halves",
    ),
    "gate_and_up_in_halves": (
        TAKES_TURNS,
        "rows of w1 (gate) and w3 (up) lie in halves, and the forward lets them take turns",
    ),
    "gate_and_up_of_one_expert_swapped": (
        "state[GATE_UP][4] = swapped(state[GATE_UP][4], 0)",
        "w1 (gate), w3 (up) of expert 4 lie otherwise than of experts 0, 1, 2, 3, 5, 6, 7, 8, …",
    ),
    "down_of_one_expert_transposed_in_rows": (
        f"state[DOWN][3] = {HALVES_OF_ROWS}",
        "w2 (down) of expert 3 lie otherwise than of experts 0, 1, 2, 4, 5, 6, 7, 8, …",
    ),
    "up_of_each_expert_scaled": (
        "state[GATE_UP][:, 64:] *= torch.linspace(0.8, 1.25, 12)[:, None, None]",
        "w3 (up) is multiplied by a number for each expert, 0.801 to 1.25",
    ),
    "gate_without_the_scale_of_its_norm": (
        GATE_WITHOUT_SCALE,
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


@pytest.mark.slow
def test_experts_have_the_numbers_of_the_checkpoint_though_a_smaller_layer_was_traced(
    command: Any, toy: Path, write_port: Any
) -> None:
    target = write_port(_spoilt(HALF_INTERLEAVED))
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
    named = [set(finding["tensors"]) for finding in wrong if finding["mistake"] == mistake]
    assert any(set(tensors.split()) <= found for found in named), record["findings"]


def test_the_example_of_a_swapped_layer_is_found_there_alone(inspect: Inspect) -> None:
    target = f"{EXAMPLES}/swapped_port.py:DecoderLayer"
    assert inspect(target=target, arguments=("--layer", "4"))[0] == 0
    code, record = inspect(target=target, arguments=("--layer", "5"))
    assert code == 1
    assert record["trial"]["repairs"] == ["w1 (gate) and w3 (up) are swapped"]
    assert inspect(target=f"{EXAMPLES}/swapped_device_layer.py:SwappedDeviceLayer")[0] == 1


# Layouts that a port may choose: its forward undoes what its conversion does.
SCALE_MOVED = f"{GATE_WITHOUT_SCALE}state[ROUTER] = state[ROUTER] * SCALE"
MEANT = {
    "up_before_gate": """
state[GATE_UP] = swapped(state[GATE_UP], 1)
self.moe.activate = lambda up, gate: port.Moe.activate(self.moe, gate, up)
""",
    "experts_reversed_with_their_router": """
for name in (GATE_UP, DOWN, ROUTER, BIAS):
    state[name] = state[name].flip(0)
""",
    "a_norm_folded_into_what_follows": """
self.input_layernorm.forward = lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
state[QKV] = state[QKV] * state[FIRST_NORM]
state[FIRST_NORM] = torch.ones_like(state[FIRST_NORM])
""",
    "a_scale_of_values_taken_by_o_proj": """
scale = 2.0 ** (torch.arange(64) % 3)
state[QKV][320:] *= scale[:, None]
state[O_PROJ] = state[O_PROJ] / scale.view(2, 1, 32).expand(2, 4, 32).flatten()
""",
    "half_of_the_experts_laid_out_otherwise": """
state[GATE_UP][:6] = interleaved(state[GATE_UP][:6], 1)
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


@pytest.mark.parametrize("name", MEANT)
def test_a_layout_that_the_forward_undoes_is_right(inspect: Inspect, name: str) -> None:
    code, record = inspect(MEANT[name])
    assert (code, record["verdict"]) == (0, "pass")
    assert all(finding["severity"] == "note" for finding in record["findings"])


# A port whose weights torch does not see: a list is no submodule.
_HIDDEN_PORT = """
class Port(torch.nn.Module):
    sites = {{}}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.hidden = [minimal_port.DecoderLayer(config, layer_idx)]

    def convert_state_dict(self, tensors, config, layer_idx):
        state = dict(tensors)
        {spoil}
        self.hidden[0].load_state_dict(state)
        return {{}}

    def forward(self, *arguments):
        return self.hidden[0](*arguments)
"""

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
for name in (GATE_UP, DOWN):
    state[name] = torch.stack([requantise(expert) for expert in state[name]])
"""


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
    scales = parts.abs().amax((1, 3), keepdim=True) / 127
    codes = (parts / scales).round().clamp(-127, 127).to(torch.int8)
    {mistake}
    return (codes.float() * scales).reshape(rows, columns).to(weight.dtype)
state[QKV] = quantise(state[QKV])
for name in (GATE_UP, DOWN):
    state[name] = torch.stack([quantise(expert) for expert in state[name]])
"""


SWAPPED_GATE_UP = "state[GATE_UP] = swapped(state[GATE_UP], 1)"
SWAPPED_KEY_VALUE = "state[QKV][256:] = swapped(state[QKV][256:], 0)"
AVERAGED_NORMS = """
for name, heads in ((Q_NORM, 8), (K_NORM, 2)):
    state[name] = state[name].view(heads, 32).mean(0).repeat(heads)
"""
WRONG_FORWARD = "self.moe.activate = lambda gate, up: torch.relu(gate) * up"
HALF_WRONG_FORWARD = "self.moe.activate = lambda gate, up: torch.nn.functional.silu(gate) * up * 1.1"
# A buffer that is no part of the state dict, and stays as the constructor made it.
UNBOUND = """
del state[BIAS], self.moe.router._buffers["correction_bias"]
bias = torch.zeros(config.num_local_experts)
self.moe.router.register_buffer("correction_bias", bias, persistent=False)
"""
# Behaves on made numbers, and halves those of the checkpoint.
HALVED = 'if type(tensors).__name__ != "GeneratedTensors": state[DOWN] = state[DOWN] * 0.5'
WASTEFUL = """
self.self_attn.float()
held = [tensor.float() for tensor in state.values()]
"""
# Reports whose text is held, by name: what spoils the port.
SPOILT = {
    "right": "pass",
    "swapped": SWAPPED_GATE_UP,
    "swapped_beside_a_wrong_forward": f"{SWAPPED_GATE_UP}\n{HALF_WRONG_FORWARD}",
    "two_mistakes": f"{SWAPPED_KEY_VALUE}\n{SWAPPED_GATE_UP}",
    "norms_averaged": AVERAGED_NORMS,
    "scale_moved": SCALE_MOVED,
    "one_never_loaded": K_NORM_OF_QUERY,
    "one_never_loaded_and_a_wrong_forward": f"{K_NORM_OF_QUERY}\n{WRONG_FORWARD}",
    "buffer_never_bound": UNBOUND,
    "wrong_forward": WRONG_FORWARD,
    "forward_that_cannot_run": "self.moe.activate = None",
    "fp8": _REQUANTISE.format(mistake=""),
    "int8_by_group": _QUANTISE_INT8.format(size="1, 32", mistake=""),
    "int8_by_block": _QUANTISE_INT8.format(size="128, 128", mistake=""),
    "int8_of_other_rows": _QUANTISE_INT8.format(size="1, None", mistake="scales = scales.roll(1, 0)"),
    "halved_as_loaded": HALVED,
    "wasteful": WASTEFUL,
}
OTHER_PORTS = {
    "hidden": _HIDDEN_PORT.format(spoil="pass"),
    "hidden_and_wrong": _HIDDEN_PORT.format(spoil='state["self_attn.k_norm.weight"] *= 2'),
    "few_experts_stacked": f"{_STACKED_PORT}\nORDER = (0, 1, 2, 3)\n",
    "few_experts_stacked_in_another_order": f"{_STACKED_PORT}\nORDER = (1, 0, 2, 3)\n",
}
# Errors of the trial, which differ from machine to machine, and lines of the example.
_FIGURE = re.compile(r"(?<=( to| by|py:)) ?\d[\d.e-]*\d(?=[ ,:;.)])")


@pytest.mark.parametrize("name", [*SPOILT, *OTHER_PORTS])
def test_the_report_tells_what_lies_where_and_what_is_wrong(
    command: Any, models: dict[str, Path], write_port: Any, expect_text: Any, name: str
) -> None:
    target = write_port(_spoilt(SPOILT[name]) if name in SPOILT else _IMPORTS + OTHER_PORTS[name])
    model = models["few" if "few_experts" in name else "tiny"]
    result = command(mm2_test, "weights", "--model", model, "--target", target, "--quiet")
    report, _, _ = result.stdout.replace(target, "PORT").partition("\n\nNext\n")
    expect_text(f"{name}.txt", {f"exit code {result.exit_code}": _FIGURE.sub(" …", report)})


def test_all_layers_are_told_in_groups(command: Any, small: Path, write_port: Any) -> None:
    target = write_port(_spoilt("if tensors.layer == 1: state[DOWN][[5, 6]] = state[DOWN][[6, 5]]"))
    arguments = ("weights", "--model", small, "--target", target, "--all-layers", "--no-load", "--quiet")
    result = command(mm2_test, *arguments)
    assert result.exit_code == 1
    assert result.stdout.startswith("FAIL: the weights of layer 1 in")
    assert "PASS: the weights of layers 0, 2" in result.stdout
    record = json.loads(command(mm2_test, *arguments, "--json").stdout)
    assert [group["layers"][0] for group in record["groups"]] == [1, 0]
    assert command(mm2_test, *arguments, "--layer", "1").exit_code == 2


def test_a_compiled_layer_has_no_conversion(command: Any, models: dict[str, Path], tmp_path: Path) -> None:
    (tmp_path / "layer.pt2").write_bytes(b"")
    result = command(
        mm2_test, "weights", "--model", models["tiny"], "--target", f"traced:{tmp_path}/layer.pt2"
    )
    assert result.exit_code == 2
    assert "there is no conversion to trace" in result.stderr


def test_a_port_of_one_size_is_traced_at_it(command: Any, toy: Path, write_port: Any) -> None:
    target = write_port(_spoilt("assert config.num_local_experts == 32, 'other sizes are not built'"))
    arguments = ("--model", toy, "--target", target, "--quiet")
    refused = command(mm2_test, "weights", *arguments)
    assert refused.exit_code == 3
    assert "other sizes are not built" in refused.stderr
    assert "--full-size" in refused.stderr
    assert command(mm2_test, "weights", *arguments, "--full-size").exit_code == 0


# A port that divides its weights, and changes those of a rank.
_RANKS = """
class Port(tensor_parallel_port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        {spoil}
        return state
"""
# What every rank does that takes its number for 0: a Python constant in a traced graph.
_RANK_0 = 'state["self_attn.q_norm.weight"] = tensors["self_attn.q_norm.weight"][:128]'
# Two heads of one rank change places.
_RANK_1 = """if dist.get_rank() == 1:
            first, second, *others = state["self_attn.q_norm.weight"].split(config.head_dim)
            state["self_attn.q_norm.weight"] = torch.cat((second, first, *others))"""


@pytest.mark.slow
def test_ranks_are_traced_together(process: Any, models: dict[str, Path], write_port: Any) -> None:
    def inspect(target: str) -> tuple[int, dict[str, Any]]:
        arguments = ("weights", "--model", models["tiny"], "--tp-degree", 2, "--json", "--quiet", "--target")
        result = process(*arguments, target)
        return result.returncode, json.loads(result.stdout)

    code, record = inspect(f"{EXAMPLES}/tensor_parallel_port.py:DecoderLayer")
    assert (code, record["num_ranks"], record["findings"]) == (0, 2, [])
    code, record = inspect(write_port(_IMPORTS + _RANKS.format(spoil=_RANK_0), file="rank_0.py"))
    text = "missing: 128 of 256 elements of q_norm land nowhere"
    assert (code, record["findings"][0]["text"]) == (1, text)
    code, record = inspect(write_port(_IMPORTS + _RANKS.format(spoil=_RANK_1), file="rank_1.py"))
    assert code == 1
    assert record["findings"][0]["text"].endswith("(on rank 1)")
