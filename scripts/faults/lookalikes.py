"""Lookalikes: mistakes that are in no catalogue and look like entries of it, a line each; numbers are arbitrary.

No name of the catalogue is true of them but those in `akin`. A line names the stage that is wrong, and what it gives.

B prompts, S tokens, N heads, K kv heads, D head_dim, H hidden, T tokens of all prompts, E experts, k experts per token,
I their width. `right` is the stage as it should be, `layer` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from faults.arithmetic import Arithmetic, Tap
from faults.plant import (
    Change,
    Plant,
    Stage,
    State,
    Tensor,
    on_half,
    replace_fused,
    replace_site,
    replace_stages,
    replace_weights,
    scaled,
)
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site

_QK_NORM, _ROPE = (Site.Q_NORM, Site.K_NORM), (Site.Q_ROPE, Site.K_ROPE)
_NORMS = (Site.INPUT_NORM, *_QK_NORM, Site.POST_NORM)
_CONTEXT, _MOE = (Site.ATTN_CONTEXT,), (Site.MOE_DELTA,)
_EXPERTS, _WEIGHTS = (Site.ROUTER_EXPERTS,), (Site.ROUTER_WEIGHTS,)
# Names that are true where queries or keys are off by a factor, and so are the scores.
_SCORES = ("attention_scale", "q_norm_scaled", "k_norm_scaled")


def _normalise(*, over: int = 0, power: float = 0.5, eps_outside: float = 0.0) -> Stage:
    """Divide the sum of squares by `over` channels more, take another root, or add an epsilon to the root."""

    def stage(_: Any, layer: Arithmetic, states: Tensor, weight: Tensor) -> Tensor:
        exact = states.float()
        mean = exact.pow(2).sum(-1, keepdim=True) / (exact.shape[-1] + over) + layer.eps()
        return weight * (exact / (mean**power + eps_outside)).to(states.dtype)

    return stage


def _norm_of(site: Site, **options: Any) -> dict[str, Stage]:
    """Replace one norm alone by `_normalise`."""
    norm, name = _normalise(**options), str(site)

    def stage(_: Any, layer: Arithmetic, states: Tensor, *__: Any) -> Any:
        return norm(None, layer, states, getattr(layer.weights, name))

    return {name: stage}


def _eps_of(site: Site, eps: float) -> dict[str, Stage]:
    """Give one norm alone another epsilon."""
    name = str(site)

    def stage(_: Any, layer: Arithmetic, states: Tensor, *__: Any) -> Tensor:
        exact = states.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        weight: Tensor = getattr(layer.weights, name)
        return weight * normed.to(states.dtype)

    return {name: stage}


def _seen(rule: Callable[[Tensor, Tensor], Tensor]) -> Stage:
    """Let a query in column q see the key in column k, of those that it should see, where `rule(q, k)` says so."""

    def stage(right: Stage, _: Any, length: int, count: int, device: Any) -> Any:
        columns = torch.arange(length, device=device)
        return right(length, count, device) & rule(columns[length - count :, None], columns)

    return stage


def _seen_by_heads(window: int) -> Stage:
    """Give the second half of the heads a window."""

    def stage(right: Stage, layer: Arithmetic, mask: Tensor, count: int) -> Tensor:
        columns, num_heads = torch.arange(mask.shape[1]), layer.config.num_attention_heads
        near = columns > columns[len(columns) - count :, None] - window
        is_first_half = torch.arange(num_heads)[:, None, None] < num_heads // 2
        visible: Tensor = right(mask, count) & (is_first_half | near)
        return visible

    return stage


def _turned_apart(query: float, key: float) -> Stage:
    """Rotate queries and keys by positions that are `query` and `key` off."""

    def stage(_: Any, layer: Arithmetic, q: Tensor, k: Tensor, at: Tensor, tap: Tap) -> Any:
        q, k = tap("q_norm", layer.q_norm(q)), tap("k_norm", layer.k_norm(k))
        return (
            tap("q_rope", layer.rotate(layer.heads(q), at + query)),
            tap("k_rope", layer.rotate(layer.heads(k), at + key)),
        )

    return stage


def _frequencies(change: Change) -> Stage:
    return lambda right, _, device: change(right(device))


def _rows_by(change: Callable[[Tensor, int], Tensor], *names: str) -> Callable[[LayerTensors, Any], None]:
    """Change the rows of weights, seen as heads [heads,D,…]."""

    def edit(tensors: LayerTensors, config: Any) -> None:
        for name in names:
            heads = tensors[name].unflatten(0, (-1, config.head_dim))
            tensors[name] = change(heads, config.head_dim).flatten(0, 1)

    return edit


def _rolled(by: int) -> Change:
    return lambda value: value.roll(by, 0)


def _of_tensor(name: str, change: Change) -> Callable[[LayerTensors, Any], None]:
    def edit(tensors: LayerTensors, _: Any) -> None:
        tensors[f"self_attn.{name}.weight"] = change(tensors[f"self_attn.{name}.weight"])

    return edit


def _norms() -> Iterator[Plant]:
    for site, factor in ((Site.POST_NORM, 0.97), (Site.POST_NORM, 1.5), (Site.ATTN_RESIDUAL, 1.01)):
        yield replace_site(f"{site} × {factor}", site, scaled(factor))
    # Norms of queries and keys hide the scale: values alone keep it.
    for factor in (1.03, 0.9):
        yield replace_site(
            f"input_norm × {factor}",
            Site.INPUT_NORM,
            scaled(factor),
            *("attention_delta_scaled", "projection_scaled"),
        )
    # Values that are all scaled give this context exactly.
    yield replace_site(
        "attn_context × 1.1", Site.ATTN_CONTEXT, scaled(1.1), *("attention_delta_scaled", "projection_scaled")
    )
    yield replace_site("q_rope × 0.95", Site.Q_ROPE, scaled(0.95), *_SCORES)
    yield replace_site("k_rope × 1.05", Site.K_ROPE, scaled(1.05), *_SCORES)
    for over in (-1, 1, -8, -64):
        yield replace_stages(f"norms divide by n {over:+}", _NORMS, *_SCORES, normalise=_normalise(over=over))
    for site in _NORMS:
        akin = _SCORES if site in _QK_NORM else ()
        yield replace_stages(f"{site} divides by n - 1", (site,), *akin, **_norm_of(site, over=-1))
        yield replace_stages(f"{site} with an epsilon of 3e-4", (site,), "norm_eps", **_eps_of(site, 3e-4))
    # Values come behind no other norm: what attention adds is off by a factor.
    yield replace_stages(
        "input_norm with an epsilon of 1e-2",
        (Site.INPUT_NORM,),
        "norm_eps",
        "attention_delta_scaled",
        **_eps_of(Site.INPUT_NORM, 1e-2),
    )
    yield replace_stages(
        "k_norm with an epsilon of 0.1", (Site.K_NORM,), "norm_eps", **_eps_of(Site.K_NORM, 0.1)
    )
    yield replace_stages("norms add 1e-3 to the root", _NORMS, normalise=_normalise(eps_outside=1e-3))
    yield replace_stages("norms add 0.1 to the root", _NORMS, normalise=_normalise(eps_outside=0.1))
    yield replace_stages("norms take a power of 0.45", _NORMS, normalise=_normalise(power=0.45))
    yield replace_stages(
        "post_norm takes a power of 0.48", (Site.POST_NORM,), **_norm_of(Site.POST_NORM, power=0.48)
    )
    for site in (Site.INPUT_NORM, Site.POST_NORM, Site.Q_NORM):
        yield replace_site(f"{site} × 1.1 in half of the channels", site, on_half(scaled(1.1), -1))
    yield replace_weights(
        "k_norm one head on", (Site.K_NORM,), _rows_by(lambda w, _: w.roll(1, 0), weight_names.K_NORM)
    )
    yield replace_weights(
        "q_norm one head on", (Site.Q_NORM,), _rows_by(lambda w, _: w.roll(1, 0), weight_names.Q_NORM)
    )
    yield replace_weights(
        "q_norm dims reversed", (Site.Q_NORM,), _rows_by(lambda w, _: w.flip(1), weight_names.Q_NORM)
    )


def _rotary() -> Iterator[Plant]:
    for query, key in ((1, 0), (0, 1), (0, -1), (0.5, 0)):
        yield replace_stages(
            f"queries {query:+}, keys {key:+}", _ROPE, norm_and_rotate=_turned_apart(query, key)
        )
    slow = _frequencies(
        lambda found: torch.where(torch.arange(len(found)) < len(found) // 2, found, found / 8)
    )
    fast = _frequencies(lambda found: torch.where(torch.arange(len(found)) < 2, found * 1.25, found))
    yield replace_stages("slow frequencies divided by 8", _ROPE, frequencies=slow)
    yield replace_stages("fast frequencies times 1.25", _ROPE, frequencies=fast)
    yield replace_stages("frequencies reversed", _ROPE, frequencies=_frequencies(lambda found: found.flip(0)))
    yield replace_stages("frequencies one on", _ROPE, frequencies=_frequencies(lambda found: found.roll(1)))
    for site, half in ((Site.Q_ROPE, 1), (Site.K_ROPE, 1)):
        yield replace_site(
            f"{site}: dims of half of the heads rolled", site, on_half(lambda x: x.roll(1, -1), half)
        )
    yield replace_site("q_rope: half of the tokens × 0.9", Site.Q_ROPE, on_half(scaled(0.9), 2))
    reverse = lambda right, layer, part, angles: right(part, -angles if part.shape[1] == 2 else angles)  # noqa: E731
    yield replace_stages("keys turned the other way", (Site.K_ROPE,), turn=reverse)
    for width in (24, 28):
        yield replace_stages(
            f"{width} dims rotated with the right frequencies", _ROPE, rotate=_rotate_fewer(width)
        )


def _rotate_fewer(width: int) -> Stage:
    """Rotate by no angle the pairs behind the first `width` / 2."""

    def stage(_: Any, layer: Arithmetic, heads: Tensor, positions: Tensor) -> Tensor:
        full, angles = layer.rotary_width(), layer.angles(positions)
        angles = torch.where(torch.arange(angles.shape[-1]) < width // 2, angles, 0.0)
        return torch.cat((layer.turn(heads[..., :full], angles), heads[..., full:]), dim=-1)

    return stage


def _attention() -> Iterator[Plant]:
    sees = {
        "not itself": lambda q, k: (k < q) | (q == 0),
        "not the first token": lambda q, k: (k > 0) | (q == 0),
        "not the last 4 before it": lambda q, k: (k == q) | (k < q - 4) | (q < 5),
        "blocks of 32": lambda q, k: k // 32 == q // 32,
        "a window of 24 and the first 4": lambda q, k: (k > q - 24) | (k < 4),
        "every other key": lambda q, k: (k - q) % 2 == 0,
        "a window of 16 from column 64 on": lambda q, k: (q < 64) | (k > q - 16),
        "no key 30 to 33": lambda q, k: (k < 30) | (k > 33) | (k == q),
    }
    for name, rule in sees.items():
        yield replace_stages(f"a token sees {name}", _CONTEXT, causal=_seen(rule))
    yield replace_stages("half of the heads have a window of 24", _CONTEXT, visible=_seen_by_heads(24))
    yield replace_stages("half of the heads have a window of 64", _CONTEXT, visible=_seen_by_heads(64))
    scores = {
        "half of the heads × 0.8": on_half(scaled(0.8), 1),
        "nearer keys are preferred": lambda s: (
            s - 0.02 * (torch.arange(s.shape[2])[:, None] - torch.arange(s.shape[3]))
        ),
        "clamped at 1": lambda s: s.clamp(max=1.0),
        "negative ones halved": lambda s: torch.where(s < 0, s / 2, s),
        "from a sigmoid": lambda s: 4 * s.sigmoid(),
    }
    for name, change in scores.items():
        stage = lambda right, _, q, k, change=change: change(right(q, k))  # noqa: E731
        # 4 · sigmoid(s) is 2 · tanh(s / 2) + 2.
        akin = ("attention_soft_cap",) if name == "from a sigmoid" else ()
        yield replace_stages(f"scores: {name}", _CONTEXT, *akin, attention_scores=stage)
    sink = lambda right, _, s: s.exp() / (s.exp().sum(-1, keepdim=True) + 1.0)  # noqa: E731
    yield replace_stages("softmax with a sink", _CONTEXT, attention_weights=sink)
    yield replace_stages(
        "shares in float16", _CONTEXT, attention_weights=lambda right, _, s: (right(s) * 8).round() / 8
    )
    yield replace_stages(
        "kv heads reversed", _CONTEXT, "kv_repeat_tiled", repeat=lambda right, _, heads: right(heads.flip(1))
    )
    roll = lambda right, _, heads: right(heads).roll(1, 1)  # noqa: E731
    yield replace_stages("query heads read kv heads one on", _CONTEXT, repeat=roll)
    for name, site in (("v_proj", Site.V_PROJ), ("o_proj", Site.ATTN_DELTA), ("q_proj", Site.Q_PROJ)):
        larger, rolled = on_half(scaled(1.1), 0), _rolled(8)
        yield replace_weights(f"{name}: half of the rows × 1.1", (site,), _of_tensor(name, larger))
        yield replace_weights(f"{name}: rows 8 on", (site,), _of_tensor(name, rolled))
    yield replace_site("attn_delta: later half of the tokens × 1.1", Site.ATTN_DELTA, on_half(scaled(1.1), 1))
    yield replace_site(
        "attn_delta: row 1 doubled", Site.ATTN_DELTA, lambda x: torch.cat((x[:1], 2 * x[1:2], x[2:]))
    )
    yield replace_site("v_proj in 8 bits", Site.V_PROJ, lambda x: (x * 16).round() / 16)


def _activation(function: Callable[[Tensor, Tensor], Tensor]) -> Stage:
    return lambda _, __, gate, up: function(gate.float(), up.float()).to(gate.dtype)


def _half_of_experts(state: State, change: Change) -> None:
    """Change [gate | up], [E/2,2I,H], of the second half of the experts."""
    half = len(state["gate_up"]) // 2
    state["gate_up"][half:] = change(state["gate_up"][half:])


def _swapped(both: Tensor) -> Tensor:
    return torch.cat(both.chunk(2, 1)[::-1], 1)


def _interleaved(both: Tensor) -> Tensor:
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


def _next_for_last(right: Change, layer: Arithmetic, biased: Tensor) -> Tensor:
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


PLANTS: tuple[Plant, ...] = (*_norms(), *_rotary(), *_attention(), *_router(), *_experts())
