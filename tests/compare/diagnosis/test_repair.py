"""Lines as they are pasted into a port."""

from __future__ import annotations

from typing import Any

import torch

from compare.diagnosis.mistake import WeightRepair, lines_for_layers

LINES = ("for name in names:", "    tensors[name] = -tensors[name]")


def test_lines_for_some_layers_have_a_condition() -> None:
    assert lines_for_layers(LINES, (5,), num_layers=8)[0] == "if layer_idx == 5:"
    assert lines_for_layers(LINES, (1, 5), num_layers=8)[0] == "if layer_idx in (1, 5):"
    assert lines_for_layers(LINES, (1, 5), num_layers=8)[2] == "        tensors[name] = -tensors[name]"


def test_lines_for_all_layers_have_none() -> None:
    assert lines_for_layers(LINES, (0, 1), num_layers=2) == LINES


def test_port_without_a_conversion_gets_a_whole_one() -> None:
    lines = lines_for_layers(LINES, (0, 1), num_layers=2, has_conversion=False)
    assert lines[0] == "def convert_state_dict(self, tensors, config, layer_idx):"
    assert lines[1] == "    for name in names:"
    assert lines[-1] == "    return tensors"


def negate(tensors: Any, config: Any, *, name: str, scale: float) -> None:
    """Turn the sign of a tensor."""
    for _ in range(1):
        tensors[name] = -scale * tensors[name]
    # The last statement ends here.
    assert config is None


def test_lines_are_the_parameters_and_what_was_run() -> None:
    lines = WeightRepair(edit=negate).lines({"name": "a", "scale": 2.0})
    assert lines == (
        "name = 'a'",
        "scale = 2.0",
        "for _ in range(1):",
        "    tensors[name] = -scale * tensors[name]",
        "# The last statement ends here.",
        "assert config is None",
    )
    tensors = {"a": torch.ones(1)}
    exec("\n".join(lines), {"tensors": tensors, "config": None})
    assert float(tensors["a"]) == -2.0
