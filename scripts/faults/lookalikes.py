"""Lookalikes: mistakes that are in no catalogue and look like entries of it, a line each; numbers are arbitrary.

No name of the catalogue is true of them but those in `akin`. A line names the stage that is wrong, and what it gives.

B prompts, S tokens, N heads, K kv heads, D head_dim, H hidden, T tokens of all prompts, E experts, k experts per token,
I their width. `right` is the stage as it should be, `layer` the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from faults import lookalikes_moe
from faults.arithmetic import Arithmetic
from faults.plant import Plant
from faults.replaced import on_half, replace_site, replace_stages, replace_weights, scaled
from faults.stages import Tap
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site

_QK_NORM, _ROPE = (Site.Q_NORM, Site.K_NORM), (Site.Q_ROPE, Site.K_ROPE)
_NORMS = (Site.INPUT_NORM, *_QK_NORM, Site.POST_NORM)
_CONTEXT, _MOE = (Site.ATTN_CONTEXT,), (Site.MOE_DELTA,)
_EXPERTS, _WEIGHTS = (Site.ROUTER_EXPERTS,), (Site.ROUTER_WEIGHTS,)
# Names that are true where queries or keys are off by a factor, and so are the scores.
_SCORES = ("attention_scale", "q_norm_scaled", "k_norm_scaled")


def _normalise(*, over: int = 0, power: float = 0.5, eps_outside: float = 0.0) -> Callable[..., torch.Tensor]:
    """Divide the sum of squares by `over` channels more, take another root, or add an epsilon to the root."""

    def stage(_: Any, layer: Arithmetic, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        exact = states.float()
        mean = exact.pow(2).sum(-1, keepdim=True) / (exact.shape[-1] + over) + layer.eps()
        return weight * (exact / (mean**power + eps_outside)).to(states.dtype)

    return stage


def _norm_of(site: Site, **options: Any) -> dict[str, Callable[..., torch.Tensor]]:
    """Replace one norm alone by `_normalise`."""
    norm, name = _normalise(**options), str(site)

    def stage(_: Any, layer: Arithmetic, states: torch.Tensor, *__: Any) -> torch.Tensor:
        return norm(None, layer, states, getattr(layer.weights, name))

    return {name: stage}


def _eps_of(site: Site, eps: float) -> dict[str, Callable[..., torch.Tensor]]:
    """Give one norm alone another epsilon."""
    name = str(site)

    def stage(_: Any, layer: Arithmetic, states: torch.Tensor, *__: Any) -> torch.Tensor:
        exact = states.float()
        normed = exact * torch.rsqrt(exact.pow(2).mean(-1, keepdim=True) + eps)
        weight: torch.Tensor = getattr(layer.weights, name)
        return weight * normed.to(states.dtype)

    return {name: stage}


def _seen(rule: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Let a query in column q see the key in column k, of those that it should see, where `rule(q, k)` says so."""

    def stage(
        right: Callable[..., torch.Tensor], _: Any, length: int, count: int, device: Any
    ) -> torch.Tensor:
        columns = torch.arange(length, device=device)
        return right(length, count, device) & rule(columns[length - count :, None], columns)

    return stage


def _seen_by_heads(window: int) -> Callable[..., torch.Tensor]:
    """Give the second half of the heads a window."""

    def stage(
        right: Callable[..., torch.Tensor], layer: Arithmetic, mask: torch.Tensor, count: int
    ) -> torch.Tensor:
        columns, num_heads = torch.arange(mask.shape[1]), layer.config.num_attention_heads
        near = columns > columns[len(columns) - count :, None] - window
        is_first_half = torch.arange(num_heads)[:, None, None] < num_heads // 2
        visible: torch.Tensor = right(mask, count) & (is_first_half | near)
        return visible

    return stage


def _turned_apart(query: float, key: float) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Rotate queries and keys by positions that are `query` and `key` off."""

    def stage(_: Any, layer: Arithmetic, q: torch.Tensor, k: torch.Tensor, at: torch.Tensor, tap: Tap) -> Any:
        q, k = tap("q_norm", layer.q_norm(q)), tap("k_norm", layer.k_norm(k))
        return (
            tap("q_rope", layer.rotate(layer.heads(q), at + query)),
            tap("k_rope", layer.rotate(layer.heads(k), at + key)),
        )

    return stage


def _frequencies(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., torch.Tensor]:
    return lambda right, _, device: change(right(device))


def _rows_by(
    change: Callable[[torch.Tensor, int], torch.Tensor], *names: str
) -> Callable[[LayerTensors, Any], None]:
    """Change the rows of weights, seen as heads [heads,D,…]."""

    def edit(tensors: LayerTensors, config: Any) -> None:
        for name in names:
            heads = tensors[name].unflatten(0, (-1, config.head_dim))
            tensors[name] = change(heads, config.head_dim).flatten(0, 1)

    return edit


def _rolled(by: int) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda value: value.roll(by, 0)


def _of_tensor(
    name: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[LayerTensors, Any], None]:
    def edit(tensors: LayerTensors, _: Any) -> None:
        tensors[f"self_attn.{name}.weight"] = change(tensors[f"self_attn.{name}.weight"])

    return edit


def _norms() -> Iterator[Plant]:
    for site, factor in (
        (Site.POST_NORM, 0.97),
        (Site.POST_NORM, 1.5),
        (Site.ATTN_RESIDUAL, 1.01),
    ):
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
        "attn_context × 1.1",
        Site.ATTN_CONTEXT,
        scaled(1.1),
        *("attention_delta_scaled", "projection_scaled"),
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


def _rotate_fewer(width: int) -> Callable[..., torch.Tensor]:
    """Rotate by no angle the pairs behind the first `width` / 2."""

    def stage(_: Any, layer: Arithmetic, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
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


PLANTS: tuple[Plant, ...] = (*_norms(), *_rotary(), *_attention(), *lookalikes_moe.PLANTS)
