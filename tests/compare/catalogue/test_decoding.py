"""Mistakes of decoding compute what a port computes that makes them, and steps through its cache entry by entry."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields, replace

import pytest
import torch

from compare.catalogue.cached_attention import DecodedInputs, decoded_inputs
from compare.catalogue.candidates import Parameters
from compare.catalogue.decoding import DECODING_MISTAKES, round_to_fp8
from compare.catalogue.mistake import Mistake
from minimax_tools.model.sites import Site
from minimax_tools.reference.evaluation import Evaluation, LayerInputs, with_given
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
class Passes:
    """Passes of one prompt: the places at which they end, and which of them a mistake changes."""

    edges: list[int]
    is_changed: list[bool]

    def start(self, place: int) -> int:
        """The place at which the pass of a token begins."""
        return max(edge for edge in self.edges if edge <= place)


# From the right entries of a prompt, the place of a token, and the passes: the entries that it sees.
See = Callable[[Entries, int, Passes], Entries]


def opened(open_layer: OpenLayer, mask: torch.Tensor, *, in_chunks: bool) -> Evaluation:
    """A layer whose chosen tokens are those on which mistakes act."""
    layer = open_layer(mask, num_decoded=0, chunks=CHUNKS) if in_chunks else open_layer(mask, num_decoded=3)
    chosen = decoded_inputs(layer).is_changed.flatten().nonzero().flatten()
    return Evaluation(layer.inputs, with_given({Site.INPUT: layer[Site.INPUT]}), tokens=chosen)


@pytest.fixture(scope="module", params=[RIGHT, LEFT], ids=["right", "left"])
def mask(request: pytest.FixtureRequest) -> torch.Tensor:
    chosen: torch.Tensor = request.param
    return chosen


@pytest.fixture(scope="module")
def steps(open_layer: OpenLayer, mask: torch.Tensor) -> Evaluation:
    """A layer that decodes each token alone."""
    return opened(open_layer, mask, in_chunks=False)


@pytest.fixture(scope="module")
def chunks(open_layer: OpenLayer, mask: torch.Tensor) -> Evaluation:
    """A layer that decodes several tokens at once."""
    return opened(open_layer, mask, in_chunks=True)


@pytest.fixture(params=["steps", "chunks"])
def layer(request: pytest.FixtureRequest, steps: Evaluation, chunks: Evaluation) -> Evaluation:
    """Either of them."""
    return steps if request.param == "steps" else chunks


def find(name: str) -> Mistake:
    (mistake,) = (mistake for mistake in DECODING_MISTAKES if mistake.name == name)
    return mistake


def changed(layer: Evaluation, name: str, /, **parameters: int | str) -> Evaluation:
    return layer.changed(find(name).build(**parameters))


def entries_of(layer: Evaluation) -> Entries:
    values = split_heads(layer[Site.V_PROJ], layer.spec.head_dim)
    return torch.stack((layer[Site.K_ROPE], values))


def passes_of(layer: Evaluation, row: int) -> Passes:
    inputs = decoded_inputs(layer)
    is_real = layer.attention_mask[row].bool()
    numbers = inputs.numbers[row][is_real]
    # Of chunks, mistakes act on those of several tokens.
    num_tokens = torch.stack([(inputs.numbers == number).sum(1) for number in numbers.unique()]).amax(1)
    return Passes(
        edges=torch.bincount(numbers).cumsum(0).tolist(),
        is_changed=[not inputs.is_chunked or int(count) > 1 for count in num_tokens],
    )


def attend(layer: Evaluation, see: See, *, past: Entries | None = None) -> torch.Tensor:
    """Attention of the chosen tokens, [T,N·D], as a port computes it that sees such entries.

    `past` are cached entries, if they are not the right ones: a token's own entry is right.
    """
    contexts = []
    for row, is_real in enumerate(layer.attention_mask.bool()):
        own, passes = entries_of(layer)[:, row][:, :, is_real], passes_of(layer, row)
        held = own if past is None else past[:, row][:, :, is_real]
        for place in decoded_inputs(layer).is_changed[row][is_real].nonzero().flatten().tolist():
            query = layer[Site.Q_ROPE][row][:, is_real][:, place]
            seen = see(torch.cat((held[:, :, :place], own[:, :, place:]), dim=2), place, passes)
            keys, values = seen.repeat_interleave(len(query) // seen.shape[1], dim=1)
            scores = (keys @ query[..., None])[..., 0] * query.shape[-1] ** -0.5
            contexts.append((scores.softmax(-1)[..., None] * values).sum(1).flatten())
    return torch.stack(contexts)


def up_to_own(entries: Entries, place: int, passes: Passes) -> Entries:
    return entries[:, :, : place + 1]


def without(hidden: Callable[[int, int], int]) -> See:
    """Sees all but one entry, by the token's place and the start of its pass."""

    def see(entries: Entries, place: int, passes: Passes) -> Entries:
        entry = hidden(place, passes.start(place))
        return entries[:, :, [*range(entry), *range(entry + 1, place + 1)]]

    return see


def written_beside(by: int, *, reads_own_pass: bool) -> See:
    """Writes each changed pass `by` entries from its own; what was never written holds zeros."""

    def see(entries: Entries, place: int, passes: Passes) -> Entries:
        edges, start = passes.edges, passes.start(place)
        cache = torch.zeros_like(entries[:, :, :1]).repeat(1, 1, 20, 1)
        cache[:, :, : edges[0]] = entries[:, :, : edges[0]]
        for (first, end), is_changed in zip(itertools.pairwise(edges), passes.is_changed[1:], strict=True):
            if first < start or (reads_own_pass and first == start):
                moved = by if is_changed else 0
                cache[:, :, first + moved : end + moved] = entries[:, :, first:end]
        if reads_own_pass:
            return cache[:, :, : place + 1]
        return torch.cat((cache[:, :, :start], entries[:, :, start : place + 1]), dim=2)

    return see


def whole_pass(entries: Entries, place: int, passes: Passes) -> Entries:
    return entries[:, :, : min(edge for edge in passes.edges if edge > place)]


@pytest.mark.parametrize(
    ("name", "parameters", "see"),
    [
        ("decode_mask_short", {"entry": "the newest"}, without(lambda place, start: start - 1)),
        ("decode_mask_short", {"entry": "the token's own"}, without(lambda place, start: place)),
        ("decode_mask_short", {"entry": "the first"}, without(lambda place, start: 0)),
        (
            "decode_past_missing",
            {"part": "all"},
            lambda seen, place, passes: seen[:, :, passes.start(place) : place + 1],
        ),
        (
            "decode_past_missing",
            {"part": "prefill"},
            lambda seen, place, passes: seen[:, :, passes.edges[0] : place + 1],
        ),
        (
            "decode_past_missing",
            {"part": "decoded"},
            lambda seen, place, passes: seen[
                :, :, [*range(passes.edges[0]), *range(passes.start(place), place + 1)]
            ],
        ),
        (
            "chunk_order_wrong",
            {"sees": "from the first key on"},
            lambda seen, place, passes: seen[:, :, : place - passes.start(place) + 1],
        ),
        ("chunk_order_wrong", {"sees": "the whole pass"}, whole_pass),
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
def test_token_sees_other_entries(layer: Evaluation, name: str, parameters: Parameters, see: See) -> None:
    found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(layer, see))


def test_each_mistake_changes_the_tokens(layer: Evaluation) -> None:
    right = layer[Site.ATTN_CONTEXT]
    torch.testing.assert_close(right, attend(layer, up_to_own))
    for mistake in DECODING_MISTAKES:
        for hypothesis in mistake.hypotheses(layer.inputs):
            wrong = layer.changed(hypothesis.change)[Site.ATTN_CONTEXT]
            assert wrong.isfinite().all()
            assert not torch.allclose(wrong, right, rtol=1e-3, atol=1e-4), hypothesis.parameters


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
                decoded_inputs(layer).is_changed[:, None, :, None], right[:, :, [3, 0, 1, 2]], right
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
    name: str,
    parameters: Parameters,
    edit: Callable[[Evaluation, Entries], Entries],
) -> None:
    found = changed(layer, name, **parameters)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(layer, up_to_own, past=edit(layer, entries_of(layer))))


def test_cache_of_another_layer_is_read_beside_the_tokens_own_entry(layer: Evaluation) -> None:
    other = torch.randn(entries_of(layer).shape, generator=torch.Generator().manual_seed(1))
    given = on(layer, caches={3: tuple(other)})
    found = changed(given, "cache_of_another_layer", layer=3)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(layer, up_to_own, past=other))


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

    def see(entries: Entries, place: int, passes: Passes) -> Entries:
        # The prefill has six columns, the bucket eight.
        num_prefilled = passes.edges[0]
        seen = [up_to_own(entries, place, passes), padding(content, num_prefilled, 2)]
        if part != "bucket":
            # mm2 pads with the first token of `padding`: in front at position 0, behind at the last.
            place = "the last" if bool(steps.attention_mask[1, 0]) else "0"
            of_batch = content if content == "zeros" else f"token 7 at {place}"
            seen.append(padding(of_batch, num_prefilled, 6 - num_prefilled))
        return torch.cat(seen, dim=2)

    found = changed(padded, "decode_padding_visible", width=8, of=part, content=content)[Site.ATTN_CONTEXT]
    torch.testing.assert_close(found, attend(steps, see))


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
    steps: Evaluation, name: str, parameters: Parameters, positions: list[int], of: str
) -> None:
    moved, found = with_decoded_at(steps, positions), changed(steps, name, **parameters, of=of)
    for site, kind in ((Site.Q_ROPE, "queries"), (Site.K_ROPE, "keys")):
        torch.testing.assert_close(found[site], (moved if kind in of else steps)[site])


def test_decoded_tokens_are_rotated_by_their_columns(steps: Evaluation) -> None:
    moved, found = with_decoded_at(steps, [6, 7, 8, 6, 7, 8]), changed(steps, "decode_positions_of_columns")
    for site in (Site.Q_ROPE, Site.K_ROPE):
        torch.testing.assert_close(found[site], moved[site])


def with_decoded_at(layer: Evaluation, positions: list[int]) -> Evaluation:
    position_ids = layer.position_ids.clone()
    position_ids[decoded_inputs(layer).is_decoded] = torch.tensor(positions)
    return on(layer, position_ids=position_ids)


def parameters_of(name: str, inputs: DecodedInputs) -> list[tuple[int | str | float, ...]]:
    return [tuple(parameters.values()) for parameters in find(name).candidates(inputs)]


def test_layer_that_decodes_nothing_is_not_asked_for_its_cache(steps: Evaluation) -> None:
    inputs = steps.inputs
    plain = LayerInputs(**{field.name: getattr(inputs, field.name) for field in fields(LayerInputs)})
    for name in ("cache_of_another_layer", "cache_of_another_prompt", "decode_padding_visible"):
        assert list(find(name).candidates(plain)) == []


def test_padding_is_tried_up_to_the_buckets_that_hold_the_prefill(steps: Evaluation) -> None:
    inputs = decoded_inputs(on(steps, padding={"token 7": torch.zeros(1)}))
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


def test_mistakes_that_cannot_show_are_not_tried(steps: Evaluation) -> None:
    inputs = decoded_inputs(steps)
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
    steps: Evaluation, num_heads: int, orders: tuple[str, ...]
) -> None:
    inputs = decoded_inputs(steps)
    inputs = replace(inputs, spec=replace(inputs.spec, num_key_value_heads=num_heads))
    assert parameters_of("cache_heads_exchanged", inputs) == [
        (order, tokens) for tokens in ("decoded", "all") for order in orders
    ]


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
