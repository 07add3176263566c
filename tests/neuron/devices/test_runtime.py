"""Backends opened and closed, process groups, tensors copied back to the host, and lack of memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from minimax_tools.errors import BackendError
from neuron.devices.backend import Backend, choose_backend
from neuron.devices.distributed import probe_group, process_group
from neuron.devices.machine import device_memory_errors, is_out_of_device_memory
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime, to_host

FULL_PORT = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        raise RuntimeError({message!r})
"""
ALLOCATION = 'nrt_tensor_allocate status=4 message="Allocation Failure"'
ASKS_FOR_ITS_RANK = """
import torch.distributed

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
"""


class TestProcessGroup:
    def test_is_one_rank_that_adds_up_while_open_and_gone_after(self) -> None:
        with open_runtime("cpu") as runtime:
            assert torch.distributed.get_world_size() == 1
            value = torch.ones(2)
            torch.distributed.all_reduce(value)
            assert value.tolist() == [1, 1]
            assert (runtime.backend, runtime.device.type) == (Backend.CPU, "cpu")
        assert not torch.distributed.is_initialized()

    def test_that_the_port_took_down_is_not_taken_down_twice(self) -> None:
        with open_runtime("cpu"):
            torch.distributed.destroy_process_group()
        assert not torch.distributed.is_initialized()

    def test_of_somebody_else_is_left_alone(self) -> None:
        with process_group(Backend.CPU, ranks=Ranks()):
            with pytest.raises(
                BackendError, match=r"initialised already\. Start mm2-test in a process of its own"
            ):
                with open_runtime("cpu"):
                    pass
            assert torch.distributed.is_initialized()

    def test_commands_leave_none_behind_and_ports_can_ask_for_their_rank(
        self, run: Any, write_port: Any, small: Path
    ) -> None:
        failing = write_port("def Port(config, layer_idx):\n    raise ValueError('no')\n")
        asking = write_port(ASKS_FOR_ITS_RANK, file="asking.py")
        arguments = ("single-layer", "--layer", 0, "--model", small, "--seq-len", 4, "--target")
        assert [run(*arguments, target).exit_code for target in ("builtin", failing, asking)] == [0, 3, 0]
        assert not torch.distributed.is_initialized()

    def test_that_adds_up_wrongly_is_not_trusted(self, forked_python: Any) -> None:
        # Sums are known to be wrong here: the fake backend answers every collective by doing nothing.
        code = """
import torch, torch.distributed
from torch.testing._internal.distributed.fake_pg import FakeStore
from minimax_tools.errors import BackendError
from neuron.devices.distributed import probe_group

torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
try:
    probe_group(torch.device("cpu"))
except BackendError as error:
    print(error)
"""
        done = forked_python(code)
        assert "the process group adds up wrongly: expected 3.0 on every rank, found [1.0" in done.stdout


class TestBackends:
    def test_auto_is_the_cpu_without_neuron_even_where_torch_xla_is_installed(self) -> None:
        assert choose_backend("auto") is Backend.CPU

    @pytest.mark.parametrize("name", ["neuron", "neuron-xla"])
    def test_absent_neuron_is_said_before_anything_is_set_up(self, name: str) -> None:
        with pytest.raises(BackendError, match=f"the backend {name} is not available here"):
            with open_runtime(name):
                pass
        assert not torch.distributed.is_initialized()

    def test_pjrt_device_of_the_user_is_taken_before_torch_xla_sets_it(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("PJRT_DEVICE", "TPU")
        with pytest.raises(BackendError, match="found PJRT_DEVICE=TPU"):
            choose_backend("neuron-xla")


class TestToHost:
    def test_what_is_there_is_not_copied(self) -> None:
        tensors = [torch.ones(2), torch.zeros(3)]
        assert [tensor.data_ptr() for tensor in to_host(tensors)] == [one.data_ptr() for one in tensors]

    def test_all_come_in_their_order_with_their_dtypes_from_xla(
        self, needs_xla: None, forked_python: Any
    ) -> None:
        code = """
import torch
from neuron.devices.runtime import open_runtime, to_host

tensors = [torch.arange(6).view(2, 3), torch.ones(4, dtype=torch.bfloat16), torch.full((), 0.5), torch.empty(0, 3)]
with open_runtime("xla-cpu") as runtime:
    sent = [tensor.to(runtime.device) for tensor in tensors]
    # One that is not computed yet, one that comes twice, and one that never left the host.
    found = to_host([*sent, sent[1] + 1, sent[1], tensors[0]])
wanted = [*tensors, tensors[1] + 1, tensors[1], tensors[0]]
print(all(one.dtype == other.dtype and torch.equal(one, other) for one, other in zip(found, wanted, strict=True)))
print({str(tensor.device) for tensor in found})
"""
        done = forked_python(code)
        assert done.stdout.splitlines() == ["True", "{'cpu'}"], done.stderr


@pytest.mark.neuron
def test_neuron_is_found_and_adds_up() -> None:
    with open_runtime("auto") as runtime:
        assert runtime.backend.is_neuron
        probe_group(runtime.device)


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
