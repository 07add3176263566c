"""The toy's golden as `mm2.open_golden` gives it, and ports that run on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mm2
from neuron.ports.sources import import_callable

EXAMPLES = Path(__file__).parents[2] / "scripts" / "examples"
Run = Callable[..., mm2.Recording]


@pytest.fixture(scope="session")
def layers(golden: Path, toy: Path) -> Iterator[mm2.GoldenLayers]:
    """The toy's golden with its checkpoint."""
    with mm2.open_golden(golden, model=toy) as opened:
        yield opened


@pytest.fixture
def layer(layers: mm2.GoldenLayers) -> mm2.GoldenLayer:
    """Layer 1 of the golden."""
    return layers.layer(1)


@pytest.fixture(scope="session")
def example() -> Callable[[str], Any]:
    """An example port's class, by its file's name."""

    def find(name: str) -> Any:
        found = import_callable(f"{EXAMPLES / name}:DecoderLayer")
        assert found is not None
        return found[1]

    return find


@pytest.fixture
def swapped(example: Callable[[str], Any]) -> Any:
    """The minimal port with gate and up exchanged in every layer."""

    class Swapped(example("minimal_port.py")):  # type: ignore[misc]
        def convert_state_dict(self, tensors: Any, config: Any, layer_idx: int) -> Any:
            prefix = "block_sparse_moe.experts"
            for number in range(config.num_experts):
                gate, up = f"{prefix}.{number}.w1.weight", f"{prefix}.{number}.w3.weight"
                tensors[gate], tensors[up] = tensors[up], tensors[gate]
            return tensors

    return Swapped


@pytest.fixture
def run(layer: mm2.GoldenLayer) -> Run:
    """Runs a port's class on the golden's input of layer 1."""

    def run_once(factory: Any, **arguments: Any) -> mm2.Recording:
        port = layer.load(factory)
        with mm2.record(port, **arguments) as recording:
            port(*layer.inputs)
        return recording

    return run_once
