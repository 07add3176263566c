"""A whole port's passes: their tokens, the first that is wrong, the order of layers, and what it chose itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.model_runs.choices import judge_choices
from compare.model_runs.chunks import judge_own_logits, judge_repetitions
from compare.model_runs.passes import (
    PassSplit,
    compare_passes,
    find_pass_fault,
    is_black_box,
    split_passes,
)
from compare.model_runs.stream import judge_layer_order
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.passes import Choice, MisplacedLogits, ModelPasses, Repeated, Repetition
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame, ModelFinding

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
LOGITS, EMBEDDING = ModelSite.LOGITS, ModelSite.EMBEDDING


@dataclass
class Side:
    """Side of a run of a whole port."""

    model_values: Mapping[ModelSite, torch.Tensor] = field(default_factory=dict)
    values: Mapping[tuple[int, Site], torch.Tensor] = field(default_factory=dict)
    passes: ModelPasses | None = None
    held: torch.Tensor | None = None
    mask: torch.Tensor | None = field(default_factory=lambda: MASK)
    directory: Path = Path("side")

    @property
    def known_description(self) -> Any:
        return SimpleNamespace(provenance=SimpleNamespace(dtypes={}))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self.values}))

    def read_passes(self) -> ModelPasses | None:
        return self.passes

    def read_attention_mask(self) -> torch.Tensor | None:
        return self.mask

    def read_kept_mask(self) -> torch.Tensor | None:
        return None if self.mask is None else self.mask.bool()

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(self.model_values)

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        return self.held

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(site for number, site in self.values if number == layer)

    def read(self, layer: int | None, site: Any) -> torch.Tensor:
        return self.model_values[site] if layer is None else self.values[layer, site]


def sides(target: Side, reference: Side | None = None) -> Sides:
    golden: Any = reference or Side()
    port: Any = target
    return Sides(
        reference=golden,
        target=port,
        batch=Batch(golden.read_attention_mask()),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )


PASSES = ModelPasses(num_passes=3)
ALL = torch.arange(10).reshape(2, 5)


def numbers(batch: Batch | None) -> list[int]:
    assert batch is not None
    found: list[int] = batch.tokens(ALL).tolist()
    return found


class TestSplit:
    def test_tokens_of_prefill_and_steps(self) -> None:
        split = split_passes(sides(Side(passes=PASSES)))
        assert split is not None
        assert (numbers(split.prefill), numbers(split.decoded)) == ([0, 1, 5], [2, 3, 6, 7])
        assert [numbers(step) for step in split.steps] == [[2, 6], [3, 7]]
        assert split.numbers.tolist() == [[0, 0, 1, 2, 0], [0, 1, 2, 0, 0]]

    def test_prefill_alone(self) -> None:
        split = split_passes(sides(Side(passes=ModelPasses(num_passes=1))))
        assert split is not None
        assert (numbers(split.prefill), split.decoded, split.steps) == ([0, 1, 2, 3, 5, 6, 7], None, ())

    def test_chunks_take_several_tokens_of_a_prompt_or_none(self) -> None:
        passes = ModelPasses(num_passes=3, chunks=((1, 1), (2, 2), (1, 0)))
        split = split_passes(sides(Side(passes=passes)))
        assert split is not None
        assert split.numbers.tolist() == [[0, 1, 1, 2, 0], [0, 1, 1, 0, 0]]
        assert [numbers(step) for step in split.steps] == [[1, 2, 6, 7], [3]]
        assert [split.name(number) for number in range(3)] == ["chunk 1", "chunk 2", "chunk 3"]
        assert passes.ends_pass(MASK).long().tolist() == [[1, 0, 1, 1, 0], [1, 0, 1, 0, 0]]

    def test_other_runs_have_no_passes(self) -> None:
        assert split_passes(sides(Side())) is None
        assert split_passes(sides(Side(passes=PASSES), Side(mask=None))) is None


class TestFault:
    SPLIT = PassSplit(
        numbers=MASK,
        prefill=Batch(MASK == 1),
        decoded=Batch(MASK == 1),
        steps=tuple(Batch(MASK == 1) for _ in range(3)),
    )

    def find(self, *wrong: Batch | None, split: PassSplit = SPLIT) -> tuple[int, str] | None:
        def judge(batch: Batch | None) -> tuple[Blame, ...]:
            assert batch is not None, "there is nothing to judge"
            names = {id(split.prefill): "prefill", id(split.decoded): "decoded"}
            name = names.get(id(batch), "step")
            return (Blame(layer=0, sites=("output",), reason=name),) if batch in wrong else ()

        fault = find_pass_fault(split, judge)
        return None if fault is None else (fault.number, fault.blame[0].reason)

    def test_first_wrong_pass(self) -> None:
        split = self.SPLIT
        assert self.find() is None
        assert self.find(split.prefill, split.decoded, *split.steps) == (0, "prefill")
        assert self.find(split.decoded, *split.steps[1:]) == (2, "step")
        # Steps show fainter errors together than alone.
        assert self.find(split.decoded) == (1, "decoded")
        assert self.find(*split.steps) is None
        without = replace(split, decoded=None, steps=())
        assert self.find(split=without) is None


def test_black_box_shows_logits_and_no_layer() -> None:
    logits, output = {LOGITS: torch.zeros(2, 5, 3)}, {(0, Site.OUTPUT): torch.zeros(2, 5, 4)}
    norm = {(0, Site.POST_NORM): torch.zeros(2, 5, 4)}
    for side, is_box in (
        (Side(logits, passes=PASSES), True),
        (Side(logits, norm, passes=PASSES), True),
        (Side(logits, output, passes=PASSES), False),
        (Side(logits), False),
        (Side(passes=PASSES), False),
    ):
        target: Any = side
        assert is_black_box(target) is is_box


class TestCalls:
    @staticmethod
    def judge(*calls: tuple[int, ...], num_layers: int = 3) -> ModelFinding | None:
        passes = ModelPasses(num_passes=len(calls), layer_calls=calls)
        found = judge_layer_order(sides(Side(passes=passes)), num_layers)
        assert len(found) <= 1
        return found[0] if found else None

    def test_layers_in_their_order_and_calls_that_cannot_be_seen_are_right(self) -> None:
        assert self.judge((0, 1, 2), (0, 1, 2)) is None
        assert self.judge((), ()) is None
        assert judge_layer_order(sides(Side()), 3) == ()

    @pytest.mark.parametrize(
        ("calls", "layer", "mistake", "reason"),
        [
            ((0, 2), 1, "layer_skipped", "layer 1 never ran in the decode step 1"),
            ((1,), 0, "layer_skipped", "layers 0, 2 never ran in the decode step 1"),
            ((0, 1, 1, 2, 2, 2), 1, "layer_twice", "layers 1, 2 ran 2 times in the decode step 1"),
            ((0, 2, 1), 1, "layers_out_of_order", "the layers ran in the order 0, 2, 1 in the decode step 1"),
            ((0, 0, 1), 2, "layer_skipped", "layer 2 never ran in the decode step 1"),
        ],
    )
    def test_first_wrong_pass_is_told(
        self, calls: tuple[int, ...], layer: int, mistake: str, reason: str
    ) -> None:
        found = self.judge((0, 1, 2), calls)
        assert found is not None
        assert (found.number, found.layer, found.mistake, found.reason) == (1, layer, mistake, reason)

    @pytest.mark.parametrize(
        ("num_layers", "words"), [(5, "layers 1, 2, 3, 4"), (6, "layers 1, 2, 3, 4 and 1 more")]
    )
    def test_four_layers_are_named(self, num_layers: int, words: str) -> None:
        found = self.judge((0,), num_layers=num_layers)
        assert found is not None
        assert found.reason == f"{words} never ran in the prefill"


class TestStream:
    @staticmethod
    def stream(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Values of a stream; `number` tells it from others. Padding is arbitrary."""
        generator = torch.Generator().manual_seed(int(10 * number))
        values = torch.randn(2, 5, 4, generator=generator).bfloat16().to(dtype)
        values[0, 1] = torch.nan
        values[MASK == 0] = torch.rand(3, 4).to(dtype)
        return values

    def judge(self, *given: float, embedding: float | None = 0.0, dtype: torch.dtype = torch.float32) -> Any:
        """Judge layers whose outputs are 1, 2, … and whose inputs are `given`."""
        values = {(layer, Site.INPUT): self.stream(number, dtype) for layer, number in enumerate(given)}
        values |= {(layer, Site.OUTPUT): self.stream(layer + 1.0) for layer in range(len(given))}
        model = {} if embedding is None else {EMBEDDING: self.stream(embedding)}
        found = judge_layer_order(sides(Side(model, values, passes=PASSES)), len(given))
        if not found:
            return None
        assert bool(found[0].what) is (found[0].mistake is not None)
        return found[0].layer, found[0].mistake, found[0].reason

    def test_input_is_the_output_before_it(self) -> None:
        assert self.judge(0.0, 1.0, 2.0) is None
        assert self.judge(0.0, 1.0, 2.0, dtype=torch.bfloat16) is None
        # Without the embedding, nothing tells the first input.
        assert self.judge(5.0, 1.0, embedding=None) is None

    @pytest.mark.parametrize(
        ("given", "layer", "mistake", "reason"),
        [
            (
                (0.0, 1.0, 1.0),
                1,
                "layer_left_out",
                "the input of layer 2 is not what layer 1 gave: it is the output of layer 0; layer 1 is left out",
            ),
            ((0.0, 0.0, 2.0), 0, "layer_left_out", "it is the embedding; layer 0 is left out"),
            (
                (3.0, 1.0, 2.0),
                0,
                "layers_out_of_order",
                "what the embedding gave: it is the output of layer 2",
            ),
            ((0.0, 3.0, 2.0), 1, "layers_out_of_order", "not what layer 0 gave: it is the output of layer 2"),
            ((9.0, 1.0, 2.0), 0, None, "not what the embedding gave: something in between changed it"),
            ((0.0, 9.0, 9.0), 1, None, "not what layer 0 gave: something in between changed it"),
        ],
    )
    def test_first_other_input_is_told(
        self, given: tuple[float, ...], layer: int, mistake: str | None, reason: str
    ) -> None:
        found = self.judge(*given)
        assert found[:2] == (layer, mistake)
        assert reason in found[2]

    def test_what_a_layer_is_given_is_told(self) -> None:
        before, added, residual = (self.stream(number) for number in (1.0, 2.0, 3.0))
        shown = {(0, Site.OUTPUT): before, (0, Site.MOE_DELTA): added, (0, Site.ATTN_RESIDUAL): residual}
        for given, mistake, words in (
            (added, "residual_lost", "what its experts added, without the residual"),
            (residual, "addend_lost", "its stream without what its experts added"),
            (before + residual, "residual_twice", "its output with the residual added twice"),
            (0.5 * before, "stream_scaled", "it is that, × 0.5"),
            (before.roll(1, 0), "tokens_exchanged", "other tokens of the pass, rows rolled by 1"),
            (before + 1e-2, None, "something in between changed it"),
        ):
            values = {**shown, (1, Site.INPUT): given}
            (found,) = judge_layer_order(sides(Side({}, values, passes=ModelPasses(num_passes=1))), 2)
            assert (found.number, found.layer, found.sites, found.mistake) == (0, 1, ("input",), mistake)
            assert found.reason.endswith(words)

    def test_every_real_token_counts_and_shapes_must_agree(self) -> None:
        other = self.stream(1.0)
        other[1, 2, 3] = 1.5
        lost = self.stream(1.0)
        lost[1, 2, 3] = torch.nan
        for given in (other, lost, self.stream(1.0)[:, :4]):
            values = {(0, Site.OUTPUT): self.stream(1.0), (1, Site.INPUT): given}
            assert len(judge_layer_order(sides(Side({}, values, passes=PASSES)), 2)) == 1

    def test_stream_of_another_shape_than_the_mask_is_compared_as_a_whole(self) -> None:
        for mask, is_wrong in ((MASK[:, :4], True), (None, True), (MASK, False)):
            values = {(0, Site.OUTPUT): self.stream(1.0), (1, Site.INPUT): self.stream(1.0)}
            both = sides(Side({}, values, passes=PASSES), Side(mask=mask))
            assert len(judge_layer_order(both, 2)) == is_wrong


class TestChoices:
    @staticmethod
    def judge(
        reference: Side | None = None, target: Side | None = None, **parts: Any
    ) -> tuple[ModelFinding, ...]:
        port = target or Side()
        port.passes = ModelPasses(num_passes=3, **parts)
        return judge_choices(sides(port, reference))

    @staticmethod
    def choice(**parts: Any) -> Choice:
        return Choice(**{"number": 1, "row": 0, "chosen": 5, "likeliest": 5, "behind": 0.0, **parts})

    def test_nothing_is_wrong(self) -> None:
        assert judge_choices(sides(Side())) == ()
        assert self.judge() == ()
        # Of equal logits any may be chosen.
        assert self.judge(choices=(self.choice(), self.choice(chosen=7))) == ()
        assert self.judge(choices=(self.choice(behind=None),)) == ()

    def test_first_token_that_is_not_the_likeliest(self) -> None:
        right, wrong = self.choice(), self.choice(number=2, row=1, chosen=7, behind=0.25)
        (found,) = self.judge(choices=(right, wrong, self.choice(chosen=8, behind=1.0)))
        assert (found.number, found.sites, found.mistake) == (2, ("chosen_token",), None)
        assert found.reason == (
            "after the decode step 2 the port chose token 7 for prompt 1; by its own logits of that prompt's last "
            "token 5 is the likeliest, 0.25 below it"
        )
        assert not found.is_warning

    def test_all_of_one_rank_are_told(self) -> None:
        second = [self.choice(number=number, chosen=7 + number, behind=1.0, rank=1) for number in range(3)]
        (found,) = self.judge(choices=tuple(second))
        assert found.reason.endswith("; each of the 3 has 1 likelier token")

    @pytest.mark.parametrize(
        ("rank", "again", "is_random"), [(3, 9, True), (3, 7, False), (64, 9, False), (3, None, False)]
    )
    def test_tokens_that_change_among_the_likeliest_are_drawn(
        self, rank: int, again: int | None, is_random: bool
    ) -> None:
        repeated = Repetition(number=1, row=0, difference=0.0, chosen=again)
        (found,) = self.judge(
            choices=(self.choice(chosen=7, behind=1.0, rank=rank),), repetitions=(repeated,)
        )
        assert (found.is_warning, found.mistake) == (is_random, None)
        assert found.reason.startswith(
            "random? 1 of 1 chosen tokens" if is_random else "after the decode step 1"
        )

    def pass_of(self, likeliest: Sequence[int], *, last: int, chosen: int) -> dict[str, Any]:
        """A row of a prefill, whose columns have these likeliest tokens."""
        columns = tuple(column for column, token in enumerate(likeliest) if token == chosen)
        place = {"columns": columns, "last_column": last, "num_columns": len(likeliest)}
        return {
            "chosen": chosen,
            "likeliest": likeliest[last],
            "behind": float(chosen != likeliest[last]),
            **place,
        }

    @pytest.mark.parametrize(
        ("chosen", "mistake", "parameters"),
        [
            ((59, 69, 79), "padding_sampled", {"column": 9}),
            ((56, 66, 76), "earlier_row_sampled", {"by": 1}),
            ((53, 63, 73), "earlier_row_sampled", {"by": 4}),
            ((50, 60, 70), "earlier_row_sampled", {"column": 0}),
            # Each is the likeliest of some column, and no rule fits all.
            ((53, 61, 73), None, {}),
            # Of one row, one of the ten columns fits too easily.
            ((53,), None, {}),
        ],
    )
    def test_column_that_explains_all_tokens(
        self, chosen: tuple[int, ...], mistake: str | None, parameters: dict[str, int]
    ) -> None:
        rows = tuple(
            self.choice(number=0, row=row, **self.pass_of(range(start, start + 10), last=7, chosen=token))
            for row, (start, token) in enumerate(zip((50, 60, 70), chosen, strict=False))
        )
        (found,) = self.judge(choices=rows)
        assert (found.mistake, dict(found.parameters)) == (mistake, parameters)
        # A single token that is the likeliest of half of the columns tells nothing.
        common = self.choice(number=0, **self.pass_of([5, 6] * 5, last=8, chosen=6))
        assert self.judge(choices=(common,))[0].mistake is None

    @pytest.mark.parametrize(
        ("tokens", "parameters"),
        [
            # Four shards of 100 rows each: the offset of each is lost.
            (((17, 17), (117, 17), (350, 50)), {"shard_width": 100}),
            # Later shards are off by the same few rows.
            (((17, 17), (217, 214), (230, 227), (350, 347)), {"by": "3"}),
            (((17, 17), (217, 215), (230, 228), (350, 346), (360, 356)), {"by": "2, 4"}),
            # A token of a later shard is right, or each is off by another number: chance explains these.
            (((217, 214), (230, 230), (350, 347)), None),
            (((117, 33), (217, 301)), None),
            (((117, 114),), None),
        ],
    )
    def test_shard_that_explains_all_tokens(
        self, tokens: tuple[tuple[int, int], ...], parameters: dict[str, int | str] | None
    ) -> None:
        choices = tuple(
            self.choice(number=number, likeliest=likeliest, chosen=chosen, behind=float(likeliest != chosen))
            for number, (likeliest, chosen) in enumerate(tokens)
        )
        (found,) = self.judge(choices=choices, vocab_size=400)
        assert found.mistake == (None if parameters is None else "token_shard_offset")
        assert dict(found.parameters) == (parameters or {})

    def test_token_of_another_prompt(self) -> None:
        likeliest = [[10 * row + number for row in range(3)] for number in range(4)]
        choices = tuple(
            self.choice(
                number=number, row=row, likeliest=of_pass[row], chosen=of_pass[(row + 1) % 3], behind=1.0
            )
            for number, of_pass in enumerate(likeliest)
            for row in range(3)
        )
        (found,) = self.judge(choices=choices, vocab_size=400)
        assert (found.mistake, dict(found.parameters)) == ("token_of_another_prompt", {"by": 1})

    @pytest.mark.parametrize(
        ("num_more", "words"), [(0, ""), (1, ", and of 1 more prompts"), (2, ", and of 2 more prompts")]
    )
    def test_logits_of_another_column(self, num_more: int, words: str) -> None:
        places = tuple(MisplacedLogits(row=row, column=4, is_padding=True) for row in range(1 + num_more))
        (found,) = self.judge(misplaced=places)
        assert (found.number, found.sites, found.mistake) == (0, ("logits",), "padding_sampled")
        assert found.reason == (
            f"the logits of prompt 0 are those of column 4 of the prefill, and not of its last token{words}"
        )

    @pytest.mark.parametrize(
        ("number", "above", "words"),
        [
            (56, 2.5, "the largest is 2.5 above"),
            (56, 0.5, "the largest is 0.5 above"),
            (56, -3.0, "the largest is only 3 below"),
            (56, -999.0, "only 999 below"),
            (56, -1000.0, None),
            (56, -torch.inf, None),
            (0, None, None),
            (56, None, None),
        ],
    )
    def test_padding_of_the_vocabulary_must_be_masked(
        self, number: int, above: float | None, words: str | None
    ) -> None:
        found = self.judge(num_padded_logits=number, padded_logits_above=above)
        if words is None:
            assert found == ()
            return
        assert (found[0].number, found[0].mistake) == (0, "padded_logits_live")
        assert "have 56 columns" in found[0].reason
        assert words in found[0].reason

    def test_all_faults_are_told_in_turn(self) -> None:
        found = self.judge(
            choices=(self.choice(chosen=7, behind=1.0),),
            misplaced=(MisplacedLogits(row=0, column=0, is_padding=False),),
            num_padded_logits=1,
            padded_logits_above=0.0,
        )
        assert [finding.sites[0] for finding in found] == ["logits", "chosen_token", "padded_logits"]
        assert "only -0 below" in found[2].reason or "only 0 below" in found[2].reason


class TestRepetitions:
    @staticmethod
    def judge(
        reference: Side | None = None, target: Side | None = None, **parts: Any
    ) -> tuple[ModelFinding, ...]:
        port = target or Side()
        port.passes = ModelPasses(num_passes=3, **parts)
        return judge_repetitions(sides(port, reference))

    @pytest.mark.parametrize(
        ("difference", "error", "is_wrong"),
        [
            (0.099, 0.0, False),
            (0.1, 0.0, False),
            (0.101, 0.0, True),
            (0.39, 0.1, False),
            (0.41, 0.1, True),
            (0.101, 0.02, True),
        ],
    )
    def test_second_run_may_differ_by_noise(self, difference: float, error: float, is_wrong: bool) -> None:
        golden = torch.ones(2, 5, 4)
        port = golden * (1.0 + error)
        # One token of seven is off by far more, and tokens that are not held do not count.
        port[0, 0] = 9.0
        held = torch.ones(2, 5, dtype=torch.bool)
        found = self.judge(
            Side({LOGITS: golden}),
            Side({LOGITS: port}, held=held),
            repetitions=(Repetition(number=2, row=1, difference=difference),),
        )
        assert bool(found) is is_wrong
        if is_wrong:
            assert (found[0].number, found[0].mistake) == (2, None)
            assert f"prompt 1 differ by {difference:.3g} of their norm" in found[0].reason

    def test_tokens_that_are_not_held_tell_no_noise(self) -> None:
        golden, port = torch.ones(2, 5, 4), torch.zeros(2, 5, 4)
        held = torch.zeros(2, 5, dtype=torch.bool)
        held[1, 2] = True
        port[1, 2] = 1.0
        repeated = (Repetition(number=0, row=0, difference=0.2),)
        for holds, is_wrong in ((held, True), (None, False)):
            target = Side({LOGITS: port}, held=holds)
            assert bool(self.judge(Side({LOGITS: golden}), target, repetitions=repeated)) is is_wrong

    @pytest.mark.parametrize("port", [None, torch.zeros(2, 5, 3), torch.full((2, 5, 4), torch.nan)])
    def test_logits_that_cannot_be_compared_allow_no_noise(self, port: torch.Tensor | None) -> None:
        target = Side({} if port is None else {LOGITS: port})
        repeated = (Repetition(number=0, row=0, difference=0.2),)
        (found,) = self.judge(Side({LOGITS: torch.ones(2, 5, 4)}), target, repetitions=repeated)
        assert "limit 0.1" in found.reason

    def test_second_run_must_be_finite(self) -> None:
        lost = Repetition(number=1, row=3, difference=0.0, is_finite=False)
        (found,) = self.judge(repetitions=(Repetition(number=0, row=0, difference=0.0), lost))
        assert (found.number, "NaN or Inf for prompt 3" in found.reason) == (1, True)

    @pytest.mark.parametrize(
        ("wrong", "mistake"),
        [
            ((Repeated.SAME_ROWS, Repeated.OTHER_SHAPE), "cache_stale"),
            ((Repeated.OTHER_NEIGHBOURS,), "kept_by_shape"),
            ((Repeated.OTHER_SHAPE, Repeated.OTHER_NEIGHBOURS), "depends_on_neighbours"),
            ((Repeated.OTHER_SHAPE,), "depends_on_row"),
        ],
    )
    def test_further_runs_tell_what_a_prompt_depends_on(
        self, wrong: tuple[Repeated, ...], mistake: str
    ) -> None:
        further = (Repeated.SAME_ROWS, Repeated.OTHER_SHAPE, Repeated.OTHER_NEIGHBOURS)
        repetitions = tuple(
            Repetition(number=1, row=0, difference=0.5 * (kind in (Repeated.OTHER_ROWS, *wrong)), kind=kind)
            for kind in (Repeated.OTHER_ROWS, *further)
        )
        (found,) = self.judge(repetitions=repetitions)
        assert (found.number, found.sites, found.mistake) == (1, ("repeated_run",), mistake)
        # Without the further runs nothing is told beyond what was seen.
        (found,) = self.judge(repetitions=repetitions[:1])
        assert (found.mistake, found.what) == (None, "")
        # Further runs tell nothing where other rows changed nothing.
        assert self.judge(repetitions=repetitions[1:]) == ()

    @pytest.mark.parametrize(
        ("differences", "is_wrong"), [((0.3, 0.3, 0.05), True), ((0.3, 0.05, 0.05), False)]
    )
    def test_steps_of_a_black_box_are_held_against_its_prefill(
        self, differences: tuple[float, ...], is_wrong: bool
    ) -> None:
        steps = tuple(
            Repetition(number=number, row=0, difference=difference, kind=Repeated.WHOLE)
            for number, difference in enumerate(differences, start=1)
        )
        black_box = Side({LOGITS: torch.ones(2, 5, 4)})
        found = self.judge(black_box, black_box, repetitions=steps)
        assert [finding.number for finding in found] == ([1] if is_wrong else [])
        # Where layers are shown, their sites judge the steps.
        shown = Side({LOGITS: torch.ones(2, 5, 4)}, {(0, Site.OUTPUT): torch.ones(2, 5, 4)})
        assert self.judge(black_box, shown, repetitions=steps) == ()


class TestOwnLogits:
    CHUNKS = ModelPasses(num_passes=3, chunks=((1, 1), (2, 1), (1, 1)))

    def judge(self, wrong: tuple[tuple[int, int], ...], held: torch.Tensor | None = None) -> list[int | None]:
        logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
        again = logits.clone()
        for row, column in wrong:
            again[row, column] += 1.0
        run = sides(Side({LOGITS: logits}, passes=PASSES), Side({LOGITS: logits}))
        chunks = sides(Side({LOGITS: again}, passes=self.CHUNKS, held=held), Side({LOGITS: logits}))
        split = split_passes(chunks)
        assert split is not None
        return [finding.number for finding in judge_own_logits(run, chunks, split)]

    def test_chunk_whose_logits_are_others_is_found(self) -> None:
        assert self.judge(()) == []
        # Two tokens of chunk 2 and one of chunk 3: most of those behind a cache.
        assert self.judge(((0, 1), (0, 2), (1, 2))) == [1]
        # One of five may have chosen other experts.
        assert self.judge(((0, 1),)) == []

    def test_tokens_without_logits_do_not_count(self) -> None:
        held = torch.zeros(2, 5, dtype=torch.bool)
        held[0, 3] = True
        assert self.judge(((0, 1), (0, 2), (1, 2)), held) == []
        assert self.judge(((0, 3),), held) == [2]


class TestNextTokens:
    GOLDEN = torch.zeros(2, 5, 3)

    def port(self) -> torch.Tensor:
        values = self.GOLDEN.clone()
        values[..., 0] = 1e-3
        values[0, 3, 1] = 9.0  # decoded in the second step
        return values

    def test_each_pass_is_compared_alone(self) -> None:
        golden = self.GOLDEN.clone()
        golden[..., 0] = 1e-3
        both = sides(Side({LOGITS: self.port()}, passes=PASSES), Side({LOGITS: golden}))
        found = compare_passes(both, split_passes(both))
        assert [(one.number, one.num_tokens, one.num_agreeing) for one in found] == [
            (0, 3, 3),
            (1, 2, 2),
            (2, 2, 1),
        ]
        assert (found[0].kl_worst, found[2].worst_token) == (0.0, (0, 3))
        assert found[2].kl_mean == pytest.approx(found[2].kl_worst / 2)
        (whole,) = compare_passes(both, None)
        assert (whole.number, whole.num_tokens, whole.num_agreeing, whole.worst_token) == (None, 7, 6, (0, 3))

    def test_tokens_that_are_lost_or_not_held_are_left_out(self) -> None:
        port = self.port()
        port[0, 0] = torch.nan
        held = torch.ones(2, 5, dtype=torch.bool)
        held[0, 1] = False
        (found,) = compare_passes(sides(Side({LOGITS: port}, held=held), Side({LOGITS: self.GOLDEN})), None)
        assert (found.num_tokens, found.worst_token) == (5, (0, 3))

    def test_nothing_is_told_where_nothing_can_be_compared(self) -> None:
        golden = Side({LOGITS: self.GOLDEN})
        for port in (
            Side(),
            Side({LOGITS: torch.zeros(2, 5, 4)}),
            Side({LOGITS: torch.full((2, 5, 3), torch.nan)}),
        ):
            assert compare_passes(sides(port, golden), None) == ()
        assert compare_passes(sides(golden, Side()), None) == ()
