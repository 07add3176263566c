"""Lookalikes of mistakes of the router and of the experts, a line each (see `lookalikes`).

T tokens of all prompts, E experts, k experts per token, I their width, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic
from faults.plant import Plant
from faults.replaced import on_half, replace_fused, replace_site, replace_stages, scaled
from minimax_tools.model.sites import Site

_MOE, _EXPERTS, _WEIGHTS = (Site.MOE_DELTA,), (Site.ROUTER_EXPERTS,), (Site.ROUTER_WEIGHTS,)


def _activation(
    function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
) -> Callable[..., torch.Tensor]:
    return lambda _, __, gate, up: function(gate.float(), up.float()).to(gate.dtype)


def _half_of_experts(state: dict[str, torch.Tensor], change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Change [gate | up], [E/2,2I,H], of the second half of the experts."""
    half = len(state["gate_up"]) // 2
    state["gate_up"][half:] = change(state["gate_up"][half:])


def _swapped(both: torch.Tensor) -> torch.Tensor:
    return torch.cat(both.chunk(2, 1)[::-1], 1)


def _interleaved(both: torch.Tensor) -> torch.Tensor:
    return torch.stack(both.chunk(2, 1), 2).flatten(1, 2)


def _router() -> Iterator[Plant]:
    for factor in (1.2, 0.8, 2.0):
        yield replace_site(f"router_logits × {factor}", Site.ROUTER_LOGITS, scaled(factor))
    yield replace_site("router_logits + 0.5", Site.ROUTER_LOGITS, lambda x: x + 0.5)
    biases = {
        "halved": lambda b: b / 2,
        "doubled": lambda b: b * 2,
        "one expert on": lambda b: b.roll(1),
        "missing for half of the experts": lambda b: torch.cat(
            (b[: len(b) // 2], 0 * b[len(b) // 2 :] + b.mean())
        ),
        "rounded to 1/8": lambda b: (b * 8).round() / 8,
        "reversed": lambda b: b.flip(0),
        "in float16": lambda b: b.half().float(),
    }
    for name, change in biases.items():
        yield replace_stages(f"bias {name}", _EXPERTS, bias=lambda right, _, change=change: change(right()))
    yield replace_stages(
        "scores squared", (*_EXPERTS, *_WEIGHTS), scores=lambda right, _, logits: right(logits) ** 2
    )
    tanh = lambda _, __, logits: (logits.tanh() + 1) / 2  # noqa: E731
    yield replace_stages("tanh for sigmoid", (*_EXPERTS, *_WEIGHTS), scores=tanh)
    heat = lambda _, __, logits: (4 * logits).softmax(-1)  # noqa: E731
    yield replace_stages("softmax of 4 × logits", (*_EXPERTS, *_WEIGHTS), scores=heat)
    weights = {
        "square roots": lambda c: c.sqrt() / c.sqrt().sum(-1, keepdim=True),
        "squares": lambda c: c**2 / (c**2).sum(-1, keepdim=True),
        "over the sum + 0.1": lambda c: c / (c.sum(-1, keepdim=True) + 0.1),
        "over the root of the sum of squares": lambda c: c / c.norm(dim=-1, keepdim=True),
        "in steps of 1/16": lambda c: (16 * c / c.sum(-1, keepdim=True)).round() / 16,
        "the last one dropped": lambda c: torch.cat((c[:, :-1], 0 * c[:, -1:]), 1) / c.sum(-1, keepdim=True),
        "the first one doubled": lambda c: torch.cat((2 * c[:, :1], c[:, 1:]), 1) / c.sum(-1, keepdim=True),
    }
    for name, change in weights.items():
        yield replace_stages(
            f"weights: {name}", _WEIGHTS, balance=lambda _, __, chosen, change=change: change(chosen)
        )
    yield replace_stages("the next expert for the last", _EXPERTS, best=_next_for_last)
    even = lambda right, _, biased: right(biased) // 2 * 2  # noqa: E731
    yield replace_stages("expert numbers made even", _EXPERTS, best=even)


def _next_for_last(
    right: Callable[[torch.Tensor], torch.Tensor], layer: Arithmetic, biased: torch.Tensor
) -> torch.Tensor:
    following = biased.topk(layer.config.num_experts_per_tok + 1).indices[:, -1:]
    return torch.cat((right(biased)[:, :-1], following), 1)


def _experts() -> Iterator[Plant]:
    activations = {
        "swish of 1.2": lambda g, u: g * (1.2 * g).sigmoid() * u,
        "quick gelu": lambda g, u: g * (1.702 * g).sigmoid() * u,
        "up + 0.1": lambda g, u: functional.silu(g) * (u + 0.1),
        "hard swish": lambda g, u: functional.hardswish(g) * u,
        "mish": lambda g, u: functional.mish(g) * u,
        "elu": lambda g, u: functional.elu(g) * u,
        "squared relu": lambda g, u: functional.relu(g) ** 2 * u,
        "gate clamped from above at 0.5": lambda g, u: functional.silu(g.clamp(max=0.5)) * u,
        "product clamped at 0.2": lambda g, u: (functional.silu(g) * u).clamp(-0.2, 0.2),
        "up without a sign": lambda g, u: functional.silu(g) * u.abs(),
        "leaky relu": lambda g, u: functional.leaky_relu(g, 0.1) * u,
        "gate × 1.1": lambda g, u: functional.silu(1.1 * g) * u,
    }
    # It approximates GELU; and w1 scaled in every expert gives this gate exactly.
    akin = {"quick gelu": ("gelu_activation",), "gate × 1.1": ("experts_scaled", "projection_scaled")}
    for name, function in activations.items():
        names = akin.get(name, ())
        yield replace_stages(f"activation: {name}", _MOE, *names, activate=_activation(function))
    yield replace_fused(
        "gate and up swapped in half of the experts",
        lambda s: _half_of_experts(s, _swapped),
        "gate_up_swapped",
    )
    yield replace_fused(
        "gate and up interleaved in half of the experts",
        lambda s: _half_of_experts(s, _interleaved),
        "gate_up_cut_in_halves",
    )
    yield replace_fused(
        "up rows 8 on in half of the experts", lambda s: _half_of_experts(s, lambda x: x.roll(8, 1))
    )
    yield replace_fused(
        "gate rows reversed",
        lambda s: s["gate_up"].__setitem__(
            slice(None), torch.cat((s["gate_up"].chunk(2, 1)[0].flip(1), s["gate_up"].chunk(2, 1)[1]), 1)
        ),
    )
    yield replace_fused(
        "down: half of the rows × 0.9", lambda s: s["down"].copy_(on_half(scaled(0.9), 1)(s["down"]))
    )
    yield replace_fused(
        "down: half of the columns × 0.9", lambda s: s["down"].copy_(on_half(scaled(0.9), 2)(s["down"]))
    )
    yield replace_fused("down in steps", lambda s: s["down"].copy_((s["down"].float() * 64).round() / 64))
    yield replace_fused(
        "gate and up in steps", lambda s: s["gate_up"].copy_((s["gate_up"].float() * 32).round() / 32)
    )
    yield replace_fused(
        "down transposed in its first square",
        lambda s: s["down"][:, :32, :32].copy_(s["down"][:, :32, :32].transpose(1, 2).clone()),
    )
    yield replace_site("moe_delta: half of the channels × 1.1", Site.MOE_DELTA, on_half(scaled(1.1), -1))
    yield replace_site("moe_delta: later half of the tokens × 1.1", Site.MOE_DELTA, on_half(scaled(1.1), 1))
    yield replace_site("moe_delta: channels 1 on", Site.MOE_DELTA, lambda x: x.roll(1, -1))
    yield replace_site("moe_delta: clamped", Site.MOE_DELTA, lambda x: x.clamp(-x.std(), x.std()))
    yield replace_stages(
        "residual × 0.99 behind the experts", (Site.OUTPUT,), add_moe=lambda _, __, r, m, s: 0.99 * r + m
    )
    yield replace_stages(
        "a tenth of the input is added again",
        (Site.OUTPUT,),
        add_moe=lambda right, _, r, m, s: right(r, m, s) + 0.1 * s,
    )
    yield replace_stages(
        "experts read 1.02 of their input",
        _MOE,
        mix_experts=lambda right, _, t, e, w, real: right(1.02 * t, e, w, real),
    )


PLANTS: tuple[Plant, ...] = (*_router(), *_experts())
