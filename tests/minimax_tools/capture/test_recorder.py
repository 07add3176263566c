from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from minimax_tools.capture.recorder import (
    NUM_TRACED,
    Calls,
    Recorder,
    copy_on_device,
    copy_to_host,
    join_calls,
    shape_to_batch,
)
from minimax_tools.capture.taps import Tap
from minimax_tools.errors import TargetError
from minimax_tools.model.sites import Site

BATCH = (2, 3)


class Inner(nn.Module):
    def forward(self, states: torch.Tensor, *, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
        return states * scale, states + 1


class Outer(nn.Module):
    """Calls its submodule by keyword, and overwrites what that returned."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        scaled, shifted = self.inner(states=states, scale=3.0)
        total = scaled + shifted
        scaled.zero_()
        return total


TAPS = {
    Site.INPUT: Tap(path="inner", point="input"),
    Site.Q_PROJ: Tap(path="inner"),
    Site.K_PROJ: Tap(path="inner", index=1),
    Site.OUTPUT: Tap(path=""),
}


@pytest.mark.parametrize("keep", [copy_to_host, copy_on_device])
def test_sites_are_recorded_where_they_are_tapped(keep: Any) -> None:
    module, states = Outer(), torch.tensor([1.0, 2.0])
    with Recorder(module, TAPS, keep=keep) as recorder:
        output = module(states)
    assert {str(site): tensor.tolist() for site, tensor in recorder.tensors.items()} == {
        "input": [1.0, 2.0],
        "q_proj": [3.0, 6.0],
        "k_proj": [2.0, 3.0],
        "output": [5.0, 9.0],
    }
    assert torch.equal(output, Outer()(states))


def test_hooks_are_gone_after_the_block_and_after_an_error() -> None:
    module = Outer()
    recorder = Recorder(module, TAPS, keep=copy_to_host)
    with pytest.raises(RuntimeError, match="planted"), recorder:
        raise RuntimeError("planted")
    module(torch.ones(2))
    assert recorder.tensors == {}
    taps = {**TAPS, Site.V_PROJ: Tap(path="absent")}
    with pytest.raises(AttributeError, match="absent"), Recorder(module, taps, keep=copy_to_host):
        pass
    for hooked in (module, module.inner):
        assert not hooked._forward_hooks
        assert not hooked._forward_pre_hooks


def test_what_is_no_tensor_is_not_recorded() -> None:
    module = Outer()
    taps = {Site.Q_PROJ: Tap(path="inner", index=2), Site.K_PROJ: Tap(path="inner", point="input", index=1)}
    with Recorder(module, taps, keep=copy_to_host) as recorder:
        module(torch.ones(2))
    assert recorder.tensors == {}


@pytest.mark.parametrize(
    ("site", "expected"),
    [
        (Site.INPUT, [30.0 + 11.0, 60.0 + 21.0]),
        (Site.Q_PROJ, [10.0 + 2.0, 20.0 + 3.0]),
        (Site.K_PROJ, [3.0 + 10.0, 6.0 + 20.0]),
    ],
)
def test_fed_tensor_takes_the_place_of_what_was_there(site: Site, expected: list[float]) -> None:
    module = Outer()
    fed = torch.tensor([[10.0, 20.0]], dtype=torch.float64)
    with Recorder(module, TAPS, keep=copy_to_host, feeds={site: fed}) as recorder:
        output = module(torch.tensor([1.0, 2.0]))
    assert output.tolist() == expected
    # In the shape and dtype of what it replaces.
    assert torch.equal(recorder.tensors[site], torch.tensor([10.0, 20.0]))


def test_fed_columns_leave_the_padding_of_a_bucket_as_it_is() -> None:
    module, fed = torch.nn.Identity(), torch.full((2, 3, 4), 7.0)
    taps = {Site.INPUT: Tap(path="", point="input")}
    with Recorder(module, taps, keep=copy_to_host, feeds={Site.INPUT: fed}):
        output = module(torch.zeros(2, 5, 4))
    assert torch.equal(output[:, :3], fed)
    assert torch.equal(output[:, 3:], torch.zeros(2, 2, 4))


@pytest.mark.parametrize(
    ("site", "shape", "expected"),
    [
        (Site.MOE_DELTA, (6, 4), (2, 3, 4)),
        (Site.ROUTER_EXPERTS, (6, 2), (2, 3, 2)),
        (Site.OUTPUT, (2, 3, 4), (2, 3, 4)),
        (Site.OUTPUT, (5, 4), (5, 4)),
        # Without a head's width, shapes do not tell heads from tokens.
        *((Site.Q_ROPE, shape, shape) for shape in ((2, 4, 3, 5), (2, 3, 3, 5), (6, 4, 3, 2), (6, 20))),
        *((Site.Q_ROPE, shape, shape) for shape in ((2, 5, 4, 3), (3, 2, 4, 5))),
    ],
)
def test_flat_rows_become_a_batch_and_nothing_else_changes(
    site: Site, shape: tuple[int, ...], expected: tuple[int, ...]
) -> None:
    tensor = torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    shaped = shape_to_batch(site, tensor, BATCH)
    assert tuple(shaped.shape) == expected
    assert torch.equal(shaped.flatten(), tensor.flatten())


@pytest.mark.parametrize("shape", [(2, 3, 4, 5), (6, 4, 5), (2, 3, 20), (6, 20)])
def test_heads_come_before_tokens(shape: tuple[int, ...]) -> None:
    tensor = torch.arange(120.0).reshape(shape)
    shaped = shape_to_batch(Site.Q_ROPE, tensor, BATCH, head_dim=5)
    assert torch.equal(shaped, tensor.view(2, 3, 4, 5).transpose(1, 2))
    assert shaped.is_contiguous()


def test_wide_unsigned_integers_are_recorded_as_signed_ones() -> None:
    module = nn.Identity()
    with Recorder(module, {Site.ROUTER_EXPERTS: Tap(path="")}, keep=copy_to_host) as recorder:
        module(torch.tensor([[3, 1]], dtype=torch.uint32))
    experts = recorder.tensors[Site.ROUTER_EXPERTS]
    assert (experts.dtype, experts.tolist()) == (torch.int64, [[3, 1]])


@pytest.mark.parametrize("site", [Site.Q_NORM, Site.K_NORM])
@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 3, 4, 5), (2, 3, 3, 5), (2, 3, 20), (6, 20)])
def test_norms_of_heads_take_and_give_channels_of_tokens(site: Site, shape: tuple[int, ...]) -> None:
    module, width = nn.Identity(), torch.Size(shape).numel() // 6
    fed = torch.arange(6.0 * width).view(2, 3, width)
    with Recorder(module, {site: Tap(path="")}, keep=copy_to_host, feeds={site: fed}) as recorder:
        output = module(torch.zeros(shape))
    assert tuple(output.shape) == shape
    assert torch.equal(shape_to_batch(site, recorder.tensors[site], BATCH), fed)
    if shape == (2, 4, 3, 5):
        assert torch.equal(output, fed.view(2, 3, 4, 5).transpose(1, 2))


@pytest.mark.parametrize("shape", [(2, 4, 3, 5), (2, 3, 4, 5), (6, 4, 5), (2, 3, 20), (6, 20)])
def test_fed_heads_take_the_layout_of_what_was_there(shape: tuple[int, ...]) -> None:
    module, fed = nn.Identity(), torch.arange(120.0).view(2, 4, 3, 5)
    taps = {Site.Q_ROPE: Tap(path="")}
    with Recorder(module, taps, keep=copy_to_host, feeds={Site.Q_ROPE: fed}) as recorder:
        output = module(torch.zeros(shape))
    assert tuple(output.shape) == shape
    recorded = recorder.tensors[Site.Q_ROPE]
    assert torch.equal(shape_to_batch(Site.Q_ROPE, recorded, BATCH, head_dim=5), fed)


@pytest.mark.parametrize("shape", [(2, 5, 4, 3), (2, 4, 6, 5)])
def test_fed_heads_are_refused_in_another_order(shape: tuple[int, ...]) -> None:
    module, feeds = nn.Identity(), {Site.Q_ROPE: torch.zeros(2, 4, 3, 5)}
    refused = r"q_rope cannot be replaced: expected the shape \[2, 4, 3, 5\]"
    with (
        Recorder(module, {Site.Q_ROPE: Tap(path="")}, keep=copy_to_host, feeds=feeds),
        pytest.raises(TargetError, match=refused),
    ):
        module(torch.zeros(shape))


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 3, bias=False)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.inner(part) for part in states.split(2)])


def test_all_calls_of_a_site_are_kept_and_forgotten_at_the_start_of_a_run() -> None:
    module, states = InParts(), torch.randn(5, 16)
    with Recorder(module, {Site.K_PROJ: Tap(path="inner")}, keep=copy_on_device) as recorder:
        whole = module(states)
        tensors, inputs = recorder.calls()[Site.K_PROJ]
        assert torch.equal(torch.cat(tensors), whole)
        assert [given.tolist() for given in inputs] == [states[2:4, :8].tolist(), states[4:, :8].tolist()]
        recorder.start({})
        assert recorder.calls() == {}


def test_a_site_that_is_computed_in_parts_cannot_be_replaced() -> None:
    module, feeds = InParts(), {Site.K_PROJ: torch.zeros(1, 5, 3)}
    with (
        Recorder(module, {Site.K_PROJ: Tap(path="inner")}, keep=copy_on_device, feeds=feeds),
        pytest.raises(TargetError, match="k_proj cannot be replaced: the port computes it in parts"),
    ):
        module(torch.zeros(5, 16))


B, S, F, N = 2, 6, 16, 4
STATES = torch.arange(float(B * S * F)).view(B, S, F)
HEADS = torch.arange(float(B * N * S * F)).view(B, N, S, F)
TOKENS_FIRST = HEADS.transpose(1, 2)
WHOLE = {Site.POST_NORM: Calls(tensors=(STATES,))}


def join(site: Site, *calls: torch.Tensor, inputs: tuple[torch.Tensor, ...] = ()) -> torch.Tensor | None:
    return join_calls({**WHOLE, site: Calls(tensors=calls, inputs=inputs)}, (B, S)).get(site)


def columns(tensor: torch.Tensor, *sizes: int, dim: int = 1) -> tuple[torch.Tensor, ...]:
    return tensor.split(list(sizes), dim=dim)


@pytest.mark.parametrize(
    ("site", "calls", "expected"),
    [
        (Site.MOE_DELTA, (STATES,), STATES),
        (Site.MOE_DELTA, (STATES[:1], STATES[1:]), STATES),
        (Site.MOE_DELTA, columns(STATES, 4, 2), STATES),
        (Site.MOE_DELTA, STATES.flatten(0, 1).split(5), STATES.flatten(0, 1)),
        (Site.MOE_DELTA, STATES.flatten(0, 1)[None].split(5, dim=1), STATES.flatten(0, 1)),
        (Site.Q_ROPE, (HEADS[:1], HEADS[1:]), HEADS),
        (Site.Q_ROPE, columns(HEADS, 4, 2, dim=2), HEADS),
        (Site.Q_ROPE, columns(TOKENS_FIRST, 4, 2), TOKENS_FIRST),
        (Site.Q_ROPE, TOKENS_FIRST.flatten(0, 1).split(5), TOKENS_FIRST.flatten(0, 1)),
        # What is computed again counts once.
        (Site.MOE_DELTA, (STATES, STATES), STATES),
        (Site.MOE_DELTA, (STATES[:1], STATES[:1], STATES[1:], STATES[1:]), STATES),
        (Site.MOE_DELTA, (STATES[:1], STATES[1:], STATES[:1], STATES[1:]), STATES),
    ],
)
def test_calls_that_add_up_are_joined_in_their_order(
    site: Site, calls: tuple[torch.Tensor, ...], expected: torch.Tensor
) -> None:
    joined = join(site, *calls)
    assert joined is not None
    assert torch.equal(joined, expected)


@pytest.mark.parametrize(
    "calls",
    [
        (STATES[:, :4], STATES[:, :4]),  # one column twice
        (STATES, STATES + 1),  # other values the second time
        (STATES[:1], STATES[1:].half()),
        (STATES[:1, :5], STATES[1:, :4]),  # rows without their padding
        tuple(STATES.flatten(0, 1)[expert:] for expert in range(4)),
    ],
)
def test_other_calls_are_left_out(calls: tuple[torch.Tensor, ...]) -> None:
    assert join(Site.MOE_DELTA, *calls) is None


def test_inputs_tell_the_order_of_flat_calls_of_even_sizes() -> None:
    logits = -STATES
    # 4 tokens: the first 4 of row 0, or 2 columns of both rows.
    of_rows = logits.flatten(0, 1).split(4)
    of_columns = tuple(part.flatten(0, 1) for part in logits.split(2, dim=1))
    for parts in (of_rows, of_columns):
        joined = join(Site.ROUTER_LOGITS, *parts, inputs=tuple(-part[:, :NUM_TRACED] for part in parts[1:]))
        assert joined is not None
        assert torch.equal(joined.view(B, S, F), logits)
    unknown = tuple(torch.zeros(4, NUM_TRACED) for _ in of_rows[1:])
    assert join(Site.ROUTER_LOGITS, *of_rows) is None
    assert join(Site.ROUTER_LOGITS, *of_rows, inputs=unknown) is None
