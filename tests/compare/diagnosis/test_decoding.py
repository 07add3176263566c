"""The mistake of decoding is named from what a whole port shows, over a right cache and over the port's own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from compare.diagnosis.decoding import diagnose_decoding
from compare.model_runs.own_cache import is_right_on_own_cache
from compare.sides.sides import Sides
from minimax_tools.capture.passes import CachePair
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.inputs import Inputs, decoded_tokens
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import Evaluation, LayerInputs, with_given
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.reference.float32_stages import split_heads

LAYER = 1
NUM_DECODED = 2
SHOWN = (Site.INPUT, Site.Q_ROPE, Site.K_ROPE, Site.V_PROJ)

Decode = Callable[..., Sides]


def right_entries(capture: Capture, layer: int = LAYER) -> torch.Tensor:
    """Right keys and values of a layer, float32 [2,B,K,S,D]."""
    keys = capture.read(layer, Site.K_ROPE).float()
    return torch.stack((keys, split_heads(capture.read(layer, Site.V_PROJ).float(), keys.shape[-1])))


def all_entries(entries: torch.Tensor, num_prefilled: int, step: int) -> torch.Tensor:
    return entries[:, :, : num_prefilled + step]


def without_newest(entries: torch.Tensor, num_prefilled: int, step: int) -> torch.Tensor:
    place = num_prefilled + step - 1
    return entries[:, :, [*range(place - 1), place]]


@pytest.fixture
def decode(golden: Path, write_port: Callable[..., Sides], stepped: Callable[..., torch.Tensor]) -> Decode:
    """Writes a port that is the golden, but for the attention of its decoded tokens: over what they `read`."""
    source = Capture.open(golden)

    def write(
        read: Callable[[torch.Tensor, int, int], torch.Tensor] = all_entries,
        *,
        past: torch.Tensor | None = None,
        cache: CachePair | None = None,
        shown: tuple[Site, ...] = (*SHOWN, Site.ATTN_CONTEXT),
        layer: int = LAYER,
        others: tuple[Site, ...] = (Site.K_ROPE, Site.V_PROJ),
        silent: tuple[int, ...] = (),
    ) -> Sides:
        mask = source.read_inputs().attention_mask
        is_decoded = decoded_tokens(mask, NUM_DECODED, by_row=True)
        context = source.read(layer, Site.ATTN_CONTEXT).clone()
        queries = source.read(layer, Site.Q_ROPE).float()
        found = stepped(queries, right_entries(source, layer), mask, read, num_decoded=NUM_DECODED, past=past)
        context[is_decoded] = found.to(context.dtype)
        values = {site: source.read(layer, site) for site in SHOWN} | {Site.ATTN_CONTEXT: context}
        layers = {
            other: (
                {site: source.read(other, site) for site in ((Site.K_NORM,) if other in silent else others)},
                None,
            )
            for other in range(4)
        }
        return write_port({**layers, layer: ({site: values[site] for site in shown}, cache)})

    return write


def named(sides: Sides, layer: int = LAYER, **options: object) -> list[tuple[str | None, dict[str, object]]]:
    found = diagnose_decoding(sides, layer, number=2, **options)  # type: ignore[arg-type]
    for finding in found:
        assert (finding.number, finding.layer, finding.sites) == (2, layer, ("attn_context",))
        assert finding.is_of_sites
    return [(finding.mistake, dict(finding.parameters)) for finding in found]


HIDDEN = [("decode_mask_short", {"entry": "the newest"})]


def test_hidden_entry_is_named(decode: Decode) -> None:
    sides = decode(without_newest)
    assert named(sides) == HIDDEN
    assert named(replace(sides, weights=None)) == []
    # A port that hides its queries is judged on its input.
    assert named(decode(without_newest, shown=(Site.INPUT, Site.ATTN_CONTEXT))) == HIDDEN


def test_nothing_is_named_where_decoding_is_right_or_cannot_be_judged(decode: Decode) -> None:
    assert named(decode()) == []
    assert named(decode(without_newest, shown=SHOWN)) == []
    assert named(decode(without_newest, shown=(*SHOWN[1:], Site.ATTN_CONTEXT))) == []


def test_padding_is_known_in_front_of_the_first_layer(decode: Decode, golden: Path) -> None:
    source = Capture.open(golden)
    inputs = source.read_inputs()
    (row, column), *_ = (inputs.attention_mask == 0).nonzero().tolist()
    # At position 0 nothing is rotated.
    keys = split_heads(source.read(0, Site.K_NORM).float(), 64)
    padding = torch.stack((keys, right_entries(source, 0)[1]))[:, row, :, column, None]

    def read(entries: torch.Tensor, num_prefilled: int, step: int) -> torch.Tensor:
        # A bucket of 48 columns holds the prefill's 46.
        return torch.cat((all_entries(entries, num_prefilled, step), padding, padding), dim=2)

    content = f"token {int(inputs.input_ids[row, column])} at 0"
    found = named(decode(read, layer=0), layer=0)
    assert found == [("decode_padding_visible", {"width": 48, "of": "bucket", "content": content})]


def test_keys_of_another_layer_are_known_by_what_it_shows(decode: Decode, golden: Path) -> None:
    source = Capture.open(golden)
    sides = decode(past=right_entries(source, 0))
    assert named(sides) == [("cache_of_another_layer", {"layer": 0})]
    sides = decode(past=right_entries(source, 2), others=(Site.INPUT,))
    assert named(sides) == [("cache_of_another_layer", {"layer": 2})]
    # Layers 0 and 2 are nearer than layer 3, and show nothing: they are passed over.
    sides = decode(past=right_entries(source, 3), silent=(0, 2))
    assert named(sides) == [("cache_of_another_layer", {"layer": 3})]


class PaddedWith(Capture):
    """A golden whose prompts are padded with other tokens."""

    def __init__(self, source: Capture, tokens: list[int]) -> None:
        super().__init__(source.directory, source.manifest)
        self._padding = torch.tensor(tokens)

    def read_inputs(self) -> Inputs:
        inputs = super().read_inputs()
        ids, is_padding = inputs.input_ids.clone(), inputs.attention_mask == 0
        ids[is_padding] = self._padding.repeat(int(is_padding.sum()))[: int(is_padding.sum())]
        return replace(inputs, input_ids=ids)


@pytest.mark.parametrize(
    ("token", "is_known"), [pytest.param(7, True, marks=pytest.mark.slow), (0, True), (9, False)]
)
def test_padding_of_the_batch_is_its_first_and_that_of_a_bucket_zero(
    decode: Decode, golden: Path, toy: Path, token: int, is_known: bool
) -> None:
    row = CheckpointReader(toy).read("model.embed_tokens.weight")[token].float()
    spec, source = ModelSpec.from_folder(toy), Capture.open(golden)
    weights = LayerWeights(LayerTensors.open(CheckpointReader(toy), spec, 0, torch.bfloat16))
    one = torch.ones(1, 1, dtype=torch.int64)
    inputs = LayerInputs(
        graph=ModelGraph().layer(0),
        spec=spec,
        weights=weights,
        attention_mask=one,
        position_ids=0 * one,
        decode_start=1,
    )
    alone = Evaluation(inputs, with_given({Site.INPUT: row[None, None]}), tokens=torch.tensor([0]))
    entry = torch.stack((alone[Site.K_ROPE], split_heads(alone[Site.V_PROJ], spec.head_dim)))[:, 0]

    def read(entries: torch.Tensor, num_prefilled: int, step: int) -> torch.Tensor:
        return torch.cat((all_entries(entries, num_prefilled, step), entry, entry), dim=2)

    sides = replace(decode(read, layer=0), reference=PaddedWith(source, [7, 9]))
    found = named(sides, layer=0)
    content = f"token {token} at 0"
    expected = [("decode_padding_visible", {"width": 48, "of": "bucket", "content": content})]
    assert found == (expected if is_known else [])


class TestOwnCache:
    """The port reads rightly what its cache holds, which is not what it should hold."""

    @pytest.fixture
    def held(self, golden: Path) -> torch.Tensor:
        right = right_entries(Capture.open(golden))
        noise = torch.randn(right.shape, generator=torch.Generator().manual_seed(0))
        return (right * (1 + 0.2 * noise)).bfloat16().float()

    def test_is_told_from_wrong_reading(self, decode: Decode, held: torch.Tensor) -> None:
        cache = held[0], held[1]
        shorter = held[0, :, :, 1:], held[1, :, :, 1:]
        right = decode(past=held, cache=cache)
        assert is_right_on_own_cache(right, LAYER)
        for sides in (
            decode(without_newest, past=held, cache=cache),
            # The golden's cache is not what it reads.
            decode(past=held),
            decode(past=held, cache=shorter),
            replace(right, weights=None),
            decode(past=held, cache=cache, shown=SHOWN),
        ):
            assert not is_right_on_own_cache(sides, LAYER)

    def test_run_without_steps_has_not_read_it(self, golden: Path, write_port: Callable[..., Sides]) -> None:
        source = Capture.open(golden)
        values = {site: source.read(LAYER, site) for site in (*SHOWN, Site.ATTN_CONTEXT)}
        keys, values_held = right_entries(source)
        sides = write_port({LAYER: (values, (keys, values_held))}, num_decoded=0)
        assert not is_right_on_own_cache(sides, LAYER)
        assert named(sides) == []

    def test_mistake_over_it_is_named(self, decode: Decode, held: torch.Tensor) -> None:
        wrong = decode(without_newest, past=held, cache=(held[0], held[1]))
        assert named(wrong) == named(wrong, blamed=(Site.ATTN_CONTEXT,)) == HIDDEN
        # Wrong keys explain what is read too: the cache is then not taken as it is.
        assert named(wrong, blamed=(Site.K_ROPE,)) == []
