"""The case of a layer: what judges hypotheses, on which tokens; and each mistake of the catalogue changes the layer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.catalogue.candidates import nothing_listed
from compare.catalogue.catalogue import CATALOGUE
from compare.diagnosis.layer_case import LayerCase, spread_tokens
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import IncomparableError
from minimax_tools.model.graph import ModelGraph
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
    # Weights in any order say nothing without their experts.
    with pytest.raises(IncomparableError, match="nothing of layer 1 can be judged"):
        open_case(run=replace(LAYER_1, sites=(Site.INPUT, Site.ROUTER_WEIGHTS)))


def lost(*columns: int) -> Callable[[torch.Tensor], torch.Tensor]:
    """Loses some columns of the first row, and padding of the second."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[0, list(columns)] = torch.nan
        tensor[1, 40] = torch.inf
        return tensor

    return change


@pytest.mark.parametrize(
    ("columns", "run"),
    [
        ((3, 47), LAYER_1),
        # Tokens that a whole port decoded are not judged, and other decoded tokens are.
        ((3, 4, 47), replace(LAYER_1, num_decoded=1, decodes_by_row=True)),
        ((3, 47), LAYER_1.decoding(1)),
    ],
)
def test_lost_tokens_are_counted(
    open_case: Callable[..., LayerCase], columns: tuple[int, ...], run: Run
) -> None:
    case = open_case({(1, Site.OUTPUT): lost(*columns), (1, Site.ATTN_DELTA): lost(3)}, run=run)
    assert case.notes[0].startswith("2 of 81 tokens hold NaN or Inf and were left out")
    assert open_case({(1, Site.Q_NORM): lost(3)}, run=run).notes == case.notes[1:]


def test_inherited_input_is_told(open_case: Callable[..., LayerCase]) -> None:
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
    sites = tuple(site for site in ModelGraph().sites if site is not Site.ROUTER_LOGITS)
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


# What a short prompt without early flips does not show.
FAINT = {
    "rope_positions_clamped",
    "rope_positions_low_precision",
    "rope_positions_modulo",
    "rope_positions_counted",
    "padding_mask_missing",
    "swiglu_clamped",
    "norm_eps",
    "router_low_precision",
    "expert_capacity",
}


@pytest.fixture(scope="module")
def trial(toy: Path, golden: Path) -> Iterator[Trial]:
    source = Capture.open(golden)
    opened = CheckpointWeights(model=str(toy)).open_layer(1, source)
    with opened as weights, torch.no_grad():
        case = LayerCase(source, source, weights=weights, layer=1, suspects=frozenset({Site.OUTPUT}))
        yield case.open_trial()


def test_layer_without_a_change_is_the_goldens_twin(trial: Trial, golden: Path) -> None:
    source, kept = Capture.open(golden), trial.settled
    # The twin keeps no input, and the golden's own choice of experts.
    for site in set(ModelGraph().sites) - {Site.INPUT, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS}:
        twin = source.read_twin(1, site)
        assert twin is not None
        rows = trial.base.chosen(twin.transpose(1, 2).flatten(2) if site.has_heads_dim else twin)
        assert (trial.base.rows(site)[kept] - rows[kept]).norm() <= 1e-5 * rows[kept].norm(), site
    # The golden itself leaves one.
    assert trial.null().leaves == pytest.approx(1.0, abs=0.1)


@torch.no_grad()
def test_every_mistake_changes_the_layer_and_is_finite(trial: Trial) -> None:
    hypotheses = [mistake.hypotheses(trial.base.inputs) for mistake in CATALOGUE.values()]
    firsts = [its[0] for its in hypotheses if its]
    # Rows that begin at 0 and end early show nothing of what goes wrong far out.
    far = {name for name in CATALOGUE if name.startswith("rope_positions_")}
    # Others take their parameters from the port's values.
    found = {name for name, mistake in CATALOGUE.items() if mistake.candidates is nothing_listed}
    # Others are mistakes in other models.
    others = {name for name, mistake in CATALOGUE.items() if not mistake.fits(trial.base.spec.graph)}
    others.add("qk_norm_weights_exchanged")
    assert (
        set(CATALOGUE) - far - found - others <= {its[0].name for its in hypotheses if its} <= set(CATALOGUE)
    )
    exact = trial.base.rows(Site.OUTPUT)
    for hypothesis, evaluation in trial.evaluate(firsts):
        rows = evaluation.rows(Site.OUTPUT)
        assert rows.shape == exact.shape
        assert bool(rows.isfinite().all()), hypothesis.name
        if hypothesis.name not in FAINT and hypothesis.name != "projection_scaled":
            assert not torch.equal(rows, exact), hypothesis.name


@torch.no_grad()
def test_mistakes_that_do_the_same_cannot_be_told_apart(trial: Trial) -> None:
    chosen = {
        "router_weights_scaled": {"factor": 2.0},
        "moe_delta_scaled": {"factor": 2.0},
        "gate_up_swapped": {},
    }
    hypotheses = [CATALOGUE[name].with_parameters(parameters) for name, parameters in chosen.items()]
    settled, yardstick = trial.settled, trial.yardsticks[Site.OUTPUT]
    exact = yardstick.exact[settled]
    floor = (yardstick.golden[settled] - exact).norm()
    router, moe, swapped = (
        evaluation.rows(Site.OUTPUT)[settled] for _, evaluation in trial.evaluate(hypotheses)
    )
    assert (router - moe).norm() < floor
    assert min((swapped - other).norm() for other in (router, moe)) >= floor
    assert min((rows - exact).norm() for rows in (router, moe, swapped)) > 5 * floor


@pytest.mark.slow
def test_mistakes_that_begin_at_different_sites_can_happen_together(trial: Trial) -> None:
    hypotheses = [
        hypothesis
        for mistake in CATALOGUE.values()
        if not mistake.reads_right_layer
        for hypothesis in mistake.hypotheses(trial.base.inputs)[:1]
    ]
    base = trial.base.select_tokens(torch.arange(4))
    num_pairs = 0
    for first, second in itertools.combinations(hypotheses, 2):
        if not first.sites & second.sites:
            changed = base.changed(first.and_also(second).change)
            assert changed.rows(Site.OUTPUT).shape == base.rows(Site.OUTPUT).shape, (first.name, second.name)
            num_pairs += 1
    assert num_pairs > 1000
