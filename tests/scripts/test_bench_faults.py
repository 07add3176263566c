"""Planted mistakes are wrong where they say, and their benchmark counts rightly."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from bench_faults import main, run_all
from faults import journal
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.cases import Case
from faults.effects import measure_effects, run_float32
from faults.journal import RunJournal
from faults.pairs import pair_plants
from faults.plan import plan_quickly
from faults.plant import Plant
from faults.planted import EQUIVALENTS, MISTAKES, choose_plants
from faults.rivals import RULES
from faults.runs import plan_plants
from faults.tally import clean_cases, give_figures, misses, upper_bound

from minimax_tools.errors import UsageError
from minimax_tools.model.sites import SITE_INPUTS, Site

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench_faults.py"

# On the left padding that one of them needs, and the far row that others do; 70 rows reach the end of a bucket, and a
# window's.
STAGE = BaselineRequest(
    name="tiny",
    seed=0,
    lengths=(70, 7),
    padding_side="left",
    start_positions=(0, 4092),
    num_layers=1,
    intermediate_size=128,
)

CASE = Case(
    run="a run",
    baseline="a baseline",
    port="planted",
    backend="cpu",
    rows="prefill",
    layer=2,
    kind="catalogued",
    mistake="gate_up_swapped",
    sites=("moe_delta",),
    effects={"moe_delta": 100.0, "output": 50.0},
    failed=("moe_delta", "output"),
    blamed=(("moe_delta",),),
    black_box_detected=True,
    verdict="fail",
    black_box_verdict="fail",
    excess={"moe_delta": 80.0, "output": 30.0},
    black_box_excess=30.0,
    rivals=dict.fromkeys(RULES, ("output",)),
)
RIGHT = replace(
    CASE,
    run="a clean run",
    kind="right",
    mistake="",
    sites=(),
    effects={},
    failed=(),
    blamed=(),
    black_box_detected=False,
    verdict="pass",
    black_box_verdict="pass",
    excess={"moe_delta": 0.9, "output": 0.7},
    black_box_excess=0.85,
)


@pytest.fixture(scope="module")
def decoded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    stage = BaselineRequest(name="decoded", seed=0, lengths=(40, 39), num_layers=1, intermediate_size=128)
    with open_baseline(stage, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with open_baseline(STAGE, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


def downstream(sites: tuple[Site, ...]) -> set[Site]:
    """The sites, and all that is computed from them."""
    found = set(sites)
    for site in Site:
        if found & set(SITE_INPUTS[site]):
            found.add(site)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("plant", [plant for plant in MISTAKES if plant.prefills], ids=str)
def test_plant_changes_its_sites_and_nothing_before_or_beside_them(plant: Plant, baseline: Baseline) -> None:
    effects = measure_effects(baseline, 0, plant)
    assert max(effects[site] for site in plant.sites) > 0
    elsewhere = effects.keys() - downstream(plant.sites)
    assert {site for site in elsewhere if effects[site] != 0} == set()


@pytest.mark.parametrize("plant", [plant for plant in MISTAKES if plant.decodes], ids=str)
def test_plant_in_decode_rows_changes_its_sites(plant: Plant, decoded: Baseline) -> None:
    effects = measure_effects(decoded, 0, plant, num_decoded=1)
    assert max(effects[site] for site in plant.sites) > 0


@pytest.mark.parametrize("plant", EQUIVALENTS, ids=str)
def test_equivalent_changes_the_output_by_less_than_the_floor(plant: Plant, baseline: Baseline) -> None:
    assert measure_effects(baseline, 0, plant)[Site.OUTPUT] < 1.0


def figures_of(*cases: Case) -> dict[str, float]:
    return {figure.figure: figure.value for figure in give_figures(cases)}


def test_found_and_placed_counts() -> None:
    figures = figures_of(CASE, RIGHT)
    assert figures["detected_%"] == figures["layer_named_%"] == figures["site_named_%"] == 100
    assert (figures["clean_layer_comparisons"], figures["false_alarms"]) == (1, 0)


def test_missed_mistake_lowers_detection() -> None:
    missed = replace(CASE, failed=(), blamed=())
    assert figures_of(CASE, missed)["detected_%"] == 50
    assert [word for word, _ in misses([missed])] == ["missed"]


def test_blame_elsewhere_lowers_the_site() -> None:
    elsewhere = replace(CASE, blamed=(("moe_delta",), ("q_norm",)))
    assert figures_of(elsewhere)["site_named_%"] == 0
    assert figures_of(elsewhere)["nothing_else_blamed_%"] == 0
    assert [word for word, _ in misses([elsewhere])] == ["wrong site"]


PAIR = replace(
    CASE,
    kind="pair",
    sites=("q_proj", "moe_delta"),
    halves=(("q_proj",), ("moe_delta",)),
    effects={"q_proj": 9.0, "moe_delta": 100.0},
    blamed=(("q_proj",), ("moe_delta",)),
)


def test_pair_counts_where_both_are_blamed_and_nothing_else() -> None:
    one, more = replace(PAIR, blamed=(("q_proj",),)), replace(PAIR, blamed=(*PAIR.blamed, ("q_norm",)))
    figures = figures_of(PAIR, PAIR, one, more)
    assert (figures["pairs_above_floor"], figures["both_of_a_pair_named_%"]) == (4, 50)
    assert [word for word, _ in misses([PAIR, one, more])] == ["not both", "not both"]
    # They are no mistakes of their own, and no right layers.
    assert figures_of(CASE, RIGHT, one)["mistakes_above_floor"] == 1
    assert figures_of(CASE, RIGHT, one)["clean_layer_comparisons"] == 1


def test_pair_with_a_half_below_the_floor_is_not_counted() -> None:
    faint = replace(PAIR, effects={"q_proj": 0.5, "moe_delta": 100.0}, blamed=(("moe_delta",),))
    assert "pairs_above_floor" not in figures_of(CASE, faint)
    assert list(misses([faint])) == []


def test_plant_of_far_positions_is_planted_where_there_are_some() -> None:
    plants = choose_plants(["rope_positions_modulo", "gate_up_swapped"])
    near, far = replace(STAGE, start_positions=()), STAGE
    names = [
        [str(run.plant) for run in plan_plants(stage, plants, backend="cpu") if run.plant]
        for stage in (near, far)
    ]
    assert len(set(names[1]) - set(names[0])) == 2
    assert set(names[0]) == {str(plant) for plant in plants if not plant.needs_far_positions}


def test_pair_computes_as_each_of_its_mistakes_does(baseline: Baseline) -> None:
    attention, moe = choose_plants(["o_proj_zero", "gate_up_swapped"])
    (pair,) = pair_plants((attention, moe), seed=0)
    both, first = (run_float32(baseline, 0, plant) for plant in (pair, attention))
    assert torch.equal(both[Site.POST_NORM], first[Site.POST_NORM])
    assert not torch.equal(both[Site.MOE_DELTA], first[Site.MOE_DELTA])
    assert pair.sites == (*attention.sites, *moe.sites)


def test_blamed_right_layer_beside_a_planted_one_lowers_the_layer() -> None:
    beside = replace(RIGHT, run=CASE.run, failed=("output",))
    assert figures_of(CASE, beside)["layer_named_%"] == 0
    assert figures_of(CASE, beside)["nothing_else_blamed_%"] == 0


def test_blame_of_no_other_site_counts_even_where_the_site_is_not_found() -> None:
    found_only = replace(CASE, blamed=())
    figures = figures_of(CASE, found_only)
    assert (figures["nothing_else_blamed_%"], figures["site_named_%"]) == (100, 50)


def test_learned_and_drawn_layers_are_counted_apart() -> None:
    learned = replace(RIGHT, model="learned_a", failed=("router_logits",))
    figures = figures_of(RIGHT, RIGHT, learned)
    assert (figures["clean_layer_comparisons_learned"], figures["false_alarms_learned"]) == (1, 1)
    assert (figures["clean_layer_comparisons_drawn"], figures["false_alarms_drawn"]) == (2, 0)
    assert "false_alarms_learned" not in figures_of(RIGHT)


def test_right_layer_beside_a_planted_one_is_no_comparison_of_its_own() -> None:
    assert list(clean_cases([CASE, RIGHT, replace(RIGHT, run=CASE.run)])) == [RIGHT]


def test_mistake_below_the_floor_need_not_be_found() -> None:
    faint = replace(CASE, effects={"moe_delta": 0.5}, failed=(), blamed=())
    figures = figures_of(CASE, faint)
    assert (figures["mistakes_above_floor"], figures["mistakes_below_floor"]) == (1, 1)
    assert figures["detected_%"] == 100


@pytest.mark.parametrize("kind", ["right", "equivalent"])
def test_flagged_right_layer_is_a_false_alarm(kind: str) -> None:
    flagged = replace(RIGHT, kind=kind, black_box_detected=True)
    assert figures_of(flagged)["false_alarms"] == 1
    assert [word for word, _ in misses([flagged])] == ["false alarm"]


def test_name_counts_wherever_it_stands_and_only_of_known_mistakes() -> None:
    named = replace(CASE, named=(("up_plus_one", {}), ("gate_up_swapped", {})))
    nothing = replace(CASE, named=())
    strange = replace(CASE, kind="uncatalogued", mistake="tile_twice", named=())
    figures = figures_of(named, nothing, strange)
    assert (figures["mistake_named_%"], figures["mistake_named_first_%"]) == (50, 0)
    assert figures["uncatalogued_given_a_name_%"] == figures["given_a_wrong_name_%"] == 0
    assert [word for word, _ in misses([named, nothing, strange])] == ["named nothing"]


@pytest.mark.parametrize(
    "case",
    [
        replace(CASE, named=(("up_plus_one", {}),)),
        replace(CASE, kind="uncatalogued", mistake="tile_twice", named=(("up_plus_one", {}),)),
        replace(RIGHT, kind="equivalent", named=(("up_plus_one", {}),)),
    ],
)
def test_name_of_another_mistake_is_a_wrong_one(case: Case) -> None:
    assert figures_of(case, replace(CASE, named=()))["given_a_wrong_name_%"] == 50


def test_name_that_states_the_same_computation_is_no_wrong_one() -> None:
    strange = replace(CASE, kind="uncatalogued", mistake="tile_twice", akin=("slice_twice",))
    right, wrong = (replace(strange, named=((name, {}),)) for name in ("slice_twice", "up_plus_one"))
    figures = figures_of(right, wrong)
    assert (figures["given_a_wrong_name_%"], figures["uncatalogued_given_a_name_%"]) == (50, 100)


def test_no_name_is_counted_where_none_was_asked_for() -> None:
    assert not {name for name in figures_of(CASE, RIGHT) if "named_first" in name}


def test_upper_bound_is_that_of_clopper_and_pearson() -> None:
    # Without a hit it is 1 - 0.05^(1/n).
    assert math.isclose(upper_bound(0, 1000), 1 - 0.05**1e-3, rel_tol=1e-6)
    # scipy.stats.beta.ppf(0.95, 3, 98)
    assert math.isclose(upper_bound(2, 100), 0.06162, rel_tol=1e-3)
    assert upper_bound(0, 0) == upper_bound(3, 3) == 1.0


def test_journal_gives_back_what_finished(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    RunJournal(path).add(CASE.run, [CASE, replace(PAIR, effects={"output": math.inf})])
    with path.open("a") as file:
        file.write('{"run": "cut sh')
    again = RunJournal(path)
    assert again.find(CASE.run) == (CASE, replace(PAIR, effects={"output": math.inf}))
    assert again.find("another run") is None
    again.add("later", [CASE])
    assert RunJournal(path).find("later") == (CASE,)


def test_journal_of_other_code_is_left(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    RunJournal(path).add(CASE.run, [CASE])
    path.write_text('{"sources": "other"}\n' + path.read_text().split("\n", 1)[1])
    assert len(RunJournal(path)) == 0


def test_journal_is_of_one_state_of_the_code_that_judges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "_ROOT", tmp_path)
    paths = [tmp_path / folder / "curve.py" for folder in ("compare/chains", "scripts/faults")]
    for path in paths:
        path.parent.mkdir(parents=True)
        path.touch()
    before, changed = journal.digest_sources(), []
    for path in paths:
        path.write_text("changed = True\n")
        changed.append(journal.digest_sources() != before)
        path.write_text("")
    assert changed == [True, False]


def test_finished_runs_are_taken_from_the_journal(tmp_path: Path) -> None:
    path, plan = tmp_path / "journal", list(plan_quickly())
    for planned in plan:
        RunJournal(path).add(repr(planned), [replace(CASE, run=str(planned))])
    # Nothing is pending, so that no model is made.
    assert [case.run for case in run_all(plan, journal=RunJournal(path))] == [
        str(planned) for planned in plan
    ]


def test_folder_that_is_no_model_ends_with_3(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [str(SCRIPT), "--no-synthetic", "--model", str(tmp_path / "none")])
    assert main() == 3
    assert "none" in capsys.readouterr().err


def test_unknown_mistake_is_refused() -> None:
    with pytest.raises(UsageError, match="nothing of the name gate_swapped is planted"):
        choose_plants(["gate_swapped"])


@pytest.mark.slow
def test_quick_benchmark_finds_and_places_what_it_plants() -> None:
    result = subprocess.run(
        [sys.executable, str(SCRIPT), "--quick", "--json"], capture_output=True, text=True, check=False
    )
    figures = {figure["figure"]: figure for figure in json.loads(result.stdout)["figures"]}
    for name in ("detected_%", "layer_named_%", "site_named_%", "false_alarms", "equivalents_flagged"):
        assert figures[name]["holds"], result.stderr
