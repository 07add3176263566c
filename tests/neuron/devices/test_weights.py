"""Loading: strict, all faults at once, cast only to the place's dtype, on several threads, host buffers reused."""

from __future__ import annotations

import json
import subprocess
import threading
from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.checkpoint.filling import Deferred, Gathered, ReadingPool
from minimax_tools.errors import CheckpointError, TargetError
from neuron.devices.weights import WeightLoader

# Two layers of tensors that share host buffers, each too large for any small-buffer path.
LOAD_TWICE_ON_XLA = """
import json
import torch
from torch import nn
from minimax_tools.checkpoint.filling import ReadingPool
from neuron.devices.runtime import open_runtime
from neuron.devices.weights import Deferred, Gathered, WeightLoader

SHAPE = (1024, 2048)

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16))
        self.b = nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16))
        self.c = nn.Buffer(torch.empty(SHAPE, dtype=torch.float32))
        self.d = nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16))
        self.e = nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16))
        self.f = nn.Parameter(torch.empty(SHAPE, dtype=torch.bfloat16))

def deferred(value):
    return Deferred(shape=SHAPE, fill=lambda storage: storage.fill_(value))

def gathered(value):
    return Gathered(
        shape=SHAPE,
        read=lambda name, place: place.fill_(value),
        places=lambda storage: {str(row): storage[row] for row in range(SHAPE[0])},
    )

with open_runtime("xla-cpu") as runtime, ReadingPool(4) as pool:
    loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=pool)
    layers = [Layer(), Layer()]
    for number, layer in enumerate(layers):
        weights = {name: gathered(10 * number + index) for index, name in enumerate("abcef")}
        weights["b"] = deferred(10 * number + 1)
        weights["d"] = torch.full(SHAPE, 50.0 + number)
        loader.load(layer, weights, what="a test")
    found = [
        {
            "values": [[float(tensor.cpu().min()), float(tensor.cpu().max())] for tensor in tensors],
            "dtypes": [str(tensor.dtype) for tensor in tensors],
            "devices": sorted({tensor.device.type for tensor in tensors}),
            "parameters": [name for name, _ in layer.named_parameters()],
        }
        for layer in layers
        for tensors in [list(layer.state_dict().values())]
    ]
print(json.dumps(found))
"""


def load(module: nn.Module, weights: dict[str, Any], *, num_threads: int = 2) -> nn.Module:
    with ReadingPool(num_threads) as pool:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
        loader.load(module, weights, what="the port")
    return module


def test_every_parameter_and_persistent_buffer_is_filled_and_cast_to_its_place() -> None:
    module = nn.Module()
    module.weight = nn.Parameter(torch.empty(2, 3, dtype=torch.bfloat16))
    module.rank = nn.Buffer(torch.empty(1, dtype=torch.int32))
    module.scratch = nn.Buffer(torch.ones(2), persistent=False)
    values = torch.randn(2, 3)
    load(module, {"weight": values, "rank": torch.tensor([5])})
    assert torch.equal(module.weight, values.bfloat16())
    assert (module.rank.tolist(), module.rank.dtype) == ([5], torch.int32)
    assert module.scratch.tolist() == [1, 1]


def test_module_built_without_storage_is_loaded() -> None:
    with torch.device("meta"):
        module = nn.Linear(3, 2, bias=False, dtype=torch.bfloat16)
    values = torch.randn(2, 3)
    load(module, {"weight": values})
    assert isinstance(module.weight, nn.Parameter)
    assert torch.equal(module.weight, values.bfloat16())


def test_deferred_and_gathered_weights_are_written_into_their_places_by_several_threads() -> None:
    module = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "ab"})
    addresses = [module[name].weight.data_ptr() for name in "ab"]
    filled = []

    def fill(storage: torch.Tensor) -> None:
        filled.append(storage.data_ptr())
        storage.fill_(7)

    # Each part waits for the other: one thread alone would never end.
    both = threading.Barrier(2, timeout=60)

    def read(name: str, place: torch.Tensor) -> None:
        both.wait()
        place.fill_(float(name))

    deferred = Deferred(shape=(2, 3), fill=fill)
    gathered = Gathered(shape=(2, 3), read=read, places=lambda storage: {"4": storage[0], "5": storage[1]})
    load(module, {"a.weight": deferred, "b.weight": gathered})
    assert filled == addresses[:1]
    assert module["a"].weight.unique().tolist() == [7]
    assert module["b"].weight.tolist() == [[4, 4, 4], [5, 5, 5]]
    assert [module[name].weight.data_ptr() for name in "ab"] == addresses


def test_weights_of_a_port_are_freed_one_by_one() -> None:
    module = nn.ModuleDict({name: nn.Linear(3, 2, bias=False) for name in "ab"})
    weights: dict[str, Any] = {"a.weight": torch.zeros(2, 3)}
    held = []

    def fill(storage: torch.Tensor) -> None:
        held.extend(weights)
        storage.fill_(1)

    weights["b.weight"] = Deferred(shape=(2, 3), fill=fill)
    load(module, weights)
    assert (held, weights) == ([], {})


def test_all_names_and_shapes_that_do_not_fit_are_told_at_once() -> None:
    module = nn.ModuleDict({"a": nn.Linear(3, 2), "b": nn.Linear(2, 2, bias=False)})
    weights = {
        "a.weight": torch.empty(3, 2),
        "b.scale": torch.empty(1),
        "b.weight": Deferred(shape=(4, 4), fill=lambda storage: None),
    }
    with pytest.raises(TargetError) as caught:
        load(module, weights)
    text = str(caught.value)
    assert "the port: the weights do not fit the module" in text
    assert "1 missing: a.bias" in text
    assert "1 unexpected: b.scale" in text
    assert "2 of another shape: a.weight (expected [2, 3], found [3, 2]), b.weight (expected [2, 2]" in text
    assert "convert_state_dict" in text


def test_nothing_is_loaded_where_something_does_not_fit() -> None:
    module = nn.Linear(3, 2)
    before = module.weight.clone()
    with pytest.raises(TargetError, match="1 missing: bias"):
        load(module, {"weight": torch.zeros(2, 3)})
    assert torch.equal(module.weight, before)


def fails_with(error: Exception) -> Deferred:
    def fill(storage: torch.Tensor) -> None:
        raise error

    return Deferred(shape=(2, 3), fill=fill)


@pytest.mark.parametrize(
    ("weight", "kind", "message"),
    [
        ([[1.0] * 3] * 2, TargetError, "1 no tensor: weight"),
        (
            fails_with(ValueError("other layout")),
            TargetError,
            "the weight weight cannot be loaded: found ValueError: other layout",
        ),
        # An unreadable checkpoint is none of the port's errors.
        (fails_with(CheckpointError("shard 3 is damaged")), CheckpointError, "shard 3 is damaged"),
    ],
)
def test_weight_that_cannot_be_loaded_is_named(weight: object, kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        load(nn.Linear(3, 2, bias=False), {"weight": weight})


def test_part_that_cannot_be_read_names_its_weight_and_nothing_is_written_afterwards() -> None:
    module = nn.ModuleDict({name: nn.Linear(64, 64, bias=False) for name in "ab"})
    written = []

    def read(name: str, place: torch.Tensor) -> None:
        if name == "3":
            raise ValueError("no such tensor")
        written.append(name)

    def places(storage: torch.Tensor) -> dict[str, torch.Tensor]:
        return {str(row): storage[row] for row in range(64)}

    weights = {f"{name}.weight": Gathered(shape=(64, 64), read=read, places=places) for name in "ab"}
    with ReadingPool(1) as pool:
        loader = WeightLoader(torch.device("cpu"), wait=lambda: None, pool=pool)
        with pytest.raises(
            TargetError, match=r"the weight a\.weight cannot be loaded: found ValueError: no such"
        ):
            loader.load(module, weights, what="the port")
        num_written = len(written)
        pool.start([lambda: None]).finish()
        assert len(written) == num_written < 128


def test_host_buffers_are_reused_without_touching_what_was_loaded_before(
    needs_xla: None, forked_python: Any
) -> None:
    done: subprocess.CompletedProcess[str] = forked_python(LOAD_TWICE_ON_XLA)
    assert done.returncode == 0, done.stderr
    first, second = json.loads(done.stdout)
    assert first["values"] == [[0, 0], [1, 1], [50, 50], [3, 3], [4, 4], [2, 2]]
    assert second["values"] == [[10, 10], [11, 11], [51, 51], [13, 13], [14, 14], [12, 12]]
    assert first["devices"] == second["devices"] == ["xla"]
    assert first["dtypes"] == ["torch.bfloat16"] * 5 + ["torch.float32"]
    assert first["parameters"] == ["a", "b", "d", "e", "f"]
