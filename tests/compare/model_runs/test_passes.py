"""A whole port's passes: their tokens, the first that is wrong, the order of layers, and what it chose itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.comparer import judge_classes
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
from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.results.results import Blame, ModelFinding

MASK = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 0, 0]])
LOGITS, EMBEDDING = ModelSite.LOGITS, ModelSite.EMBEDDING
PASSES = ModelPasses(num_passes=3)
ALL = torch.arange(10).reshape(2, 5)


class Side(CaptureSource):
    """Side of a run of a whole port; `values` are those of layers by (layer, site), of the model by site."""

    directory = Path("side")

    def __init__(
        self,
        values: Any = (),
        *,
        passes: ModelPasses | None = None,
        held: torch.Tensor | None = None,
        mask: torch.Tensor | None = MASK,
    ) -> None:
        self._values, self.passes, self._held, self._mask = dict(values), passes, held, mask

    @property
    def known_description(self) -> Any:
        return SimpleNamespace(provenance=SimpleNamespace(dtypes={}, model_config={}))

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({key[0] for key in self._values if isinstance(key, tuple)}))

    def read_passes(self) -> ModelPasses | None:
        return self.passes

    def read_attention_mask(self) -> torch.Tensor | None:
        return self._mask

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(key for key in self._values if isinstance(key, ModelSite))

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        return self._held

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(key[1] for key in self._values if isinstance(key, tuple) and key[0] == layer)

    def read(self, layer: int | None, site: Any) -> torch.Tensor:
        values: torch.Tensor = self._values[site if layer is None else (layer, site)]
        return values


def sides(target: Side, reference: Side | None = None) -> Sides:
    golden = reference or Side()
    return Sides(
        reference=golden,
        target=target,
        batch=Batch(golden.read_attention_mask()),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )


def split_of(both: Sides) -> PassSplit:
    split = split_passes(both)
    assert split is not None
    return split


def judged(
    how: Callable[[Sides], tuple[ModelFinding, ...]],
    reference: Side | None = None,
    target: Side | None = None,
    **parts: Any,
) -> tuple[ModelFinding, ...]:
    """Judge a port whose passes have these parts."""
    port = target or Side()
    port.passes = ModelPasses(num_passes=3, **parts)
    return how(sides(port, reference))


def numbers(batch: Batch | None) -> list[int]:
    assert batch is not None
    found: list[int] = batch.tokens(ALL).tolist()
    return found


class TestSplit:
    def test_tokens_of_prefill_and_steps(self) -> None:
        split = split_of(sides(Side(passes=PASSES)))
        assert (numbers(split.prefill), numbers(split.decoded)) == ([0, 1, 5], [2, 3, 6, 7])
        assert [numbers(step) for step in split.steps] == [[2, 6], [3, 7]]
        assert split.numbers.tolist() == [[0, 0, 1, 2, 0], [0, 1, 2, 0, 0]]
        alone = split_of(sides(Side(passes=ModelPasses(num_passes=1))))
        assert (numbers(alone.prefill), alone.decoded, alone.steps) == ([0, 1, 2, 3, 5, 6, 7], None, ())

    def test_chunks_take_several_tokens_of_a_prompt_or_none(self) -> None:
        passes = ModelPasses(num_passes=3, chunks=((1, 1), (2, 2), (1, 0)))
        split = split_of(sides(Side(passes=passes)))
        assert split.numbers.tolist() == [[0, 1, 1, 2, 0], [0, 1, 1, 0, 0]]
        assert [numbers(step) for step in split.steps] == [[1, 2, 6, 7], [3]]
        assert [split.name(number) for number in range(3)] == ["chunk 1", "chunk 2", "chunk 3"]
        assert passes.ends_pass(MASK).long().tolist() == [[1, 0, 1, 1, 0], [1, 0, 1, 0, 0]]

    def test_other_runs_have_no_passes(self) -> None:
        assert split_passes(sides(Side())) is None
        assert split_passes(sides(Side(passes=PASSES), Side(mask=None))) is None

    def test_first_wrong_pass_is_found(self) -> None:
        split = split_of(sides(Side(passes=PASSES)))
        names = {id(split.prefill): "prefill", id(split.decoded): "decoded"}

        def find(*wrong: Batch | None, among: PassSplit = split) -> tuple[int, str] | None:
            def judge(batch: Batch | None) -> tuple[Blame, ...]:
                assert batch is not None, "there is nothing to judge"
                blame = Blame(layer=0, sites=("output",), reason=names.get(id(batch), "step"))
                return (blame,) if batch in wrong else ()

            fault = find_pass_fault(among, judge)
            return None if fault is None else (fault.number, fault.blame[0].reason)

        assert find() is None
        assert find(split.prefill, split.decoded, *split.steps) == (0, "prefill")
        assert find(split.decoded, split.steps[1]) == (2, "step")
        # Steps show fainter errors together than alone.
        assert find(split.decoded) == (1, "decoded")
        assert find(*split.steps) is None
        assert find(among=replace(split, decoded=None, steps=())) is None


def test_black_box_shows_logits_and_no_layer() -> None:
    logits, output = {LOGITS: torch.zeros(2, 5, 3)}, {(0, Site.OUTPUT): torch.zeros(2, 5, 4)}
    norm = {(0, Site.POST_NORM): torch.zeros(2, 5, 4)}
    assert is_black_box(Side(logits, passes=PASSES))
    assert is_black_box(Side({**logits, **norm}, passes=PASSES))
    assert not is_black_box(Side({**logits, **output}, passes=PASSES))
    assert not is_black_box(Side(logits))
    assert not is_black_box(Side(passes=PASSES))


class TestCalls:
    @staticmethod
    def judge(*calls: tuple[int, ...], num_layers: int = 3) -> list[tuple[Any, ...]]:
        passes = ModelPasses(num_passes=len(calls), layer_calls=calls)
        found = judge_layer_order(sides(Side(passes=passes)), num_layers)
        return [(one.number, one.layer, one.mistake, one.reason) for one in found]

    def test_layers_in_their_order_and_calls_that_cannot_be_seen_are_right(self) -> None:
        assert self.judge((0, 1, 2), (0, 1, 2)) == self.judge((), ()) == []
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
    def test_first_wrong_pass_is_told(self, calls: Any, layer: int, mistake: str, reason: str) -> None:
        assert self.judge((0, 1, 2), calls) == [(1, layer, mistake, reason)]

    def test_four_layers_are_named(self) -> None:
        for num_layers, words in ((5, "layers 1, 2, 3, 4"), (6, "layers 1, 2, 3, 4 and 1 more")):
            reason = f"{words} never ran in the prefill"
            assert self.judge((0,), num_layers=num_layers) == [(0, 1, "layer_skipped", reason)]


def stream(number: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Values of a stream; `number` tells it from others. Padding is arbitrary."""
    generator = torch.Generator().manual_seed(int(10 * number))
    values = torch.randn(2, 5, 4, generator=generator).bfloat16().to(dtype)
    values[0, 1] = torch.nan
    values[MASK == 0] = torch.rand(3, 4).to(dtype)
    return values


class TestStream:
    def judge(self, *given: float, embedding: float | None = 0.0, dtype: torch.dtype = torch.float32) -> Any:
        """Judge layers whose outputs are 1, 2, … and whose inputs are `given`."""
        values: dict[Any, torch.Tensor] = {} if embedding is None else {EMBEDDING: stream(embedding)}
        for layer, number in enumerate(given):
            values[layer, Site.INPUT] = stream(number, dtype)
            values[layer, Site.OUTPUT] = stream(layer + 1.0)
        found = judge_layer_order(sides(Side(values, passes=PASSES)), len(given))
        if not found:
            return None
        assert bool(found[0].what) is (found[0].mistake is not None)
        return found[0].layer, found[0].mistake, found[0].reason.partition(" is not what ")[2]

    def test_input_is_the_output_before_it(self) -> None:
        assert self.judge(0.0, 1.0, 2.0) is None
        assert self.judge(0.0, 1.0, 2.0, dtype=torch.bfloat16) is None
        # Without the embedding, nothing tells the first input.
        assert self.judge(5.0, 1.0, embedding=None) is None

    @pytest.mark.parametrize(
        ("given", "layer", "mistake", "words"),
        [
            (
                (0, 1, 1),
                1,
                "layer_left_out",
                "layer 1 gave: it is the output of layer 0; layer 1 is left out",
            ),
            ((0, 0, 2), 0, "layer_left_out", "layer 0 gave: it is the embedding; layer 0 is left out"),
            ((3, 1, 2), 0, "layers_out_of_order", "the embedding gave: it is the output of layer 2"),
            ((0, 3, 2), 1, "layers_out_of_order", "layer 0 gave: it is the output of layer 2"),
            ((9, 1, 2), 0, None, "the embedding gave: something in between changed it"),
            ((0, 9, 9), 1, None, "layer 0 gave: something in between changed it"),
        ],
    )
    def test_first_other_input_is_told(self, given: Any, layer: int, mistake: str | None, words: str) -> None:
        found = self.judge(*given)
        assert found[:2] == (layer, mistake)
        assert found[2].startswith(words)

    def test_what_a_layer_is_given_is_told(self) -> None:
        before, added, residual = (stream(number) for number in (1.0, 2.0, 3.0))
        shown = {(0, Site.OUTPUT): before, (0, Site.MOE_DELTA): added, (0, Site.ATTN_RESIDUAL): residual}
        for given, mistake, words in (
            (added, "residual_lost", "what its experts added, without the residual"),
            (residual, "addend_lost", "its stream without what its experts added"),
            (before + residual, "residual_twice", "its output with the residual added twice"),
            (0.5 * before, "stream_scaled", "it is that, × 0.5"),
            (before.roll(1, 0), "tokens_exchanged", "other tokens of the pass, rows rolled by 1"),
            (before + 1e-2, None, "something in between changed it"),
        ):
            port = Side({**shown, (1, Site.INPUT): given}, passes=ModelPasses(num_passes=1))
            (found,) = judge_layer_order(sides(port), 2)
            assert (found.number, found.layer, found.sites, found.mistake) == (0, 1, ("input",), mistake)
            assert found.reason.endswith(words)

    def test_every_real_token_counts_and_shapes_must_agree(self) -> None:
        for value in (1.5, torch.nan, None):
            given = stream(1.0)[:, :4] if value is None else stream(1.0)
            if value is not None:
                given[1, 2, 3] = value
            port = Side({(0, Site.OUTPUT): stream(1.0), (1, Site.INPUT): given}, passes=PASSES)
            assert len(judge_layer_order(sides(port), 2)) == 1

    def test_stream_of_another_shape_than_the_mask_is_compared_as_a_whole(self) -> None:
        port = Side({(0, Site.OUTPUT): stream(1.0), (1, Site.INPUT): stream(1.0)}, passes=PASSES)
        for mask, is_wrong in ((MASK[:, :4], True), (None, True), (MASK, False)):
            assert len(judge_layer_order(sides(port, Side(mask=mask)), 2)) == is_wrong


def choice(**parts: Any) -> Choice:
    return Choice(**{"number": 1, "row": 0, "chosen": 5, "likeliest": 5, "behind": 0.0, **parts})


class TestChoices:
    def test_nothing_is_wrong(self) -> None:
        assert judge_choices(sides(Side())) == judged(judge_choices) == ()
        # Of equal logits any may be chosen.
        assert judged(judge_choices, choices=(choice(), choice(chosen=7))) == ()
        assert judged(judge_choices, choices=(choice(behind=None),)) == ()

    def test_first_token_that_is_not_the_likeliest(self) -> None:
        wrong = choice(number=2, row=1, chosen=7, behind=0.25)
        (found,) = judged(judge_choices, choices=(choice(), wrong, choice(chosen=8, behind=1.0)))
        assert (found.number, found.sites, found.mistake) == (2, ("chosen_token",), None)
        assert found.reason == (
            "after the decode step 2 the port chose token 7 for prompt 1; by its own logits of that prompt's last "
            "token 5 is the likeliest, 0.25 below it"
        )
        assert not found.is_warning
        second = tuple(choice(number=number, chosen=7 + number, behind=1.0, rank=1) for number in range(3))
        (found,) = judged(judge_choices, choices=second)
        assert found.reason.endswith("; each of the 3 has 1 likelier token")

    @pytest.mark.parametrize(
        ("rank", "again", "is_random"), [(3, 9, True), (3, 7, False), (64, 9, False), (3, None, False)]
    )
    def test_tokens_that_change_are_drawn(self, rank: int, again: int | None, is_random: bool) -> None:
        repeated = Repetition(number=1, row=0, difference=0.0, chosen=again)
        drawn = choice(chosen=7, behind=1.0, rank=rank)
        (found,) = judged(judge_choices, choices=(drawn,), repetitions=(repeated,))
        assert (found.is_warning, found.mistake) == (is_random, None)
        assert found.reason.startswith("random? 1 of 1 chosen" if is_random else "after the decode step 1")

    @staticmethod
    def of_prefill(row: int, likeliest: Sequence[int], *, last: int, chosen: int) -> Choice:
        """The choice of a row of a prefill, whose columns have these likeliest tokens."""
        return choice(
            number=0,
            row=row,
            chosen=chosen,
            likeliest=likeliest[last],
            behind=float(chosen != likeliest[last]),
            columns=tuple(column for column, token in enumerate(likeliest) if token == chosen),
            last_column=last,
            num_columns=len(likeliest),
        )

    @pytest.mark.parametrize(
        ("chosen", "mistake", "parameters"),
        [
            ((59, 69, 79), "padding_sampled", {"column": 9}),
            ((56, 66, 76), "earlier_row_sampled", {"by": 1}),
            ((53, 63, 73), "earlier_row_sampled", {"by": 4}),
            ((50, 60, 70), "earlier_row_sampled", {"column": 0}),
            # Each is the likeliest of some column, and no rule fits all.
            ((53, 61, 73), None, {}),
            # Of one row, one of the ten columns fits too easily, above all one of many that have the token.
            ((53,), None, {}),
        ],
    )
    def test_column_that_explains_all_tokens(self, chosen: Any, mistake: str | None, parameters: Any) -> None:
        rows = tuple(
            self.of_prefill(row, range(start, start + 10), last=7, chosen=token)
            for row, (start, token) in enumerate(zip((50, 60, 70), chosen, strict=False))
        )
        (found,) = judged(judge_choices, choices=rows)
        assert (found.mistake, dict(found.parameters)) == (mistake, parameters)
        common = self.of_prefill(0, [5, 6] * 5, last=8, chosen=6)
        assert judged(judge_choices, choices=(common,))[0].mistake is None

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
    def test_shard_that_explains_all_tokens(self, tokens: Any, parameters: Any) -> None:
        choices = tuple(
            choice(number=number, likeliest=likeliest, chosen=chosen, behind=float(likeliest != chosen))
            for number, (likeliest, chosen) in enumerate(tokens)
        )
        (found,) = judged(judge_choices, choices=choices, vocab_size=400)
        assert found.mistake == (None if parameters is None else "token_shard_offset")
        assert dict(found.parameters) == (parameters or {})

    def test_token_of_another_prompt(self) -> None:
        choices = tuple(
            choice(number=step, row=row, likeliest=10 * row + step, chosen=10 * next_row + step, behind=1.0)
            for step in range(4)
            for row, next_row in ((0, 1), (1, 2), (2, 0))
        )
        (found,) = judged(judge_choices, choices=choices, vocab_size=400)
        assert (found.mistake, dict(found.parameters)) == ("token_of_another_prompt", {"by": 1})

    def test_logits_of_another_column(self) -> None:
        for num_more, words in ((0, ""), (1, ", and of 1 more prompts"), (2, ", and of 2 more prompts")):
            places = tuple(MisplacedLogits(row=row, column=4, is_padding=True) for row in range(1 + num_more))
            (found,) = judged(judge_choices, misplaced=places)
            assert (found.number, found.sites, found.mistake) == (0, ("logits",), "padding_sampled")
            reason = "the logits of prompt 0 are those of column 4 of the prefill, and not of its last token"
            assert found.reason == f"{reason}{words}"

    @pytest.mark.parametrize(
        ("number", "above", "words"),
        [
            (56, 2.5, "the largest is 2.5 above"),
            (56, -3.0, "the largest is only 3 below"),
            (56, -999.0, "only 999 below"),
            (56, -1000.0, None),
            (56, -torch.inf, None),
            (0, None, None),
            (56, None, None),
        ],
    )
    def test_padding_of_the_vocabulary_must_be_masked(self, number: int, above: Any, words: Any) -> None:
        found = judged(judge_choices, num_padded_logits=number, padded_logits_above=above)
        assert len(found) == (words is not None)
        for one in found:
            assert (one.number, one.mistake) == (0, "padded_logits_live")
            assert "have 56 columns" in one.reason
            assert str(words) in one.reason

    def test_all_faults_are_told_in_turn(self) -> None:
        found = judged(
            judge_choices,
            choices=(choice(chosen=7, behind=1.0),),
            misplaced=(MisplacedLogits(row=0, column=0, is_padding=False),),
            num_padded_logits=1,
            padded_logits_above=0.0,
        )
        assert [finding.sites[0] for finding in found] == ["logits", "chosen_token", "padded_logits"]
        assert "only -0 below" in found[2].reason or "only 0 below" in found[2].reason


def repetition(number: int = 0, row: int = 0, difference: float = 0.2, **parts: Any) -> Repetition:
    return Repetition(number=number, row=row, difference=difference, **parts)


class TestRepetitions:
    GOLDEN = torch.ones(2, 5, 4)

    def judge(
        self, port: torch.Tensor | None, *repetitions: Repetition, held: torch.Tensor | None = None
    ) -> tuple[ModelFinding, ...]:
        """Judge repetitions of a port with these logits, held of some tokens."""
        target = Side({} if port is None else {LOGITS: port}, held=held)
        return judged(judge_repetitions, Side({LOGITS: self.GOLDEN}), target, repetitions=repetitions)

    @pytest.mark.parametrize(
        ("difference", "error", "is_wrong"),
        [(0.1, 0.0, False), (0.101, 0.0, True), (0.39, 0.1, False), (0.41, 0.1, True), (0.101, 0.02, True)],
    )
    def test_second_run_may_differ_by_noise(self, difference: float, error: float, is_wrong: bool) -> None:
        port = self.GOLDEN * (1.0 + error)
        # One token of seven is off by far more, and tokens that are not held do not count.
        port[0, 0] = 9.0
        held = torch.ones(2, 5, dtype=torch.bool)
        found = self.judge(port, repetition(2, 1, difference), held=held)
        assert len(found) == is_wrong
        for one in found:
            assert (one.number, one.mistake) == (2, None)
            assert f"prompt 1 differ by {difference:.3g} of their norm" in one.reason

    def test_tokens_that_are_not_held_tell_no_noise(self) -> None:
        port, held = torch.zeros(2, 5, 4), torch.zeros(2, 5, dtype=torch.bool)
        held[1, 2], port[1, 2] = True, 1.0
        assert self.judge(port, repetition(), held=held) != ()
        assert self.judge(port, repetition()) == ()

    @pytest.mark.parametrize("port", [None, torch.zeros(2, 5, 3), torch.full((2, 5, 4), torch.nan)])
    def test_logits_that_cannot_be_compared_allow_no_noise(self, port: torch.Tensor | None) -> None:
        (found,) = self.judge(port, repetition())
        assert "limit 0.1" in found.reason

    def test_second_run_must_be_finite(self) -> None:
        (found,) = self.judge(
            None, repetition(difference=0.0), repetition(1, 3, difference=0.0, is_finite=False)
        )
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
    def test_further_runs_tell_what_a_prompt_depends_on(self, wrong: Any, mistake: str) -> None:
        kinds = (Repeated.OTHER_ROWS, Repeated.SAME_ROWS, Repeated.OTHER_SHAPE, Repeated.OTHER_NEIGHBOURS)
        first, *further = (
            repetition(1, difference=0.5 * (kind in (Repeated.OTHER_ROWS, *wrong)), kind=kind)
            for kind in kinds
        )
        (found,) = self.judge(None, first, *further)
        assert (found.number, found.sites, found.mistake) == (1, ("repeated_run",), mistake)
        # Without the further runs nothing is told beyond what was seen.
        (found,) = self.judge(None, first)
        assert (found.mistake, found.what) == (None, "")
        # Further runs tell nothing where other rows changed nothing.
        assert self.judge(None, *further) == ()

    @pytest.mark.parametrize(("differences", "wrong"), [((0.3, 0.3, 0.05), [1]), ((0.3, 0.05, 0.05), [])])
    def test_steps_of_a_black_box_are_held_against_its_prefill(self, differences: Any, wrong: Any) -> None:
        steps = tuple(
            repetition(number, difference=difference, kind=Repeated.WHOLE)
            for number, difference in enumerate(differences, start=1)
        )
        assert [finding.number for finding in self.judge(self.GOLDEN, *steps)] == wrong
        # Where layers are shown, their sites judge the steps.
        shown = Side({LOGITS: self.GOLDEN, (0, Site.OUTPUT): self.GOLDEN})
        assert judged(judge_repetitions, Side({LOGITS: self.GOLDEN}), shown, repetitions=steps) == ()


class TestOwnLogits:
    CHUNKS = ModelPasses(num_passes=3, chunks=((1, 1), (2, 1), (1, 1)))

    def judge(self, *wrong: tuple[int, int], held: torch.Tensor | None = None) -> list[int | None]:
        logits = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
        again = logits.clone()
        for row, column in wrong:
            again[row, column] += 1.0
        run = sides(Side({LOGITS: logits}, passes=PASSES), Side({LOGITS: logits}))
        chunks = sides(Side({LOGITS: again}, passes=self.CHUNKS, held=held), Side({LOGITS: logits}))
        return [finding.number for finding in judge_own_logits(run, chunks, split_of(chunks))]

    def test_chunk_whose_logits_are_others_is_found(self) -> None:
        assert self.judge() == []
        # Two tokens of chunk 2 and one of chunk 3: most of those behind a cache.
        assert self.judge((0, 1), (0, 2), (1, 2)) == [1]
        # One of five may have chosen other experts.
        assert self.judge((0, 1)) == []

    def test_tokens_without_logits_do_not_count(self) -> None:
        held = torch.zeros(2, 5, dtype=torch.bool)
        held[0, 3] = True
        assert self.judge((0, 1), (0, 2), (1, 2), held=held) == []
        assert self.judge((0, 3), held=held) == [2]


class TestNextTokens:
    GOLDEN = torch.zeros(2, 5, 3)

    @pytest.fixture
    def port(self) -> torch.Tensor:
        values = self.GOLDEN.clone()
        values[..., 0] = 1e-3
        values[0, 3, 1] = 9.0  # decoded in the second step
        return values

    def test_each_pass_is_compared_alone(self, port: torch.Tensor) -> None:
        golden = self.GOLDEN.clone()
        golden[..., 0] = 1e-3
        both = sides(Side({LOGITS: port}, passes=PASSES), Side({LOGITS: golden}))
        found = compare_passes(both, split_passes(both))
        counts = [(one.number, one.num_tokens, one.num_agreeing) for one in found]
        assert counts == [(0, 3, 3), (1, 2, 2), (2, 2, 1)]
        assert (found[0].kl_worst, found[2].worst_token) == (0.0, (0, 3))
        assert found[2].kl_mean == pytest.approx(found[2].kl_worst / 2)
        (whole,) = compare_passes(both, None)
        assert (whole.number, whole.num_tokens, whole.num_agreeing, whole.worst_token) == (None, 7, 6, (0, 3))

    def test_tokens_that_are_lost_or_not_held_are_left_out(self, port: torch.Tensor) -> None:
        port[0, 0] = torch.nan
        held = torch.ones(2, 5, dtype=torch.bool)
        held[0, 1] = False
        (found,) = compare_passes(sides(Side({LOGITS: port}, held=held), Side({LOGITS: self.GOLDEN})), None)
        assert (found.num_tokens, found.worst_token) == (5, (0, 3))

    def test_nothing_is_told_where_nothing_can_be_compared(self) -> None:
        golden = Side({LOGITS: self.GOLDEN})
        for port in (None, torch.zeros(2, 5, 4), torch.full((2, 5, 3), torch.nan)):
            assert compare_passes(sides(Side({} if port is None else {LOGITS: port}), golden), None) == ()
        assert compare_passes(sides(golden, Side()), None) == ()


class TestClasses:
    """Modules that a device gets in another class than a whole port's run had, in words."""

    @staticmethod
    def judge(other: dict[str, tuple[str, str]]) -> ModelFinding:
        finding = judge_classes(ModelPasses(num_passes=1, other_classes=other))
        assert finding is not None
        return finding

    def test_places_of_a_pair_of_classes_are_named_together(self) -> None:
        finding = self.judge(
            {
                "norm": ("Norm", "DeviceNorm"),
                "layers.0.q_norm.layers.0": ("Norm", "RankNorm"),
                "layers.0.input_layernorm": ("Norm", "DeviceNorm"),
                "sampler": ("", "Sampler"),
                "head": ("Linear", ""),
            }
        )
        assert (finding.mistake, finding.is_warning) == ("class_of_the_cpu", True)
        this_run = "where this run had {}: that class is not judged here"
        assert finding.reason.split("; ") == [
            f"the device gets DeviceNorm for norm, layers.*.input_layernorm, {this_run.format('Norm')}",
            f"the device gets RankNorm for layers.*.q_norm.layers.0, {this_run.format('Norm')}",
            f"the device gets Sampler for sampler, {this_run.format('none')}",
            "the device has no head, a Linear in this run",
        ]

    def test_six_modules_of_a_class_are_named(self) -> None:
        finding = self.judge({f"norm_{number}": ("Norm", "DeviceNorm") for number in range(7)})
        assert "norm_5" in finding.reason
        assert "norm_6" not in finding.reason
        # Nothing is said without a difference, or where nobody looked.
        assert judge_classes(ModelPasses(num_passes=1, other_classes={})) is None
        assert judge_classes(ModelPasses(num_passes=1)) is None
