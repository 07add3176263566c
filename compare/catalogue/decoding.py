"""Mistakes of decoding: what a pass reads of the cache, and where it thinks that its tokens stand.

B prompts, S columns of the batch, P entries that may be read, K kv heads, D head_dim, T decoded tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

import torch

from compare.catalogue.cached_attention import (
    CacheView,
    DecodedInputs,
    TokenPlaces,
    attend_view,
    decoded_inputs,
    right_view,
    token_places,
)
from compare.catalogue.candidates import Parameters, each, once_if, values_of
from compare.catalogue.low_bits import FP8_DTYPES, round_to_fp8
from compare.catalogue.mistake import Candidates, Mistake
from compare.catalogue.words import Place
from minimax_tools.model import weight_names
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Change, Evaluation, LayerInputs, replace_stage
from minimax_tools.reference.float32_stages import normalise, rotate_halves, rotation_angles, unrotated_heads

# From the layer's inputs to the positions of all tokens, int64 [B,S].
_Positions = Callable[[DecodedInputs], torch.Tensor]

_LOWER_DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}
# Lengths that a prefill is padded to: multiples and powers of two.
_BUCKETS = (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def _reading(view: Callable[[Evaluation], CacheView]) -> Change:
    return replace_stage(Site.ATTN_CONTEXT, lambda layer: attend_view(layer, view(layer)))


def _of_decoded(is_whole_run: Callable[[DecodedInputs], bool]) -> Candidates:
    return once_if(lambda inputs: isinstance(inputs, DecodedInputs) and is_whole_run(inputs))


def _each_of(name: str, values: Callable[[DecodedInputs], Iterable[int | str]]) -> Candidates:
    return each(name, lambda inputs: values(inputs) if isinstance(inputs, DecodedInputs) else ())


def _rotated(of: str, positions: _Positions) -> Change:
    def rotate(layer: Evaluation, *, site: Site) -> torch.Tensor:
        inputs = decoded_inputs(layer)
        angles = rotation_angles(layer, positions(inputs))
        turned = rotate_halves(unrotated_heads(layer, site), angles)
        return torch.where(inputs.is_changed[:, None, :, None], turned, layer.base[site])

    chosen = {"queries": (Site.Q_ROPE,), "keys": (Site.K_ROPE,)}.get(of, (Site.Q_ROPE, Site.K_ROPE))
    return Change(stages={site: partial(rotate, site=site) for site in chosen})


_STARTS: dict[str, _Positions] = {
    "0 at every pass": lambda inputs: inputs.ordinals() - inputs.starts(),
    "0 behind the first pass": lambda inputs: (inputs.ordinals() - inputs.prefilled()[:, None]).clamp(min=0),
}


def _moved(by: int, tokens: str) -> _Positions:
    """Move the positions of tokens behind a cache, or of each pass's first."""

    def positions(inputs: DecodedInputs) -> torch.Tensor:
        is_moved = inputs.ordinals() == inputs.starts() if tokens == "the first of each pass" else True
        return inputs.position_ids + torch.where(torch.as_tensor(is_moved), by, 0)

    return positions


def _moves(inputs: LayerInputs) -> tuple[Parameters, ...]:
    """List by how much positions may be off; in steps each token is the first of its pass."""
    is_chunked = isinstance(inputs, DecodedInputs) and inputs.is_chunked
    tokens = ("all", "the first of each pass") if is_chunked else ("all",)
    return tuple(
        {"by": by, "of": of, **({"tokens": which} if is_chunked else {})}
        for which in tokens
        for by in (1, -1, 2, -2)
        for of in _Q_OR_K
    )


def _one_row_off(by: int, reads: str) -> Change:
    """Let passes write `by` entries from their tokens' own, and read entries as if they were right."""

    def view(layer: Evaluation) -> CacheView:
        at = TokenPlaces.of(layer)
        entries = at.ordinals + by * at.is_changed
        reads_own_pass = reads == "after it writes"
        is_written = at.is_real & (at.numbers < at.own_number + reads_own_pass)
        # Two neighbours of a row share an entry where one is moved towards the other; the later one takes it.
        next_changed, next_written = (part.roll(-1, dims=1) for part in (at.is_changed, is_written))
        is_taken = next_written & (~at.is_changed & next_changed if by < 0 else at.is_changed & ~next_changed)
        is_held = is_written & ~is_taken
        num_read = at.own_ordinal + 1 if reads_own_pass else at.own_start
        is_seen = is_held & (entries < num_read)
        # An entry that is read and was never written holds zeros.
        num_empty = num_read[:, 0] - is_seen.sum(1)
        if not reads_own_pass:
            is_seen |= at.is_real & (at.numbers == at.own_number) & (at.ordinals <= at.own_ordinal)
        view = at.show(layer, is_seen)
        empty = torch.zeros(view.keys.shape[1], view.keys.shape[3])
        return view.with_entry(empty, empty, num_empty)

    return _reading(view)


def _entry_hidden(entry: str) -> Change:
    def view(layer: Evaluation) -> CacheView:
        right, at = right_view(layer), TokenPlaces.of(layer)
        if entry == "the token's own":
            return replace(right, shows_own=torch.zeros_like(right.shows_own))
        return right.hide(at.ordinals == (at.own_start - 1 if entry == "the newest" else 0))

    return _reading(view)


def _past_missing(part: str) -> Change:
    def view(layer: Evaluation) -> CacheView:
        at = TokenPlaces.of(layer)
        is_past = at.numbers < at.own_number
        missing = {"all": is_past, "decoded": is_past & (at.numbers > 0), "prefill": at.numbers == 0}[part]
        return right_view(layer).hide(missing)

    return _reading(view)


def _order_wrong(sees: str) -> Change:
    """Let the tokens of a pass see others of it in another order than theirs."""

    def view(layer: Evaluation) -> CacheView:
        at = TokenPlaces.of(layer)
        # What a token sees, by its place in its own pass.
        last = {
            "from the first key on": at.own_ordinal - at.own_start,
            "the whole pass": torch.full_like(at.own_ordinal, at.is_real.shape[1]),
            "the next token too": at.own_ordinal + 1,
        }[sees]
        return at.show(layer, at.is_real & (at.numbers <= at.own_number) & (at.ordinals <= last))

    return _reading(view)


def _of_layer(layer_idx: int) -> Change:
    def view(layer: Evaluation) -> CacheView:
        right = right_view(layer)
        keys, values = decoded_inputs(layer).caches[layer_idx]
        return replace(right, keys=keys, values=values)

    return _reading(view)


def _edited(
    edit: Callable[[Evaluation, torch.Tensor], torch.Tensor], *, decoded_only: bool = False
) -> Change:
    """Edit the cached keys, and the cached values, [B,K,S,D] each; perhaps those of decoded tokens alone."""

    def view(layer: Evaluation) -> CacheView:
        right = right_view(layer)
        keys, values = (edit(layer, part) for part in (right.keys, right.values))
        if decoded_only:
            is_decoded = decoded_inputs(layer).is_changed[:, None, :, None]
            keys, values = (
                torch.where(is_decoded, new, old) for new, old in ((keys, right.keys), (values, right.values))
            )
        return replace(right, keys=keys, values=values)

    return _reading(view)


def _heads(order: str, tokens: str) -> Change:
    def edit(_: Evaluation, part: torch.Tensor) -> torch.Tensor:
        return part.flip(1) if order == "reversed" else part.roll(1, dims=1)

    return _edited(edit, decoded_only=tokens == "decoded")


def _keys_rotated(times: int) -> Change:
    """Read keys that were rotated so many times more than once: -1 is not at all."""

    def view(layer: Evaluation) -> CacheView:
        right = right_view(layer)
        if times == -1:
            return replace(right, keys=unrotated_heads(layer, Site.K_ROPE))
        return replace(right, keys=rotate_halves(right.keys, rotation_angles(layer)))

    return _reading(view)


def _padding_visible(width: int, of: str, content: str) -> Change:
    """Show the padding of the batch, and that of a bucket of `width` columns, or the bucket's only."""

    def view(layer: Evaluation) -> CacheView:
        inputs, (rows, _) = decoded_inputs(layer), token_places(layer)
        num_in_bucket = torch.full_like(rows, width - inputs.prefill_width)
        shown = right_view(layer).with_entry(*_padding_pair(layer, content), num_in_bucket)
        if of == "bucket":
            return shown
        # The batch's own padding is what mm2 gave the port.
        of_batch = _padding_pair(layer, inputs.batch_padding if content != "zeros" else content)
        return shown.with_entry(*of_batch, inputs.prefill_width - inputs.prefilled()[rows])

    return _reading(view)


def _padding_pair(layer: Evaluation, content: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the key and value of padding, [K,D] or [B,K,D]: zeros, or those of a token at a position."""
    inputs, spec = decoded_inputs(layer), layer.spec
    if content == "zeros":
        zeros = torch.zeros(spec.num_key_value_heads, spec.head_dim)
        return zeros, zeros
    name, _, place = content.partition(" at ")
    normed = normalise(inputs.padding[name], layer.gain(weight_names.INPUT_NORM), spec.rms_norm_eps)
    key, value = (_projected(layer, weight, normed) for weight in (weight_names.K_PROJ, weight_names.V_PROJ))
    if spec.graph.has_qk_norm:
        key = normalise(key, layer.gain(weight_names.K_NORM), spec.rms_norm_eps)
    # The last position of each prompt's prefill, or 0.
    last = inputs.prefilled() - 1
    positions = last if place == "the last" else torch.zeros_like(last)
    angles = rotation_angles(layer, positions[:, None])
    heads = key.unflatten(0, (-1, spec.head_dim))[None, :, None].expand(len(angles), -1, -1, -1)
    return rotate_halves(heads, angles)[:, :, 0], value.unflatten(0, (-1, spec.head_dim))


def _projected(layer: Evaluation, weight: str, states: torch.Tensor) -> torch.Tensor:
    """Project states [H], and add the projection's bias if the graph has one."""
    bias = weight_names.bias_name(layer.spec.graph, weight)
    product = layer.weight(weight) @ states
    return product if bias is None else product + layer.weight(bias)


def _paddings(inputs: LayerInputs) -> tuple[Parameters, ...]:
    if not isinstance(inputs, DecodedInputs) or inputs.is_chunked:
        return ()
    width = inputs.prefill_width
    widths = sorted({width, *(-(-width // size) * size for size in _BUCKETS)})
    contents = ["zeros", *(f"{name} at {place}" for name in inputs.padding for place in ("0", "the last"))]
    parts = ["bucket", *(["batch and bucket"] if bool((inputs.prefilled() < width).any()) else [])]
    return tuple(
        {"width": padded, "of": part, "content": content}
        for part in parts
        for padded in widths
        for content in contents
        if padded > width or part != "bucket"
    )


def _has_several_rows(inputs: DecodedInputs) -> bool:
    return inputs.attention_mask.shape[0] > 1


_mistake = partial(Mistake, place=Place.DECODING)
_Q_OR_K = ("queries and keys", "queries", "keys")
DECODING_MISTAKES = (
    _mistake(
        name="decode_positions_restarted",
        build=lambda start, of: _rotated(of, _STARTS[start]),
        candidates=lambda _: tuple({"start": start, "of": of} for start in _STARTS for of in _Q_OR_K),
    ),
    _mistake(
        name="decode_positions_off",
        build=lambda by, of, tokens="all": _rotated(of, _moved(by, tokens)),
        candidates=_moves,
    ),
    _mistake(
        name="decode_positions_of_columns",
        build=lambda: _rotated("queries and keys", lambda inputs: inputs.columns()),
        candidates=_of_decoded(
            lambda inputs: bool((inputs.columns() != inputs.ordinals())[inputs.is_decoded].any())
        ),
    ),
    _mistake(
        name="cache_one_row_off",
        build=_one_row_off,
        candidates=lambda _: tuple(
            {"by": by, "reads": reads} for by in (1, -1) for reads in ("before it writes", "after it writes")
        ),
    ),
    _mistake(
        name="decode_mask_short",
        build=_entry_hidden,
        candidates=values_of("entry", "the newest", "the token's own", "the first"),
    ),
    _mistake(
        name="decode_past_missing",
        build=_past_missing,
        candidates=values_of("part", "decoded", "all", "prefill"),
    ),
    _mistake(
        name="chunk_order_wrong",
        build=_order_wrong,
        candidates=_each_of(
            "sees",
            lambda inputs: (
                ("from the first key on", "the whole pass", "the next token too") if inputs.is_chunked else ()
            ),
        ),
    ),
    _mistake(name="decode_padding_visible", build=_padding_visible, candidates=_paddings),
    _mistake(
        name="cache_of_another_layer",
        build=lambda layer: _of_layer(layer),
        candidates=_each_of("layer", lambda inputs: inputs.caches),
    ),
    _mistake(
        name="cache_of_another_prompt",
        build=lambda by: _edited(lambda _, part: part.roll(by, dims=0)),
        candidates=_each_of("by", lambda inputs: (1, -1) if _has_several_rows(inputs) else ()),
    ),
    _mistake(
        name="cache_fp8_without_scale",
        build=lambda dtype: _edited(lambda _, part: round_to_fp8(part, dtype)),
        candidates=values_of("dtype", *FP8_DTYPES),
        is_rounding=True,
    ),
    _mistake(
        name="cache_low_precision",
        build=lambda dtype: _edited(lambda _, part: part.to(_LOWER_DTYPES[dtype]).float()),
        candidates=_each_of(
            "dtype", lambda inputs: _LOWER_DTYPES if inputs.weights.dtype is torch.float32 else ()
        ),
        is_rounding=True,
    ),
    _mistake(
        name="cache_heads_exchanged",
        build=_heads,
        candidates=lambda inputs: tuple(
            {"order": order, "tokens": tokens}
            for tokens in ("decoded", "all")
            for order in (("reversed", "rolled") if inputs.spec.num_key_value_heads > 2 else ("reversed",))
            if inputs.spec.num_key_value_heads > 1
        ),
    ),
    _mistake(name="cache_keys_rotated_wrongly", build=_keys_rotated, candidates=values_of("times", -1, 1)),
)
