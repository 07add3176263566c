"""Dumps of whole models: a mistake in one layer, what each view of it shows, and what passes though it is wrong."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.cases import Case, DumpCase
from faults.dump_runs import PlannedDump, carry_out_dump, plan_dumps
from faults.dump_tally import dump_misses, give_dump_figures
from faults.journal import RunJournal
from faults.pass_tally import JoinedCounts, give_pass_figures
from faults.planted import choose_plants

from minimax_tools.errors import UsageError
from neuron.devices.runtime import open_runtime

STAGE = BaselineRequest(name="dump", seed=0, lengths=(20, 7), num_layers=3, intermediate_size=128)
VIEWS = ("whole", "no_experts", "outputs", "vllm_neuron")

DUMP = DumpCase(
    run="a run",
    baseline="a baseline",
    view="no_experts",
    has_checkpoint=True,
    verdict="fail",
    kind="catalogued",
    layer=2,
    mistake="gate_up_swapped",
    sites=("moe_delta",),
    shown=("moe_delta", "output"),
    effects={"moe_delta": 100.0, "output": 50.0},
    blamed=((2, ("moe_delta",)),),
)
PORT = Case(
    run="a port",
    baseline="a baseline",
    port="planted",
    backend="cpu",
    rows="prefill",
    layer=2,
    kind="catalogued",
    mistake="gate_up_swapped",
    sites=("moe_delta",),
    effects={"moe_delta": 100.0, "output": 50.0},
    verdict="fail",
    black_box_verdict="fail",
)


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    with open_baseline(STAGE, tmp_path_factory.mktemp("faults")) as opened:
        yield opened


def carry_out(planned: PlannedDump, baseline: Baseline, directory: Path) -> dict[tuple[str, bool], DumpCase]:
    with open_runtime("cpu") as runtime:
        cases = carry_out_dump(planned, baseline, runtime=runtime, directory=directory / "run")
    return {(case.view, case.has_checkpoint): case for case in cases}


class TestRun:
    @pytest.mark.slow
    def test_mistake_in_the_last_layer_is_judged_in_every_view(
        self, baseline: Baseline, tmp_path: Path
    ) -> None:
        (plant,) = choose_plants(["moe_residual_missing"])
        cases = carry_out(PlannedDump(request=STAGE, plant=plant, layer=2), baseline, tmp_path)
        assert set(cases) == {(view, known) for view in VIEWS for known in (True, False)}
        whole = cases["whole", True]
        assert whole.is_above_floor
        assert whole.is_detected
        assert whole.is_layer_named
        assert not any(case.is_passed for case in cases.values() if case.view == "whole")
        assert "router_experts" in whole.shown
        for view in ("no_experts", "outputs", "vllm_neuron"):
            assert "router_experts" not in cases[view, True].shown
        assert cases["outputs", True].shown == ("input", "output")
        assert "router_logits" in cases["vllm_neuron", True].shown

    @pytest.mark.slow
    def test_right_run_fails_in_no_view(self, baseline: Baseline, tmp_path: Path) -> None:
        cases = carry_out(PlannedDump(request=STAGE), baseline, tmp_path)
        assert {case.verdict for case in cases.values()} <= {"pass", "incomparable"}
        assert cases["whole", True].is_passed


class TestPlan:
    def test_each_mistake_stands_in_one_layer_behind_the_second(self) -> None:
        stage = replace(STAGE, num_layers=5)
        runs = list(plan_dumps(stage, choose_plants([])))
        assert runs[0].plant is None
        layers = {run.layer for run in runs[1:]}
        assert layers == {2, 3, 4}
        assert runs == list(plan_dumps(stage, choose_plants([])))

    def test_model_of_two_layers_has_none(self) -> None:
        assert list(plan_dumps(replace(STAGE, num_layers=2), choose_plants([]))) == []


def figures_of(*cases: DumpCase) -> dict[str, float]:
    return {figure.figure: figure.value for figure in give_dump_figures(cases)}


class TestFigures:
    def test_found_and_placed_counts_with_the_checkpoint_at_hand(self) -> None:
        missed = replace(DUMP, verdict="pass", blamed=())
        figures = figures_of(DUMP, missed)
        assert (figures["dumps_above_floor"], figures["dumps_detected_%"]) == (2, 50)
        assert figures["dumps_layer_named_%"] == 100
        assert [word for word, _ in dump_misses([DUMP, missed])] == ["false pass"]

    @pytest.mark.parametrize("layers", [(1,), (2, 3), (None,), ()])
    def test_blame_of_another_layer_lowers_the_layer(self, layers: tuple[int | None, ...]) -> None:
        misled = replace(DUMP, blamed=tuple((layer, ("output",)) for layer in layers))
        assert figures_of(misled)["dumps_layer_named_%"] == 0
        assert [word for word, _ in dump_misses([misled])] == ["wrong layer"]

    def test_without_the_checkpoint_incomparable_is_enough_and_a_pass_is_not(self) -> None:
        blind = replace(DUMP, has_checkpoint=False, verdict="incomparable", blamed=())
        assert figures_of(blind)["dumps_without_checkpoint_passed"] == 0
        assert list(dump_misses([blind])) == []
        assert figures_of(replace(blind, verdict="warn"))["dumps_without_checkpoint_passed"] == 1

    def test_mistake_that_a_view_does_not_show_need_not_be_found(self) -> None:
        faint = replace(
            DUMP, shown=("output",), effects={"moe_delta": 100.0, "output": 0.5}, verdict="pass", blamed=()
        )
        assert not faint.is_above_floor
        assert list(dump_misses([faint])) == []

    def test_right_dump_that_fails_is_a_false_alarm(self) -> None:
        right = replace(DUMP, kind="right", layer=None, mistake="", sites=())
        assert figures_of(right, replace(right, verdict="incomparable"))["false_alarms_dumps"] == 1
        assert [word for word, _ in dump_misses([right])] == ["false alarm"]

    def test_journal_gives_dumps_back(self, tmp_path: Path) -> None:
        path = tmp_path / "journal"
        RunJournal(path).add("both", [DUMP, PORT, replace(DUMP, blamed=((None, ("logits",)),))])
        assert RunJournal(path).find("both") == (DUMP, PORT, replace(DUMP, blamed=((None, ("logits",)),)))


class TestFalsePasses:
    def test_ports_count_by_run_and_dumps_by_view(self) -> None:
        beside = replace(PORT, layer=0)
        passed = replace(PORT, run="another", verdict="warn")
        dumps = [DUMP, replace(DUMP, verdict="pass")]
        figures = {figure.figure: figure.value for figure in give_pass_figures([PORT, beside, passed], dumps)}
        assert (figures["wrong_things"], figures["false_passes"]) == (4, 2)
        assert figures["false_passes_of_2_ports"] == figures["false_passes_of_2_dumps"] == 1

    def test_black_boxes_are_told_of_apart(self) -> None:
        passed = replace(PORT, black_box_verdict="pass")
        figures = {figure.figure: figure.value for figure in give_pass_figures([passed], [])}
        assert (figures["false_passes"], figures["false_passes_of_1_black_boxes"]) == (0, 1)

    def test_what_two_right_ports_may_differ_by_is_told_apart(self) -> None:
        faint = replace(PORT, run="another", effects={"moe_delta": 1.5}, verdict="pass")
        # The run is wrong beyond doubt in another layer.
        beside = replace(PORT, layer=0, effects={"moe_delta": 1.5})
        dump = replace(DUMP, effects={"moe_delta": 1.5}, verdict="pass")
        figures = {figure.figure: figure.value for figure in give_pass_figures([PORT, beside, faint], [dump])}
        assert (figures["wrong_things"], figures["false_passes"]) == (1, 0)
        assert figures["passed_near_the_floor_of_2"] == 2

    def test_output_shows_no_more_of_a_mistake_than_there_is(self) -> None:
        # One token that goes to other experts, as noise sends one too.
        flipped = replace(
            DUMP,
            sites=("router_experts",),
            shown=("output",),
            effects={"router_experts": 1.0, "output": 6.0},
            verdict="pass",
        )
        assert flipped.effect == 1.0

    def test_faint_mistakes_are_no_wrong_things(self) -> None:
        faint = replace(PORT, effects={"moe_delta": 0.4}, verdict="pass")
        assert list(give_pass_figures([faint], [])) == []

    def test_counts_of_other_benchmarks_are_joined(self, tmp_path: Path) -> None:
        path = tmp_path / "damage.json"
        figures = [{"figure": "wrong_things", "value": 29.0}, {"figure": "false_passes", "value": 1.0}]
        path.write_text(json.dumps({"benchmark": "damage", "figures": figures}))
        found = {
            figure.figure: figure.value for figure in give_pass_figures([PORT], [], [JoinedCounts.read(path)])
        }
        assert (found["wrong_things"], found["false_passes"]) == (30, 1)
        assert found["false_passes_of_29_damage"] == 1

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("not JSON", "is not the output of a benchmark"),
            ('{"figures": []}', "is not the output of a benchmark"),
            (
                '{"benchmark": "x", "figures": [{"figure": "false_passes", "value": 0}]}',
                "does not count wrong_things",
            ),
        ],
    )
    def test_file_without_such_counts_is_refused(self, text: str, message: str, tmp_path: Path) -> None:
        path = tmp_path / "other.json"
        path.write_text(text)
        with pytest.raises(UsageError, match=message):
            JoinedCounts.read(path)
