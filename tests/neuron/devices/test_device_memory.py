"""A device out of memory: told as such, with what to lower."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from minimax_tools.errors import BackendError
from neuron.devices.machine import device_memory_errors, is_out_of_device_memory

FULL_PORT = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        raise RuntimeError({message!r})
"""
ALLOCATION = 'nrt_tensor_allocate status=4 message="Allocation Failure"'


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(ALLOCATION),
        RuntimeError("nrt_infodump Failure: NRT_RESOURCE in nrt_load()"),
        ValueError("RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm"),
        RuntimeError("[NCC_EOOM001] The combined memory needed for the model's tensors"),
        torch.OutOfMemoryError("of any text"),
    ],
)
def test_lack_of_memory_is_recognised(error: Exception) -> None:
    assert is_out_of_device_memory(error)
    outer = KeyError("outer")
    outer.__cause__ = error
    assert is_out_of_device_memory(outer)
    with pytest.raises(BackendError, match=r"out of memory, which showed here: found .*--tp-degree"):
        with device_memory_errors("here"):
            raise error


@pytest.mark.parametrize("error", [RuntimeError("shapes differ"), RuntimeError("nrt_execute status=1002")])
def test_other_errors_pass(error: Exception) -> None:
    assert not is_out_of_device_memory(error)
    with pytest.raises(RuntimeError, match=str(error)):
        with device_memory_errors("here"):
            raise error


def test_port_that_fills_the_device_is_told_what_to_lower(run_layer: Any, write_port: Any) -> None:
    result = run_layer(write_port(FULL_PORT.format(message=ALLOCATION)))
    assert result.exit_code == 3
    assert "layer 0 failed while it ran: the device is out of memory" in result.stderr
    assert "--tp-degree" in result.stderr
    assert "--sites layer" in result.stderr
