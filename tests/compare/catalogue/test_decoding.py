"""Mistakes of decoding compute what a port computes that makes them, and steps through its cache entry by entry."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch

from compare.catalogue.cached_attention import DecodedInputs, decoded_inputs
from compare.catalogue.candidates import Parameters
from compare.catalogue.decoding import DECODING_MISTAKES, round_to_fp8
from compare.catalogue.mistake import Mistake
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, LayerInputs, with_given
from minimax_tools.reference.float32_stages import split_heads

NUM_DECODED = 3
# A prompt of nine tokens beside one of six, which is padded in front or behind.
RIGHT = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
LEFT = RIGHT.flip(1)
# Keys and values of a prompt's tokens, [2,K,n,D], or of all prompts, [2,B,K,S,D].
Entries = torch.Tensor
# From the right entries of a prompt, the number of prefilled ones, and the step: the entries that it attends to.
Read = Callable[[Entries, int, int], Entries]


@pytest.fixture(scope="module", params=[RIGHT, LEFT], ids=["right", "left"])
def layer(request: pytest.FixtureRequest, open_layer: Callable[..., Evaluation]) -> Evaluation:
    return open_layer(request.param, num_decoded=NUM_DECODED)


def find(name: str) -> Mistake:
    (mistake,) = (mistake for mistake in DECODING_MISTAKES if mistake.name == name)
    return mistake


def changed(layer: Evaluation, name: str, /, **parameters: int | str) -> Evaluation:
    return layer.changed(find(name).build(**parameters))


def entries_of(layer: Evaluation) -> Entries:
    values = split_heads(layer[Site.V_PROJ], layer.spec.head_dim)
    return torch.stack((layer[Site.K_ROPE], values))


@pytest.fixture
def attend(layer: Evaluation, stepped: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Computes attention of the layer's decoded tokens over what each reads."""

    def attend(read: Read, *, past: Entries | None = None) -> torch.Tensor:
        return stepped(
            layer[Site.Q_ROPE],
            entries_of(layer),
            layer.attention_mask,
            read,
            num_decoded=NUM_DECODED,
            past=past,
        )

    return attend


def up_to_own(entries: Entries, num_prefilled: int, step: int) -> Entries:
    return entries[:, :, : num_prefilled + step]


def without(place: Callable[[int, int], int]) -> Read:
    """Reads all but one entry."""

    def read(entries: Entries, num_prefilled: int, step: int) -> Entries:
        seen, hidden = up_to_own(entries, num_prefilled, step), place(num_prefilled, step)
        return torch.cat((seen[:, :, :hidden], seen[:, :, hidden + 1 :]), dim=2)

    return read


def writing_beside(by: int, *, reads_own: bool) -> Read:
    """Writes each step's entry `by` from its own; what was never written holds zeros."""

    def read(entries: Entries, num_prefilled: int, step: int) -> Entries:
        cache = torch.zeros_like(entries[:, :, :1]).repeat(1, 1, 20, 1)
        cache[:, :, :num_prefilled] = entries[:, :, :num_prefilled]
        for written in range(num_prefilled, num_prefilled + step - reads_own):
            cache[:, :, written + by] = entries[:, :, written]
        own = entries[:, :, num_prefilled + step - 1, None]
        if reads_own:
            return torch.cat((cache[:, :, : num_prefilled + step - 1], own), dim=2)
        return cache[:, :, : num_prefilled + step]

    return read


@pytest.mark.parametrize(
    ("name", "parameters", "read"),
    [
        ("decode_mask_short", {"entry": "the newest"}, without(lambda prefilled, step: prefilled + step - 2)),
        (
            "decode_mask_short",
            {"entry": "the token's own"},
            without(lambda prefilled, step: prefilled + step - 1),
        ),
        ("decode_mask_short", {"entry": "the first"}, without(lambda prefilled, step: 0)),
        (
            "decode_past_missing",
            {"part": "all"},
            lambda seen, prefilled, step: seen[:, :, [prefilled + step - 1]],
        ),
        (
            "decode_past_missing",
            {"part": "prefill"},
            lambda seen, prefilled, step: seen[:, :, prefilled : prefilled + step],
        ),
        (
            "decode_past_missing",
            {"part": "decoded"},
            lambda seen, prefilled, step: seen[:, :, [*range(prefilled), prefilled + step - 1]],
        ),
        *(
            ("cache_one_row_off", {"by": by, "reads": reads}, writing_beside(by, reads_own=reads_own))
            for by in (1, -1)
            for reads, reads_own in (("before it writes", True), ("after it writes", False))
        ),
    ],
)
def test_step_reads_other_entries(
    layer: Evaluation,
    attend: Callable[..., torch.Tensor],
    name: str,
    parameters: Parameters,
    read: Read,
) -> None:
    found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(read))


def keys_at(layer: Evaluation, positions: torch.Tensor) -> torch.Tensor:
    return on(layer, position_ids=positions)[Site.K_ROPE]


def on(layer: Evaluation, **parts: object) -> Evaluation:
    """A layer with other inputs."""
    return Evaluation(
        replace(layer.inputs, **parts), with_given({Site.INPUT: layer[Site.INPUT]}), tokens=layer.tokens
    )


@pytest.mark.parametrize(
    ("name", "parameters", "edit"),
    [
        ("cache_of_another_prompt", {"by": 1}, lambda layer, right: right[:, [1, 0]]),
        (
            "cache_heads_exchanged",
            {"order": "reversed", "tokens": "all"},
            lambda layer, right: right[:, :, [3, 2, 1, 0]],
        ),
        (
            "cache_heads_exchanged",
            {"order": "rolled", "tokens": "all"},
            lambda layer, right: right[:, :, [3, 0, 1, 2]],
        ),
        (
            "cache_heads_exchanged",
            {"order": "rolled", "tokens": "decoded"},
            lambda layer, right: torch.where(
                decoded_inputs(layer).is_decoded[:, None, :, None], right[:, :, [3, 0, 1, 2]], right
            ),
        ),
        (
            "cache_fp8_without_scale",
            {"dtype": "float8_e5m2"},
            lambda layer, right: right.to(torch.float8_e5m2).float(),
        ),
        (
            "cache_keys_rotated_wrongly",
            {"times": -1},
            lambda layer, right: torch.stack(
                (keys_at(layer, torch.zeros_like(layer.position_ids)), right[1])
            ),
        ),
        (
            "cache_keys_rotated_wrongly",
            {"times": 1},
            lambda layer, right: torch.stack((keys_at(layer, 2 * layer.position_ids), right[1])),
        ),
    ],
)
def test_cache_holds_other_entries(
    layer: Evaluation,
    attend: Callable[..., torch.Tensor],
    name: str,
    parameters: Parameters,
    edit: Callable[[Evaluation, Entries], Entries],
) -> None:
    found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(up_to_own, past=edit(layer, entries_of(layer))))


def test_cache_of_another_layer_is_read_beside_the_tokens_own_entry(
    layer: Evaluation, attend: Callable[..., torch.Tensor]
) -> None:
    other = torch.randn(entries_of(layer).shape, generator=torch.Generator().manual_seed(1))
    given = on(layer, caches={3: tuple(other)})
    found = changed(given, "cache_of_another_layer", layer=3)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(up_to_own, past=other))


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
def test_padding_is_read_as_often_as_it_lies_there(
    layer: Evaluation, attend: Callable[..., torch.Tensor], part: str, content: str
) -> None:
    states = {
        name: torch.randn(layer.spec.hidden_size, generator=torch.Generator().manual_seed(seed))
        for seed, name in enumerate(("token 7", "token 0"))
    }
    padded = on(layer, padding=states)

    def padding(content: str, num_prefilled: int, num_times: int) -> Entries:
        name, _, place = content.partition(" at ")
        if content == "zeros":
            entry = torch.zeros_like(entries_of(layer)[:, 0, :, :1])
        else:
            entry = entry_of(layer, states[name], position=0 if place == "0" else num_prefilled - 1)
        return entry.repeat(1, 1, num_times, 1)

    def read(entries: Entries, num_prefilled: int, step: int) -> Entries:
        # The prefill has six columns, the bucket eight.
        seen = [up_to_own(entries, num_prefilled, step), padding(content, num_prefilled, 2)]
        if part != "bucket":
            # mm2 pads with the first token of `padding`: in front at position 0, behind at the last.
            place = "the last" if bool(layer.attention_mask[1, 0]) else "0"
            of_batch = content if content == "zeros" else f"token 7 at {place}"
            seen.append(padding(of_batch, num_prefilled, 6 - num_prefilled))
        return torch.cat(seen, dim=2)

    found = changed(padded, "decode_padding_visible", width=8, of=part, content=content)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(read))


@pytest.mark.parametrize(
    ("name", "parameters", "positions"),
    [
        ("decode_positions_restarted", {"start": "0 at every pass"}, [0, 0, 0, 0, 0, 0]),
        ("decode_positions_restarted", {"start": "0 behind the first pass"}, [0, 1, 2, 0, 1, 2]),
        ("decode_positions_off", {"by": 2}, [8, 9, 10, 5, 6, 7]),
    ],
)
@pytest.mark.parametrize("of", ["queries and keys", "queries", "keys"])
def test_decoded_tokens_are_rotated_by_other_positions(
    layer: Evaluation, name: str, parameters: Parameters, positions: list[int], of: str
) -> None:
    moved, found = with_decoded_at(layer, positions), changed(layer, name, **parameters, of=of)
    for site, kind in ((Site.Q_ROPE, "queries"), (Site.K_ROPE, "keys")):
        torch.testing.assert_close(found[site], (moved if kind in of else layer)[site])


def test_decoded_tokens_are_rotated_by_their_columns(layer: Evaluation) -> None:
    moved, found = with_decoded_at(layer, [6, 7, 8, 6, 7, 8]), changed(layer, "decode_positions_of_columns")
    for site in (Site.Q_ROPE, Site.K_ROPE):
        torch.testing.assert_close(found[site], moved[site])


def with_decoded_at(layer: Evaluation, positions: list[int]) -> Evaluation:
    position_ids = layer.position_ids.clone()
    position_ids[decoded_inputs(layer).is_decoded] = torch.tensor(positions)
    return on(layer, position_ids=position_ids)


def parameters_of(name: str, inputs: DecodedInputs) -> list[tuple[int | str | float, ...]]:
    return [tuple(parameters.values()) for parameters in find(name).candidates(inputs)]


def test_layer_that_decodes_nothing_is_not_asked_for_its_cache(layer: Evaluation) -> None:
    inputs = layer.inputs
    plain = LayerInputs(**{field.name: getattr(inputs, field.name) for field in fields(LayerInputs)})
    for name in ("cache_of_another_layer", "cache_of_another_prompt", "decode_padding_visible"):
        assert list(find(name).candidates(plain)) == []


def test_padding_is_tried_up_to_the_buckets_that_hold_the_prefill(layer: Evaluation) -> None:
    inputs = decoded_inputs(on(layer, padding={"token 7": torch.zeros(1)}))
    contents = ("zeros", "token 7 at 0", "token 7 at the last")
    buckets = [8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192]
    assert parameters_of("decode_padding_visible", inputs) == [
        (width, part, content)
        for part, widths in (("bucket", buckets), ("batch and bucket", [6, *buckets]))
        for width in widths
        for content in contents
    ]
    # Of a longer prefill, without padding in the batch: multiples of each size.
    mask = torch.ones(1, 20, dtype=torch.int64)
    alone = replace(inputs, attention_mask=mask, numbers=(mask.cumsum(1) - 17).clamp(min=0), padding={})
    assert parameters_of("decode_padding_visible", alone) == [
        (width, "bucket", "zeros") for width in (24, 32, *buckets[3:])
    ]


def test_mistakes_that_cannot_show_are_not_tried(layer: Evaluation) -> None:
    inputs = decoded_inputs(layer)
    assert parameters_of("decode_positions_of_columns", inputs) == [()]
    assert parameters_of("cache_of_another_prompt", inputs) == [(1,), (-1,)]
    mask = torch.ones(1, 9, dtype=torch.int64)
    alone = replace(
        inputs, attention_mask=mask, numbers=(mask.cumsum(1) - 6).clamp(min=0), caches={2: None, 5: None}
    )  # type: ignore[dict-item]
    for name in ("decode_positions_of_columns", "cache_of_another_prompt"):
        assert parameters_of(name, alone) == []
    assert parameters_of("cache_of_another_layer", alone) == [(2,), (5,)]


@pytest.mark.parametrize(("num_heads", "orders"), [(1, ()), (2, ("reversed",)), (4, ("reversed", "rolled"))])
def test_heads_are_exchanged_in_each_order_that_differs(
    layer: Evaluation, num_heads: int, orders: tuple[str, ...]
) -> None:
    inputs = decoded_inputs(layer)
    inputs = replace(inputs, spec=replace(inputs.spec, num_key_value_heads=num_heads))
    assert parameters_of("cache_heads_exchanged", inputs) == [
        (order, tokens) for tokens in ("decoded", "all") for order in orders
    ]


@pytest.mark.parametrize(("dtype", "largest"), [("float8_e4m3fn", 448.0), ("float8_e5m2", 57344.0)])
def test_fp8_is_clipped_at_its_largest_number(dtype: str, largest: float) -> None:
    assert round_to_fp8(torch.tensor([1e6, -1e6]), dtype).tolist() == [largest, -largest]


# Tokens of each prompt in each pass.
CHUNKS = ((2, 1), (3, 2), (1, 1), (3, 2))
WIDTHS = [max(sizes) for sizes in CHUNKS]
# From the right entries of a prompt, the place of a token, and that at which its pass begins: the entries that it sees.
See = Callable[[Entries, int, int], Entries]


@pytest.fixture(scope="module", params=[RIGHT, LEFT], ids=["right", "left"])
def chunked(request: pytest.FixtureRequest, open_layer: Callable[..., Evaluation]) -> Evaluation:
    layer = open_layer(request.param, num_decoded=0, chunks=CHUNKS)
    chosen = decoded_inputs(layer).is_changed.flatten().nonzero().flatten()
    return Evaluation(layer.inputs, with_given({Site.INPUT: layer[Site.INPUT]}), tokens=chosen)


def edges_of(row: int) -> list[int]:
    """The places in a prompt at which its passes end."""
    edges: list[int] = torch.tensor([sizes[row] for sizes in CHUNKS]).cumsum(0).tolist()
    return edges


def attend_chunks(layer: Evaluation, see: See) -> torch.Tensor:
    """Attention of the tokens of chunks behind the first, [T,N·D], as a port computes it that sees such entries."""
    contexts = []
    for row, is_real in enumerate(layer.attention_mask.bool()):
        entries = entries_of(layer)[:, row][:, :, is_real]
        for (start, end), width in zip(itertools.pairwise(edges_of(row)), WIDTHS[1:], strict=True):
            for place in range(start, end) if width > 1 else ():
                query = layer[Site.Q_ROPE][row][:, is_real][:, place]
                keys, values = see(entries, place, start).repeat_interleave(
                    len(query) // entries.shape[1], dim=1
                )
                scores = (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
                contexts.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
    return torch.stack(contexts)


def written_beside(by: int, *, reads_own_pass: bool) -> See:
    """Writes each chunk behind the first `by` entries from its own; what was never written holds zeros."""

    def see(entries: Entries, place: int, start: int) -> Entries:
        edges = edges_of(0 if entries.shape[2] == 9 else 1)
        cache = torch.zeros_like(entries[:, :, :1]).repeat(1, 1, 12, 1)
        cache[:, :, : edges[0]] = entries[:, :, : edges[0]]
        for (first, end), width in zip(itertools.pairwise(edges), WIDTHS[1:], strict=True):
            if first < start or (reads_own_pass and first == start):
                moved = by if width > 1 else 0
                cache[:, :, first + moved : end + moved] = entries[:, :, first:end]
        if reads_own_pass:
            return cache[:, :, : place + 1]
        return torch.cat((cache[:, :, :start], entries[:, :, start : place + 1]), dim=2)

    return see


def whole_pass(entries: Entries, place: int, start: int) -> Entries:
    return entries[:, :, : min(end for end in edges_of(0 if entries.shape[2] == 9 else 1) if end > place)]


@pytest.mark.parametrize(
    ("name", "parameters", "see"),
    [
        (
            "decode_past_missing",
            {"part": "all"},
            lambda entries, place, start: entries[:, :, start : place + 1],
        ),
        (
            "decode_mask_short",
            {"entry": "the newest"},
            lambda entries, place, start: entries[:, :, [*range(start - 1), *range(start, place + 1)]],
        ),
        (
            "chunk_order_wrong",
            {"sees": "from the first key on"},
            lambda entries, place, start: entries[:, :, : place - start + 1],
        ),
        (
            "chunk_order_wrong",
            {"sees": "the whole pass"},
            whole_pass,
        ),
        *(
            (
                "cache_one_row_off",
                {"by": by, "reads": reads},
                written_beside(by, reads_own_pass=reads == "after it writes"),
            )
            for by in (1, -1)
            for reads in ("before it writes", "after it writes")
        ),
    ],
)
def test_token_of_a_chunk_sees_other_entries(
    chunked: Evaluation, name: str, parameters: Parameters, see: See
) -> None:
    found = changed(chunked, name, **parameters)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend_chunks(chunked, see))


def test_each_mistake_changes_a_chunk(chunked: Evaluation) -> None:
    right = chunked[Site.ATTN_CONTEXT]
    torch.testing.assert_close(
        right, attend_chunks(chunked, lambda entries, place, start: entries[:, :, : place + 1])
    )
    for mistake in DECODING_MISTAKES:
        for hypothesis in mistake.hypotheses(chunked.inputs):
            wrong = chunked.changed(hypothesis.change)[Site.ATTN_CONTEXT]
            assert wrong.isfinite().all()
            assert not torch.allclose(wrong, right, rtol=1e-3, atol=1e-4), hypothesis.parameters


def test_the_first_token_of_each_chunk_is_rotated_alone(chunked: Evaluation) -> None:
    moved = changed(chunked, "decode_positions_off", by=-1, of="keys", tokens="the first of each pass")
    is_moved = (moved[Site.K_ROPE] != chunked[Site.K_ROPE]).any(-1).any(1)
    ordinals = decoded_inputs(chunked).ordinals()
    first = torch.tensor([[2, 6], [1, 4]])
    assert is_moved.equal((ordinals[..., None] == first[:, None]).any(-1) & chunked.attention_mask.bool())
    torch.testing.assert_close(moved[Site.Q_ROPE], chunked[Site.Q_ROPE])
