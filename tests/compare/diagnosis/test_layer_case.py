"""The case of a layer: sites, tokens and noise that judge hypotheses, and the tokens on which they are screened."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.diagnosis.layer_case import LayerCase, spread_tokens
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.model.run import Run, sweep_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span

LAYER_1 = sweep_run(Span(1, 2), sites_level="all")


@pytest.mark.parametrize(
    ("lengths", "most", "indices"),
    [
        ([6], 4, list(range(6))),
        ([7], 4, [0, 3, 6]),
        # Of three prompts, the ends of two: half of four tokens.
        ([10, 10, 20], 4, [0, 9, 19, 39]),
        ([10, 10, 20], 8, [0, 9, 10, 19, 20, 29, 39]),
        ([40], 8, [0, 6, 13, 20, 26, 32, 39]),
    ],
)
def test_last_tokens_and_others_are_chosen(lengths: list[int], most: int, indices: list[int]) -> None:
    assert spread_tokens(sum(lengths), lengths, most).tolist() == indices


@pytest.fixture
def open_case(golden: Path, toy: Path, copyist: Any) -> Iterator[Callable[..., LayerCase]]:
    """Opens layer 1 of a device run against the golden, or against another one."""
    with ExitStack() as stack:

        def open_case(
            changes: Any = None,
            *,
            reference: Path = golden,
            run: Run | None = None,
            suspects: frozenset[Site] = frozenset(),
            **options: Any,
        ) -> LayerCase:
            source = Capture.open(reference)
            target = Capture.open(copyist.device_run(changes, run=run or LAYER_1))
            weights = stack.enter_context(CheckpointWeights(model=str(toy)).open_layer(1, source))
            return LayerCase(source, target, weights=weights, layer=1, suspects=suspects, **options)

        yield open_case


@pytest.mark.parametrize(
    ("suspects", "sites"),
    [
        (frozenset(), (Site.ATTN_DELTA, Site.MOE_DELTA, Site.OUTPUT)),
        (frozenset({Site.K_NORM, Site.INPUT}), (Site.K_NORM,)),
        (frozenset({Site.ROUTER_EXPERTS}), (Site.ROUTER_EXPERTS,)),
        (frozenset({Site.ROUTER_WEIGHTS, Site.Q_ROPE}), (Site.Q_ROPE, Site.ROUTER_WEIGHTS)),
    ],
)
def test_suspects_and_what_shows_them_judge(
    open_case: Callable[..., LayerCase], suspects: frozenset[Site], sites: tuple[Site, ...]
) -> None:
    assert open_case(suspects=suspects).sites == sites


def test_site_of_another_shape_does_not_judge(open_case: Callable[..., LayerCase]) -> None:
    changes = {(1, Site.OUTPUT): lambda tensor: tensor[..., :8]}
    assert open_case(changes).sites == (Site.ATTN_DELTA, Site.MOE_DELTA)


def test_layer_of_which_nothing_can_judge_is_refused(open_case: Callable[..., LayerCase]) -> None:
    # Weights in any order say nothing without their experts.
    run = replace(LAYER_1, sites=(Site.INPUT, Site.ROUTER_WEIGHTS))
    with pytest.raises(IncomparableError, match="nothing of layer 1 can be judged"):
        open_case(run=run)


def lost(*columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Loses some columns of the first row, and padding of the second."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, list(columns)] = torch.nan
        tensor[1, 40] = torch.inf
        return tensor

    return change


class TestNotes:
    WORDS = "2 of 81 tokens hold NaN or Inf and were left out"

    def test_lost_tokens_are_counted(self, open_case: Callable[..., LayerCase]) -> None:
        changes = {(1, Site.OUTPUT): lost(3, 47), (1, Site.ATTN_DELTA): lost(3)}
        (note,) = open_case(changes).notes
        assert note.startswith(self.WORDS)
        assert open_case({(1, Site.Q_NORM): lost(3)}).notes == ()

    def test_tokens_that_a_whole_port_decoded_are_not_judged(
        self, open_case: Callable[..., LayerCase]
    ) -> None:
        run = replace(LAYER_1, num_decoded=1, decodes_by_row=True)
        (note,) = open_case({(1, Site.OUTPUT): lost(3, 4, 47)}, run=run).notes
        assert note.startswith(self.WORDS)

    def test_other_decoded_tokens_are(self, open_case: Callable[..., LayerCase]) -> None:
        run = LAYER_1.decoding(1)
        case = open_case({(1, Site.OUTPUT): lost(3, 47)}, run=run)
        assert case.notes[0].startswith(self.WORDS)
        assert case.inputs.decode_start < 48

    def test_inherited_input_is_told(self, open_case: Callable[..., LayerCase]) -> None:
        (note,) = open_case(is_inherited=True).notes
        assert note.startswith("its input is the output of other layers")


@pytest.mark.parametrize(("is_by_row", "start"), [(False, 30), (True, 48)])
def test_columns_are_decoded_unless_rows_are(
    open_case: Callable[..., LayerCase], is_by_row: bool, start: int
) -> None:
    run = replace(LAYER_1, num_decoded=3, decodes_by_row=is_by_row)
    assert open_case(run=run).inputs.decode_start == start


def test_noise_of_logits_that_the_golden_lacks_is_a_share_of_them(
    open_case: Callable[..., LayerCase], copyist: Any
) -> None:
    sites = tuple(site for site in Site if site is not Site.ROUTER_LOGITS)
    reference = copyist.golden(run=replace(copyist.source.description.run, sites=sites))
    judging = (Site.ATTN_DELTA,)
    case = open_case(reference=reference, judging=judging)
    assert case.sites == judging
    trial = case.open_trial()
    logits = trial.base[Site.ROUTER_LOGITS]
    assert trial.logit_noise == pytest.approx(5e-3 * float(logits.square().mean().sqrt()))
    own = open_case(judging=judging).open_trial().logit_noise
    golden = copyist.source.read(1, Site.ROUTER_LOGITS)[copyist.source.read_inputs().attention_mask.bool()]
    assert own == pytest.approx(float((golden - logits).square().mean().sqrt()), rel=1e-3)


def test_golden_is_moved_to_the_values_that_the_port_computed_from(
    open_case: Callable[..., LayerCase],
) -> None:
    changes = {(1, Site.Q_PROJ): lambda tensor: tensor.roll(1, dims=-1)}
    for own, is_moved in ((frozenset(), False), (frozenset({Site.Q_PROJ}), True)):
        case = open_case(changes, judging=(Site.ATTN_DELTA,), own=own)
        (yardstick,) = case.open_trial().yardsticks.values()
        # What remains is the golden's own rounding.
        error = (yardstick.golden - yardstick.exact).norm() / yardstick.exact.norm()
        assert 0 < error < 0.02
        port = (yardstick.port - yardstick.exact).norm() / yardstick.exact.norm()
        assert bool(port > 0.1) is is_moved
