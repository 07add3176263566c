"""Backends opened and closed, process groups, and the graphs that XLA compiles in a fresh process."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed

from minimax_tools.errors import BackendError
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.devices.backend import Backend, choose_backend
from neuron.devices.distributed import probe_group, process_group
from neuron.devices.ranks import Ranks
from neuron.devices.runtime import open_runtime, to_host

MOST_GRAPHS = 3

PORTS = """
from torch import nn
from neuron.builtin.layer import DeviceLayer


class BuiltPerLayer(DeviceLayer):
    reuse = False


class Small(nn.Module):
    sites = {}

    def __init__(self, config, layer_idx):
        super().__init__()
        self.layer_idx = layer_idx

    def convert_state_dict(self, tensors, config, layer_idx):
        return {}


class NumberOfTheLayer(Small):
    def forward(self, hidden_states, attention_mask, position_ids):
        return hidden_states * (1 + self.layer_idx)


class Fallback(Small):
    def forward(self, hidden_states, attention_mask, position_ids):
        return hidden_states * hidden_states.float().mean().item()
"""
# Graphs are counted, not timed: the compiler need not try.
FAST_COMPILER = "--xla_backend_optimization_level=0"


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Small BF16 models by their number of layers."""
    folders = {}
    for num_layers in (2, 6):
        folders[num_layers] = tmp_path_factory.mktemp("models") / f"{num_layers}_layers"
        model = SyntheticModel(
            num_hidden_layers=num_layers, hidden_size=64, num_local_experts=8, vocab_size=512
        )
        synthesize(folders[num_layers], model=model, dtype=torch.bfloat16, shard_size_bytes=None, seed=0)
    return folders


@pytest.fixture(scope="module")
def counted(
    needs_xla: None, serve: Any, models: dict[int, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, Any]]:
    """The graphs of whole-model runs: the first of each process starts with none compiled."""
    folder = tmp_path_factory.mktemp("graphs")
    (folder / "ports.py").write_text(PORTS)

    def arguments(num_layers: int, target: str, *options: str) -> list[object]:
        directory = folder / f"{num_layers}_{target}"
        target = target if target == "builtin" else f"{folder / 'ports.py'}:{target}"
        common = [
            "multi-layer",
            "--layers",
            f"0:{num_layers}",
            "--model",
            models[num_layers],
            "--seq-len",
            "9,4",
        ]
        return [*common, "--backend", "xla-cpu", "--target", target, "--output-dir", directory, *options]

    # Whatever the user's variable says, xla-cpu was asked for.
    (two,) = serve([arguments(2, "builtin", "--json")], PJRT_DEVICE="TPU", XLA_FLAGS=FAST_COMPILER)
    builtin, built_per_layer, number, fallback = serve(
        [
            arguments(6, "builtin", "--json"),
            arguments(6, "BuiltPerLayer", "--json"),
            arguments(2, "NumberOfTheLayer"),
            arguments(2, "Fallback"),
        ],
        XLA_FLAGS=FAST_COMPILER,
    )
    return {
        "two": two,
        "builtin": builtin,
        "BuiltPerLayer": built_per_layer,
        "NumberOfTheLayer": number,
        "Fallback": fallback,
    }


def graphs(result: dict[str, Any]) -> dict[str, Any]:
    assert result["exit_code"] == 0, result["stderr"]
    found: dict[str, Any] = json.loads(result["stdout"])["graphs"]
    return found


class TestGraphs:
    def test_number_does_not_depend_on_the_number_of_layers(self, counted: dict[str, dict[str, Any]]) -> None:
        two, six = graphs(counted["two"]), graphs(counted["builtin"])
        assert 0 < two["first_layer"] <= MOST_GRAPHS
        assert two == six

    def test_none_is_compiled_after_the_first_layer_and_nothing_falls_back(
        self, counted: dict[str, dict[str, Any]]
    ) -> None:
        assert (graphs(counted["builtin"])["later_layers"], graphs(counted["builtin"])["fallbacks"]) == (
            0,
            [],
        )
        assert "warning" not in counted["builtin"]["stderr"]

    def test_layer_built_anew_has_the_graphs_of_the_one_before(
        self, counted: dict[str, dict[str, Any]]
    ) -> None:
        found = graphs(counted["BuiltPerLayer"])
        assert (found["first_layer"], found["later_layers"], found["fallbacks"]) == (0, 0, [])

    def test_graph_that_depends_on_the_layer_is_counted_and_warned_of(
        self, counted: dict[str, dict[str, Any]]
    ) -> None:
        result = counted["NumberOfTheLayer"]
        found = re.search(r"graphs compiled: \d+ for the first layer, (\d+) after it", result["stdout"])
        assert found is not None
        assert int(found[1]) > 0
        assert "warning: a graph depends on the layer" in result["stderr"]

    def test_operation_on_the_cpu_is_named(self, counted: dict[str, dict[str, Any]]) -> None:
        stderr = counted["Fallback"]["stderr"]
        assert "warning: aten::_local_scalar_dense ran on the CPU instead of the device" in stderr


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

    def test_commands_leave_none_behind(self, run: Any, write_port: Any, models: dict[int, Path]) -> None:
        failing = write_port("def Port(config, layer_idx):\n    raise ValueError('no')\n")
        arguments = ("single-layer", "--layer", 0, "--model", models[2], "--seq-len", 4)
        codes = [run(*arguments, "--target", target).exit_code for target in ("builtin", failing, "builtin")]
        assert codes == [0, 3, 0]
        assert not torch.distributed.is_initialized()

    def test_port_can_ask_for_its_rank(self, run: Any, write_port: Any, models: dict[int, Path]) -> None:
        source = """
import torch.distributed

class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
"""
        arguments = ("single-layer", "--layer", 0, "--model", models[2], "--seq-len", 4)
        assert run(*arguments, "--target", write_port(source)).exit_code == 0

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

    def test_xla_on_the_cpu_opens_as_itself(self, counted: dict[str, dict[str, Any]]) -> None:
        provenance = json.loads(counted["two"]["stdout"])["description"]["provenance"]
        assert (provenance["backend"], provenance["environment"]["PJRT_DEVICE"]) == ("xla-cpu", "CPU")


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
