"""Weights of every layer, compared when a run loads them: what no token reaches is judged all the same."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

EXAMPLES = Path(__file__).parents[3] / "scripts" / "examples"
WRONG_LAYER = 1

# The example port, whose weights of layer 1 one statement changes: `few` are experts that no token chooses, and `state`
# holds the port's weights.
_PORT = f"""
import sys
sys.path.insert(0, {str(EXAMPLES)!r})
import port

GATE_UP, DOWN = "moe.gate_up_proj", "moe.down_proj"

class Port(port.DecoderLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        few = {{few}}
        if layer_idx == {WRONG_LAYER}:
            {{spoil}}
        return state
"""

UNLOADED = "state[DOWN][few] = 0"
SWAPPED = "state[GATE_UP][few] = torch.cat(state[GATE_UP][few].chunk(2, 1)[::-1], 1)"
# A power of two moved from one matrix to the other: the layer computes the same.
MOVED = "state[DOWN][few] *= 2; state[GATE_UP][few, state[GATE_UP].shape[1] // 2 :] /= 2"


@pytest.fixture(scope="module")
def short_golden(toy: Path, make_golden: Any) -> Path:
    """A golden of so few tokens that many experts are chosen by none."""
    golden: Path = make_golden(toy, "--seq-len", "5")
    return golden


@pytest.fixture(scope="module")
def chosen(short_golden: Path) -> list[int]:
    """Experts of the wrong layer that tokens chose."""
    found: list[int] = Capture.open(short_golden).read(WRONG_LAYER, Site.ROUTER_EXPERTS).unique().tolist()
    return found


@pytest.fixture(scope="module")
def unseen(chosen: list[int]) -> list[int]:
    """Four experts of the wrong layer that no token chose."""
    return sorted(set(range(32)) - set(chosen))[:4]


@pytest.fixture
def sweep(command: Any, toy: Path, short_golden: Path, tmp_path: Path, write_port: Any) -> Any:
    def run(spoil: str, few: list[int]) -> tuple[int, dict[str, Any]]:
        # A file is imported once.
        target = write_port(_PORT.format(spoil=spoil, few=few), file=f"port_{len(few)}.py")
        arguments = ("--model", toy, "--golden", short_golden, "--target", target, "--backend", "cpu")
        folder = ("--output-dir", tmp_path / "run", "--overwrite", "--layers", "1:2")
        result = command(mm2_test, "sweep", *arguments, *folder, "--json", "--quiet")
        return result.exit_code, json.loads(result.stdout)

    return run


def test_experts_that_no_token_chose_fail_the_sweep(sweep: Any, unseen: list[int]) -> None:
    code, record = sweep(UNLOADED, unseen)
    assert (code, record["verdict"]) == (1, "fail")
    (blame,) = record["blame"]
    assert (blame["layer"], blame["sites"]) == (WRONG_LAYER, ["weights"])
    few = ", ".join(map(str, unseen))
    assert blame["reason"] == f"w2 (down) of experts {few}: zeros in their place (moe.down_proj)"
    (wrong,) = [layer for layer in record["weights"] if layer["wrong"]]
    assert (wrong["layer"], wrong["wrong"][0]["experts"], wrong["explains"]) == (WRONG_LAYER, unseen, [])
    # Every site passes: nothing else tells.
    assert {site["status"] for site in record["sites"]} == {"pass"}


def test_weights_that_a_token_reached_explain_the_site_that_reads_them(
    sweep: Any, chosen: list[int], command: Any, toy: Path, short_golden: Path, tmp_path: Path
) -> None:
    code, record = sweep(UNLOADED, chosen[:2])
    assert code == 1
    (blame,) = record["blame"]
    assert (blame["sites"], blame["is_of_weights"]) == (["moe_delta"], True)
    few = ", ".join(map(str, chosen[:2]))
    zeros = f"w2 (down) of experts {few}: zeros in their place"
    assert blame["reason"].startswith(f"its weights are wrong: {zeros}")
    sides = ("--model", toy, "--golden", short_golden, "--run", tmp_path / "run", "--quiet")
    told = command(mm2_diagnose, *sides, "--prove").stdout
    assert told.startswith(f"FAIL: layer {WRONG_LAYER}, moe_delta: the weights are wrong")
    assert "zeros in their place" in told
    assert "no known mistake" not in told
    assert "Nothing to prove" not in told


def test_what_a_port_undoes_is_a_note_once_a_token_reached_it(
    sweep: Any, chosen: list[int], unseen: list[int]
) -> None:
    code, record = sweep(MOVED, sorted((chosen[0], *unseen[:2])))
    assert (code, record["blame"]) == (0, [])
    assert any("a port may do so on purpose" in note for note in record["notes"])
    # The same of experts that no token chose: nothing tells that it is undone.
    code, record = sweep(MOVED, unseen)
    assert (code, record["blame"][0]["sites"]) == (1, ["weights"])


def test_weights_that_lie_in_two_ways_are_told_beside_the_wrong_site_that_reads_them(sweep: Any) -> None:
    code, record = sweep(SWAPPED, list(range(16, 32)))
    assert (code, [blame["sites"] for blame in record["blame"]]) == (1, [["moe_delta"]])
    assert not record["blame"][0]["is_of_weights"]
    (note,) = [note for note in record["notes"] if note.startswith("weights of layer 1")]
    assert note.endswith("; moe_delta reads them, and is wrong")


def test_a_right_port_is_compared_whole(sweep: Any) -> None:
    code, record = sweep("pass", [0])
    assert code == 0
    assert {len(layer["compared"]) for layer in record["weights"]} == {13}
    assert not [note for note in record["notes"] if "weights" in note]
