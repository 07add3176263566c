"""The layer that hypotheses change: right where nothing is changed, and each mistake of the catalogue changes it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from compare.catalogue.candidates import nothing_listed
from compare.catalogue.catalogue import CATALOGUE
from compare.diagnosis.layer_case import LayerCase
from compare.diagnosis.trial import Trial
from compare.sides.golden_weights import CheckpointWeights
from minimax_tools.capture.reader import Capture
from minimax_tools.model.sites import Site

LAYER = 1
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
    opened = CheckpointWeights(model=str(toy)).open_layer(LAYER, source)
    with opened as weights, torch.no_grad():
        case = LayerCase(source, source, weights=weights, layer=LAYER, suspects=frozenset({Site.OUTPUT}))
        yield case.open_trial()


@pytest.mark.parametrize("site", [site for site in Site if site is not Site.ROUTER_EXPERTS])
def test_layer_without_a_change_is_the_goldens_twin(trial: Trial, golden: Path, site: Site) -> None:
    if site in (Site.INPUT, Site.ROUTER_WEIGHTS):
        pytest.skip("the twin keeps no input, and the golden's own choice of experts")
    source = Capture.open(golden)
    twin = source.read_twin(LAYER, site)
    assert twin is not None
    rows = trial.base.chosen(twin.transpose(1, 2).flatten(2) if site.has_heads_dim else twin)
    own = trial.base.rows(site)
    kept = trial.settled
    assert (own[kept] - rows[kept]).norm() <= 1e-5 * rows[kept].norm()


def test_golden_itself_leaves_one(trial: Trial) -> None:
    assert trial.null().leaves == pytest.approx(1.0, abs=0.1)


@torch.no_grad()
def test_every_mistake_changes_the_layer_and_is_finite(trial: Trial) -> None:
    hypotheses = [mistake.hypotheses(trial.base.inputs) for mistake in CATALOGUE.values()]
    firsts = [its[0] for its in hypotheses if its]
    # Rows that begin at 0 and end early show nothing of what goes wrong far out.
    far = {name for name in CATALOGUE if name.startswith("rope_positions_")}
    # Others take their parameters from the port's values.
    found = {name for name, mistake in CATALOGUE.items() if mistake.candidates is nothing_listed}
    assert set(CATALOGUE) - far - found <= {its[0].name for its in hypotheses if its} <= set(CATALOGUE)
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
