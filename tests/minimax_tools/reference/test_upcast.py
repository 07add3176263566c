from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.weight_names import expert_weight
from minimax_tools.reference.upcast import upcast_experts

E, K, H, I = 6, 2, 1024, 384  # noqa: E741  # I: intermediate, as everywhere

GRAPH = ModelGraph()


def weights_of(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = {"w1": (I, H), "w3": (I, H), "w2": (H, I)}
    return {
        expert_weight(expert, name): (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        for expert in range(E)
        for name, shape in shapes.items()
    }


def routing(num_tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(num_tokens, H, generator=generator)
    # Expert 4 is never chosen.
    chosen = torch.tensor([0, 1, 2, 3, 5])
    order = torch.rand(num_tokens, len(chosen), generator=generator).argsort(-1)[:, :K]
    return states, chosen[order], torch.rand(num_tokens, K, generator=generator)


def exact(
    weights: Mapping[str, torch.Tensor], states: torch.Tensor, experts: torch.Tensor, shares: torch.Tensor
) -> torch.Tensor:
    """Compute every expert for every token in float64; experts that a token was not sent to count nothing."""
    output, rows = torch.zeros(states.shape, dtype=torch.float64), states.double()
    for expert in range(E):
        gate, up, down = (weights[expert_weight(expert, name)].double() for name in ("w1", "w3", "w2"))
        hidden = torch.nn.functional.silu(rows @ gate.T) * (rows @ up.T)
        share = torch.where(experts == expert, shares, 0.0).sum(-1, keepdim=True)
        output += share.double() * (hidden @ down.T)
    return output


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("num_tokens", [1, 5, 60])
def test_every_token_goes_through_its_experts_in_float32(num_tokens: int, dtype: torch.dtype) -> None:
    weights, arguments = weights_of(dtype), routing(num_tokens)
    found, expected = upcast_experts(weights, *arguments, graph=GRAPH), exact(weights, *arguments)
    assert found.dtype == torch.float32
    # Far below the 4e-3 of one rounding to BF16.
    assert float((found.double() - expected).norm() / expected.norm()) < 2e-6


@pytest.mark.parametrize("mistake", ["experts", "shares", "gate and up"])
def test_another_routing_or_order_of_matrices_would_show(mistake: str) -> None:
    weights, (states, experts, shares) = weights_of(torch.bfloat16), routing(9)
    expected = exact(weights, states, experts, shares)
    if mistake == "experts":
        experts = experts.flip(-1)
    elif mistake == "shares":
        shares = shares.flip(0)
    else:
        names = [(expert_weight(expert, "w1"), expert_weight(expert, "w3")) for expert in range(E)]
        weights |= {new: weights[old] for pair in names for new, old in (pair, pair[::-1])}
    found = upcast_experts(weights, states, experts, shares, graph=GRAPH)
    assert float((found.double() - expected).norm() / expected.norm()) > 1e-2


def test_sums_do_not_depend_on_the_number_of_threads() -> None:
    weights, before = weights_of(torch.bfloat16), torch.get_num_threads()
    for num_tokens in (5, 60):
        arguments = routing(num_tokens)
        sums = []
        try:
            for num_threads in (1, 2, 5):
                torch.set_num_threads(num_threads)
                sums += [
                    upcast_experts(weights, *arguments, graph=GRAPH),
                    upcast_experts(weights, *arguments, graph=GRAPH),
                ]
                assert torch.get_num_threads() == num_threads
        finally:
            torch.set_num_threads(before)
        assert all(torch.equal(one, sums[0]) for one in sums)


def test_experts_nobody_chose_are_not_asked_for_and_an_error_in_reading_comes_out() -> None:
    class Asked(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            assert ".experts.4." not in name
            return super().__getitem__(name)

    class Unreadable(dict[str, torch.Tensor]):
        def __getitem__(self, name: str) -> torch.Tensor:
            raise OSError(f"{name} is gone")

    weights, arguments = weights_of(torch.bfloat16), routing(40)
    assert 4 not in arguments[1]
    upcast_experts(Asked(weights), *arguments, graph=GRAPH)
    with pytest.raises(OSError, match=r"w1.weight is gone"):
        upcast_experts(Unreadable(weights), *arguments, graph=GRAPH)


def test_weights_that_want_gradients_are_only_read() -> None:
    weights = {name: weight.requires_grad_() for name, weight in weights_of(torch.float32).items()}
    with torch.no_grad():
        output = upcast_experts(weights, *routing(3), graph=GRAPH)
    assert not output.requires_grad
