"""Mistakes of decoding compute what a port computes that makes them, and steps through its cache entry by entry."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import pytest
import torch

from compare.catalogue.cached_attention import (
    HIDDEN,
    attend_view,
    decoded_inputs,
    right_view,
)
from compare.catalogue.candidates import Parameters
from compare.catalogue.decoding import DECODING_MISTAKES, round_to_fp8
from compare.catalogue.mistake import Mistake
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, with_given
from minimax_tools.reference.float32_stages import split_heads

# A prompt of nine tokens beside one of six, which is padded in front or behind.
RIGHT = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
LEFT = RIGHT.flip(1)
# Tokens of each prompt in each pass, where several are decoded at once.
CHUNKS = ((2, 1), (3, 2), (1, 1), (3, 2))
OpenLayer = Callable[..., Evaluation]
# Keys and values of a prompt's tokens, [2,K,n,D], or of all prompts, [2,B,K,S,D].
Entries = torch.Tensor


@dataclass(frozen=True)
class At:
    """A token: its place in its prompt, and the places at which its pass and the first step begin and end."""

    place: int
    start: int
    end: int
    prefill: int


# Entries that a token sees, as numbers.
See = Callable[[At], Iterable[int]]


def opened(open_layer: OpenLayer, mask: torch.Tensor, *, in_chunks: bool = False) -> Evaluation:
    """A layer whose chosen tokens are those on which mistakes act."""
    layer = open_layer(mask, num_decoded=0, chunks=CHUNKS) if in_chunks else open_layer(mask, num_decoded=3)
    chosen = decoded_inputs(layer).is_changed.flatten().nonzero().flatten()
    return Evaluation(layer.inputs, with_given({Site.INPUT: layer[Site.INPUT]}), tokens=chosen)


@pytest.fixture(scope="module", params=[RIGHT, LEFT], ids=["right", "left"])
def steps(open_layer: OpenLayer, request: pytest.FixtureRequest) -> Evaluation:
    """A layer that decodes each token alone."""
    return opened(open_layer, request.param)


@pytest.fixture(scope="module", params=[RIGHT, LEFT], ids=["right", "left"])
def chunks(open_layer: OpenLayer, request: pytest.FixtureRequest) -> Evaluation:
    """A layer that decodes several tokens at once."""
    return opened(open_layer, request.param, in_chunks=True)


@pytest.fixture(scope="module")
def layers(open_layer: OpenLayer) -> list[Evaluation]:
    """Evaluations of all layers."""
    return [
        opened(open_layer, mask, in_chunks=in_chunks) for mask in (RIGHT, LEFT) for in_chunks in (False, True)
    ]


def find(name: str) -> Mistake:
    (mistake,) = (mistake for mistake in DECODING_MISTAKES if mistake.name == name)
    return mistake


def changed(layer: Evaluation, name: str, /, **parameters: int | str) -> Evaluation:
    return layer.changed(find(name).build(**parameters))


def entries_of(layer: Evaluation) -> Entries:
    values = split_heads(layer[Site.V_PROJ], layer.spec.head_dim)
    return torch.stack((layer[Site.K_ROPE], values))


def edges_of(layer: Evaluation, row: int) -> tuple[list[int], list[bool]]:
    """The places at which the passes of a prompt end, and which of them a mistake changes."""
    inputs = decoded_inputs(layer)
    numbers = inputs.numbers[row][layer.attention_mask[row].bool()]
    # Of chunks, mistakes act on those of several tokens.
    num_tokens = torch.stack([(inputs.numbers == number).sum(1) for number in numbers.unique()]).amax(1)
    edges: list[int] = torch.bincount(numbers).cumsum(0).tolist()
    return edges, [not inputs.is_chunked or int(count) > 1 for count in num_tokens]


def attend(
    layer: Evaluation,
    see: See = lambda at: range(at.place + 1),
    *,
    past: Entries | None = None,
    beside: Callable[[int], Entries] | None = None,
    shift: tuple[int, bool] | None = None,
) -> torch.Tensor:
    """Attention of the chosen tokens, [T,N·D], as a port computes it that sees such entries.

    `past` are cached entries, if they are not the right ones: a token's own entry is right. `beside` are further ones,
    by the number of those that the prompt's prefill wrote. With a `shift`, passes are written so many entries from
    their own, before the token reads or after it.
    """
    contexts = []
    for row, is_real in enumerate(layer.attention_mask.bool()):
        own, (edges, is_changed) = entries_of(layer)[:, row][:, :, is_real], edges_of(layer, row)
        held = own if past is None else past[:, row][:, :, is_real]
        for place in decoded_inputs(layer).is_changed[row][is_real].nonzero().flatten().tolist():
            start = max(edge for edge in edges if edge <= place)
            end = min(edge for edge in edges if edge > place)
            query = layer[Site.Q_ROPE][row][:, is_real][:, place]
            at = At(place=place, start=start, end=end, prefill=edges[0])
            entries = torch.cat((held[:, :, :place], own[:, :, place:]), dim=2)
            if shift is not None:
                entries = shifted(entries, edges, is_changed, start, *shift)
            seen = entries[:, :, [*see(at)]]
            if beside is not None:
                seen = torch.cat((seen, beside(edges[0])), dim=2)
            keys, values = seen.repeat_interleave(len(query) // seen.shape[1], dim=1)
            scores = (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
            contexts.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
    return torch.stack(contexts)


def shifted(
    entries: Entries, edges: list[int], is_changed: list[bool], start: int, by: int, reads_own_pass: bool
) -> Entries:
    """Write each changed pass `by` entries from its own; what was never written holds zeros."""
    cache = torch.zeros_like(entries[:, :, :1]).repeat(1, 1, 20, 1)
    cache[:, :, : edges[0]] = entries[:, :, : edges[0]]
    for (first, end), is_moved in zip(itertools.pairwise(edges), is_changed[1:], strict=True):
        if first < start or (reads_own_pass and first == start):
            moved = by if is_moved else 0
            cache[:, :, first + moved : end + moved] = entries[:, :, first:end]
    return cache if reads_own_pass else torch.cat((cache[:, :, :start], entries[:, :, start:]), dim=2)


@pytest.mark.parametrize(
    ("name", "parameters", "see"),
    [
        *(
            ("decode_mask_short", {"entry": entry}, see)
            for entry, see in (
                ("the newest", lambda at: [*range(at.start - 1), *range(at.start, at.place + 1)]),
                ("the token's own", lambda at: range(at.place)),
                ("the first", lambda at: range(1, at.place + 1)),
            )
        ),
        *(
            ("decode_past_missing", {"part": part}, see)
            for part, see in (
                ("all", lambda at: range(at.start, at.place + 1)),
                ("prefill", lambda at: range(at.prefill, at.place + 1)),
                ("decoded", lambda at: [*range(at.prefill), *range(at.start, at.place + 1)]),
            )
        ),
        (
            "chunk_order_wrong",
            {"sees": "from the first key on"},
            lambda at: range(at.place - at.start + 1),
        ),
        ("chunk_order_wrong", {"sees": "the whole pass"}, lambda at: range(at.end)),
    ],
)
def test_token_sees_other_entries(
    layers: list[Evaluation], name: str, parameters: Parameters, see: See
) -> None:
    for layer in layers:
        found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
        torch.testing.assert_close(found, attend(layer, see))


@pytest.mark.parametrize("by", [1, -1])
@pytest.mark.parametrize("reads", ["before it writes", "after it writes"])
def test_passes_are_written_one_entry_off(layers: list[Evaluation], by: int, reads: str) -> None:
    for layer in layers:
        found = changed(layer, "cache_one_row_off", by=by, reads=reads)[Site.ATTN_CONTEXT]
        torch.testing.assert_close(found, attend(layer, shift=(by, reads == "after it writes")))


def test_each_mistake_changes_the_tokens(layers: list[Evaluation]) -> None:
    for layer in layers:
        right = layer[Site.ATTN_CONTEXT]
        torch.testing.assert_close(right, attend(layer))
        for mistake in DECODING_MISTAKES:
            for hypothesis in mistake.hypotheses(layer.inputs):
                wrong = layer.changed(hypothesis.change)[Site.ATTN_CONTEXT]
                assert wrong.isfinite().all()
                assert not torch.allclose(wrong, right, rtol=1e-3, atol=1e-4), hypothesis.parameters


def on(layer: Evaluation, **parts: object) -> Evaluation:
    """A layer with other inputs."""
    return Evaluation(
        replace(layer.inputs, **parts), with_given({Site.INPUT: layer[Site.INPUT]}), tokens=layer.tokens
    )


def rotated_keys(layer: Evaluation, right: Entries, times: int) -> Entries:
    """The right entries, with keys at so many times their positions."""
    return torch.stack((on(layer, position_ids=times * layer.position_ids)[Site.K_ROPE], right[1]))


def rolled_where_decoded(layer: Evaluation, right: Entries) -> Entries:
    return torch.where(decoded_inputs(layer).is_changed[:, None, :, None], right.roll(1, 2), right)


@pytest.mark.parametrize(
    ("name", "parameters", "edit"),
    [
        ("cache_of_another_prompt", {"by": 1}, lambda _, right: right[:, [1, 0]]),
        ("cache_heads_exchanged", {"order": "reversed", "tokens": "all"}, lambda _, right: right.flip(2)),
        ("cache_heads_exchanged", {"order": "rolled", "tokens": "all"}, lambda _, right: right.roll(1, 2)),
        ("cache_heads_exchanged", {"order": "rolled", "tokens": "decoded"}, rolled_where_decoded),
        (
            "cache_fp8_without_scale",
            {"dtype": "float8_e5m2"},
            lambda _, right: right.to(torch.float8_e5m2).float(),
        ),
        ("cache_keys_rotated_wrongly", {"times": -1}, lambda layer, right: rotated_keys(layer, right, 0)),
        ("cache_keys_rotated_wrongly", {"times": 1}, lambda layer, right: rotated_keys(layer, right, 2)),
    ],
)
def test_cache_holds_other_entries(
    layers: list[Evaluation],
    name: str,
    parameters: Parameters,
    edit: Callable[[Evaluation, Entries], Entries],
) -> None:
    for layer in layers:
        found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
        torch.testing.assert_close(found, attend(layer, past=edit(layer, entries_of(layer))))


def test_cache_of_another_layer_is_read_beside_the_tokens_own_entry(layers: list[Evaluation]) -> None:
    for layer in layers:
        other = torch.randn(entries_of(layer).shape, generator=torch.Generator().manual_seed(1))
        given = on(layer, caches={3: tuple(other)})
        found = changed(given, "cache_of_another_layer", layer=3)[Site.ATTN_CONTEXT]
        torch.testing.assert_close(found, attend(layer, past=other))


def entry_of(layer: Evaluation, states: torch.Tensor, *, position: int) -> Entries:
    """The entry [2,K,1,D] of a token whose input of the layer is `states` [H]."""
    one = torch.ones(1, 1, dtype=torch.int64)
    alone = Evaluation(
        replace(layer.inputs, attention_mask=one, position_ids=position * one),
        with_given({Site.INPUT: states[None, None]}),
        tokens=torch.tensor([0]),
    )
    return entries_of(alone)[:, 0]


@pytest.mark.parametrize("part", ["bucket", "batch and bucket"])
@pytest.mark.parametrize("content", ["zeros", "token 0 at 0", "token 7 at the last"])
def test_padding_is_read_as_often_as_it_lies_there(steps: Evaluation, part: str, content: str) -> None:
    states = {
        name: torch.randn(steps.spec.hidden_size, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("token 7", "token 0"))
    }
    padded = on(steps, padding=states)

    def padding(content: str, num_prefilled: int, num_times: int) -> Entries:
        name, _, place = content.partition(" at ")
        if content == "zeros":
            entry = torch.zeros_like(entries_of(steps)[:, 0, :, :1])
        else:
            entry = entry_of(steps, states[name], position=0 if place == "0" else num_prefilled - 1)
        return entry.repeat(1, 1, num_times, 1)

    def beside(num_prefilled: int) -> Entries:
        # The prefill has six columns, the bucket eight.
        of_bucket = padding(content, num_prefilled, 2)
        if part == "bucket":
            return of_bucket
        # mm2 pads with the first token of `padding`: in front at position 0, behind at the last.
        place = "the last" if bool(steps.attention_mask[1, 0]) else "0"
        of_batch = content if content == "zeros" else f"token 7 at {place}"
        return torch.cat((of_bucket, padding(of_batch, num_prefilled, 6 - num_prefilled)), dim=2)

    found = changed(padded, "decode_padding_visible", width=8, of=part, content=content)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(steps, beside=beside))


@pytest.mark.parametrize(
    ("name", "parameters", "positions"),
    [
        ("decode_positions_restarted", {"start": "0 at every pass"}, [0, 0, 0, 0, 0, 0]),
        ("decode_positions_restarted", {"start": "0 behind the first pass"}, [0, 1, 2, 0, 1, 2]),
        ("decode_positions_off", {"by": 2}, [8, 9, 10, 5, 6, 7]),
        ("decode_positions_of_columns", {}, [6, 7, 8, 6, 7, 8]),
    ],
)
def test_decoded_tokens_are_rotated_by_other_positions(
    steps: Evaluation, name: str, parameters: Parameters, positions: list[int]
) -> None:
    position_ids = steps.position_ids.clone()
    position_ids[decoded_inputs(steps).is_decoded] = torch.tensor(positions)
    moved = on(steps, position_ids=position_ids)
    for of in ("queries and keys", "queries", "keys") if parameters else ("",):
        found = changed(steps, name, **parameters, **({"of": of} if of else {}))
        for site, kind in ((Site.Q_ROPE, "queries"), (Site.K_ROPE, "keys")):
            torch.testing.assert_close(found[site], (moved if not of or kind in of else steps)[site])


def test_steps_count_the_decoded_tokens_of_each_prompt(open_layer: OpenLayer) -> None:
    mask = torch.tensor([[1, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0]])
    layer = open_layer(mask, num_decoded=2)
    inputs = decoded_inputs(layer)
    assert inputs.numbers.tolist() == [[0, 0, 0, 0, 0, 1, 2], [0, 0, 0, 1, 2, 0, 0]]
    assert inputs.columns()[inputs.is_decoded].tolist() == [5, 6, 5, 6]
    assert (inputs.prefilled().tolist(), inputs.num_decoded, inputs.prefill_width) == ([5, 3], 2, 5)
    # A token that sees nothing gets zeros.
    right = right_view(layer)
    hidden, own = torch.full_like(right.shown, HIDDEN), torch.zeros_like(right.shows_own)
    assert not attend_view(layer, replace(right, shown=hidden, shows_own=own)).any()


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_is_clipped_at_its_largest_number(dtype: str, largest: float) -> None:
    assert round_to_fp8(torch.tensor([1e6, -1e6]), dtype).tolist() == [largest, -largest]


def test_the_first_token_of_each_chunk_is_rotated_alone(chunks: Evaluation) -> None:
    moved = changed(chunks, "decode_positions_off", by=-1, of="keys", tokens="the first of each pass")
    is_moved = (moved[Site.K_ROPE] != chunks[Site.K_ROPE]).any(-1).any(1)
    ordinals = decoded_inputs(chunks).ordinals()
    first = torch.tensor([[2, 6], [1, 4]])
    assert is_moved.equal((ordinals[..., None] == first[:, None]).any(-1) & chunks.attention_mask.bool())
    torch.testing.assert_close(moved[Site.Q_ROPE], chunks[Site.Q_ROPE])
