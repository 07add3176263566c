"""Results that a port may return, and refusals of those that it may not."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimax_tools.errors import TargetError
from neuron.ports.returned import find_key_values, find_output

DENSE = torch.ones(2, 3, 8)

WITHOUT_VALUES = {
    "sparse": (lambda: DENSE.to_sparse(), "found a sparse tensor"),
    "meta": (lambda: DENSE.to("meta"), "found a tensor on the meta device"),
    # torch 2.13 warns of it where it is made.
    "quantised": (
        lambda: torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint8),
        "found a quantised tensor",
    ),
}


def test_dense_output_is_found() -> None:
    for result in (DENSE, (DENSE, None), DENSE.reshape(6, 8)):
        assert torch.equal(find_output(result, (2, 3, 8), what="port"), DENSE)


@pytest.mark.filterwarnings("ignore:.*quantize_per_tensor|.*TypedStorage|.*qint8:Warning")
@pytest.mark.parametrize("kind", WITHOUT_VALUES)
def test_output_without_values_is_refused(kind: str) -> None:
    make, found = WITHOUT_VALUES[kind]
    output = make()
    with pytest.raises(TargetError, match=f"the output of port cannot be compared: .*{found}"):
        find_output(output, (2, 3, 8), what="port")


def test_keys_without_values_are_refused() -> None:
    keys = torch.ones(2, 1, 3, 4)
    with pytest.raises(TargetError, match="keys or values of port cannot be compared"):
        find_key_values((DENSE, (keys, keys.to("meta"))), (2, 3), what="port")


def test_command_names_the_kind(run_layer: Any, write_port: Any) -> None:
    source = """
class Port(ReferenceLayer):
    def forward(self, *arguments):
        return super().forward(*arguments).to("meta")
"""
    result = run_layer(write_port(source))
    assert result.exit_code == 3
    assert "cannot be compared" in result.stderr
    assert "meta device" in result.stderr
