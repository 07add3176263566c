"""A layer with its sites beside its result, run as it is and in graphs of torch.compile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.capture.taps import Tap
from minimax_tools.model.sites import Site
from neuron.devices.compiler import Compiler, count_torch_compiles
from neuron.runs.executor import RecordedLayer

TAPS = {Site.Q_PROJ: Tap(path="first"), Site.MOE_DELTA: Tap(path="second", point="input")}
STATES = torch.arange(8.0).reshape(1, 2, 4)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return self.second(input=self.first(states) * 2)


def as_it_is(layer: RecordedLayer) -> Callable[..., Any]:
    return layer


def in_graphs(layer: RecordedLayer) -> Callable[..., Any]:
    return Compiler.EAGER.compile(layer, what="the layer")


@pytest.fixture(params=[as_it_is, in_graphs])
def make(request: pytest.FixtureRequest) -> Iterator[Callable[[RecordedLayer], Callable[..., Any]]]:
    """The way that a layer becomes a function."""
    torch.compiler.reset()
    yield request.param
    torch.compiler.reset()


def call(make: Any, layer: nn.Module, taps: dict[Site, Tap], feeds: dict[Site, torch.Tensor]) -> Any:
    recorded = RecordedLayer(layer, taps)
    with torch.no_grad(), recorded.recorder:
        result, sites, _ = make(recorded)(feeds, STATES)
        return result, {site: calls.tensors[-1] for site, calls in sites.items()}


def test_site_that_no_tensor_reaches_is_left_out(make: Any) -> None:
    layer = Layer()
    layer.unused = nn.Linear(4, 4)
    _, tensors = call(make, layer, {**TAPS, Site.ATTN_DELTA: Tap(path="unused")}, {})
    assert set(tensors) == set(TAPS)


def test_hooks_are_gone_after_the_block(make: Any) -> None:
    layer = Layer()
    call(make, layer, TAPS, {})
    assert not layer.first._forward_hooks
    assert not layer.second._forward_pre_hooks


class TestGraphs:
    def test_layers_of_one_kind_share_a_graph_though_their_hooks_differ(self) -> None:
        torch.compiler.reset()
        before = count_torch_compiles().compiles
        for _ in range(3):
            layer = Layer()
            result, tensors = call(in_graphs, layer, TAPS, {})
            with torch.no_grad():
                assert result.equal(layer(STATES))
                assert tensors[Site.Q_PROJ].equal(layer.first(STATES))
        assert count_torch_compiles().compiles - before == 1

    @pytest.mark.parametrize(
        ("first", "second"),
        [
            (TAPS, {}),
            (TAPS, {Site.Q_PROJ: Tap(path="second"), Site.MOE_DELTA: Tap(path="first")}),
            # The places alone tell these apart: the submodules and their kinds of hooks are the same.
            (
                {Site.Q_PROJ: Tap(path="first"), Site.K_PROJ: Tap(path="second")},
                {Site.Q_PROJ: Tap(path="second"), Site.K_PROJ: Tap(path="first")},
            ),
        ],
    )
    def test_other_sites_or_places_are_another_graph(
        self, first: dict[Site, Tap], second: dict[Site, Tap]
    ) -> None:
        torch.compiler.reset()
        layer = Layer()
        for taps in (first, second):
            _, tensors = call(in_graphs, layer, taps, {})
            _, expected = call(as_it_is, layer, taps, {})
            assert set(tensors) == set(expected)
            assert all(tensor.equal(expected[site]) for site, tensor in tensors.items())

    def test_value_fed_after_a_run_without_it_is_used(self) -> None:
        torch.compiler.reset()
        layer, fed = Layer(), torch.full((1, 2, 4), 3.0)
        for feeds in ({}, {Site.MOE_DELTA: fed}, {Site.MOE_DELTA: fed * 2}, {}):
            result, tensors = call(in_graphs, layer, TAPS, feeds)
            expected, _ = call(as_it_is, layer, TAPS, feeds)
            assert result.equal(expected)
            assert tensors[Site.MOE_DELTA].equal(feeds.get(Site.MOE_DELTA, tensors[Site.MOE_DELTA]))
