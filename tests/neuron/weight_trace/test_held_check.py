"""Weights that a port holds of a layer: right ports hold all in any layout, and each fault is told with its experts."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.capture.manifest import HeldWeights, WeightMistake
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.spec import ModelSpec
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.devices.weights import WeightLoader
from neuron.ports.targets import find_target
from neuron.weight_trace.held_check import check_part, conclude
from neuron.weight_trace.source_lines import LineTable, NotedTensors, PortLines

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"
MODEL = SyntheticModel(
    num_hidden_layers=1,
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
GATE_UP, DOWN, QKV = "moe.gate_up_proj", "moe.down_proj", "self_attn.qkv_proj.weight"
ROUTER, BIAS = "moe.router.weight", "moe.router.correction_bias"

# Names that a statement which spoils a port's weights may use, besides `state`.
OF_EXPERTS = (GATE_UP, DOWN, ROUTER, BIAS)
NAMES = {"torch": torch, "GATE_UP": GATE_UP, "DOWN": DOWN, "QKV": QKV, "BIAS": BIAS, "OF_EXPERTS": OF_EXPERTS}

Hold = Callable[..., HeldWeights]


@pytest.fixture(scope="module")
def tiny(make_model: Any) -> Path:
    made: Path = make_model(MODEL, torch.float8_e4m3fn)
    return made


@pytest.fixture
def hold(tiny: Path) -> Hold:
    """Loads an example port, whose weights `state` some statements spoil, and returns what it holds."""

    def load(
        spoil: str = "",
        *,
        target: str = "port.py:DecoderLayer",
        dtype: torch.dtype = torch.bfloat16,
    ) -> HeldWeights:
        port = find_target(target if ":" not in target else f"{EXAMPLES}/{target}")
        spec = ModelSpec.from_folder(tiny)
        with CheckpointReader(tiny) as reader, ReadingPool(1) as pool:
            module = port.build(spec, 0, dtype=dtype)
            spoil_conversion(module, spoil)
            tensors = NotedTensors.noting(reader, spec, 0, dtype, table=LineTable(spec, 0))
            loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
            port.load(module, tensors, spec, loader=loader)
            part = check_part(module, tensors, sent=PortLines(spec), pool=pool)
        return conclude([part], tensors.lines.table)

    return load


def spoil_conversion(module: nn.Module, spoil: str) -> None:
    convert = getattr(module, "convert_state_dict", lambda tensors, config, layer_idx: dict(tensors))

    def spoilt(self: nn.Module, tensors: Any, config: Any, layer_idx: int) -> Mapping[str, torch.Tensor]:
        state: Mapping[str, torch.Tensor] = convert(tensors, config, layer_idx)
        exec(spoil, {"state": state, **NAMES})
        return state

    if spoil:
        module.convert_state_dict = types.MethodType(spoilt, module)  # type: ignore[assignment]


@pytest.mark.parametrize(
    "target", ["builtin", "reference", "port.py:DecoderLayer", "minimal_port.py:DecoderLayer"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_right_port_holds_every_number(hold: Hold, target: str, dtype: torch.dtype) -> None:
    held = hold(target=target, dtype=dtype)
    assert len(held.compared) == 13
    assert (held.not_compared, held.faults) == ((), ())


SHARED_LAYOUTS = {
    "experts_transposed": "state[DOWN] = state[DOWN].mT.contiguous().mT",
    "experts_and_router_reversed": "for name in OF_EXPERTS: state[name] = state[name].flip(0)",
    "two_experts_exchanged": "for name in OF_EXPERTS: state[name][[4, 9]] = state[name][[9, 4]]",
    "gate_and_up_interleaved": "state[GATE_UP] = torch.stack(state[GATE_UP].chunk(2, 1), 2).flatten(1, 2)",
    "heads_reversed": "state[QKV][:256] = state[QKV][:256].unflatten(0, (8, 32)).flip(0).flatten(0, 1)",
}


@pytest.mark.parametrize("name", SHARED_LAYOUTS)
def test_a_layout_that_all_share_is_no_fault(hold: Hold, name: str) -> None:
    held = hold(SHARED_LAYOUTS[name])
    assert (len(held.compared), held.faults) == (13, ())


ALL_ZERO = "state[DOWN].zero_()"
FAULTS = [
    # What spoils the port, the mistake, of which experts, whether it is certain, and its text.
    (
        "state[DOWN][[4, 9]] = 0",
        "zero",
        (4, 9),
        True,
        "w2 (down) of experts 4, 9: zeros in their place (DOWN)",
    ),
    (
        "state[DOWN][4, :100] = 0",
        *("zero", (4,), True),
        "w2 (down) of expert 4: zeros in their place, 100 of 128 rows (DOWN)",
    ),
    (
        "state[DOWN][4, 3, 5] = torch.nan",
        *("values", (4,), True),
        "w2 (down) of expert 4: NaN or Inf in their place, 1 of 128 rows (DOWN)",
    ),
    (
        "for name in (GATE_UP, DOWN): state[name][4] = state[name][3]",
        *("swapped", (4,), False),
        "w1 (gate), w2 (down), w3 (up) of expert 4: those of expert 3 in their place (GATE_UP, DOWN)",
    ),
    (
        "state[DOWN][4] *= 1.25",
        *("values", (4,), False),
        "w2 (down) of expert 4: numbers of 1.25 times the norm in their place (DOWN)",
    ),
    (
        "state[GATE_UP][4] = torch.cat(state[GATE_UP][4].chunk(2)[::-1])",
        *("order", (4,), False),
        "w1 (gate), w3 (up) of expert 4: in another layout than those of other experts (GATE_UP)",
    ),
    (
        "for name in (GATE_UP, DOWN): state[name][[4, 9]] = state[name][[9, 4]]",
        *("order", (4, 9), False),
        "w1 (gate), w2 (down), w3 (up) of experts 4, 9: experts 4 and 9 are exchanged, the router's rows are not "
        "(GATE_UP, DOWN)",
    ),
    ("state[QKV][64:96] = 0", "zero", (), True, "q_proj: zeros in their place, 32 of 256 rows (QKV)"),
    (ALL_ZERO, "zero", (), True, "w2 (down): nowhere, and zeros in DOWN of its size"),
]


@pytest.mark.parametrize(("spoil", "mistake", "experts", "is_certain", "text"), FAULTS)
def test_a_fault_is_told_with_its_experts(
    hold: Hold, spoil: str, mistake: str, experts: tuple[int, ...], is_certain: bool, text: str
) -> None:
    (fault,) = hold(spoil).faults
    for word, name in (("GATE_UP", GATE_UP), ("DOWN", DOWN), ("QKV", QKV)):
        text = text.replace(word, name)
    assert (fault.mistake, fault.text, fault.experts) == (WeightMistake(mistake), text, experts)
    assert fault.is_certain is is_certain
    assert fault.is_exception or spoil == ALL_ZERO


def test_weights_of_one_expert_under_each_others_names_are_told(hold: Hold) -> None:
    first, second = (f"block_sparse_moe.experts.7.{name}.weight" for name in ("w1", "w3"))
    swap = f"state[{first!r}], state[{second!r}] = state[{second!r}], state[{first!r}]"
    faults = hold(swap, target="minimal_port.py:DecoderLayer").faults
    assert [(fault.kinds, fault.experts) for fault in faults] == [(("w1",), (7,)), (("w3",), (7,))]
    assert "where most experts have them in block_sparse_moe.experts.#.w1.weight" in faults[0].text


def test_other_numbers_of_a_whole_kind_are_not_compared(hold: Hold) -> None:
    held = hold("state[DOWN] = state[DOWN].to(torch.float8_e5m2).bfloat16()")
    assert (held.not_compared, held.faults) == (("w2",), ())
    assert held.reason.startswith("the port holds them in other numbers")


def test_a_norm_that_holds_numbers_of_some_biases_by_chance_is_no_order_of_experts(hold: Hold) -> None:
    norm = 'state["self_attn.k_norm.weight"]'
    held = hold(f"{norm} = {norm} * 3; {norm}[[20, 7, 3]] = state[BIAS][[3, 5, 7]]", dtype=torch.float32)
    assert (held.not_compared, held.faults) == (("k_norm",), ())


def test_a_rounded_bias_in_float32_is_told(hold: Hold) -> None:
    (fault,) = hold("state[BIAS] = state[BIAS].bfloat16()").faults
    assert (fault.mistake, fault.kinds) == (WeightMistake.DTYPE, ("e_score_correction_bias",))
    assert not fault.is_certain


def test_lines_that_are_read_in_parts_are_known_once_whole(tiny: Path) -> None:
    spec = ModelSpec.from_folder(tiny)
    name = "self_attn.o_proj.weight"
    with CheckpointReader(tiny) as reader:
        parts, whole = (
            NotedTensors.noting(reader, spec, 0, torch.bfloat16, table=LineTable(spec, 0)) for _ in range(2)
        )
        expected = whole[name]
        for rows in (range(0, 100), range(100, 128)):
            parts.read_into(name, torch.empty(len(rows), 256, dtype=torch.bfloat16), rows=rows)
        port = PortLines(spec)
        port.note("o_proj", expected.T.contiguous())
        (of_parts,), (of_whole,) = (list(port.families(tensors.lines)) for tensors in (parts, whole))
    assert of_parts.found.tolist() == of_whole.found.tolist()
    assert len(of_whole.found) in (128, 256)
