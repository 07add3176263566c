"""Mistakes are planted in models that were trained as in synthetic ones: on their text, and where they can show."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from faults.baseline import Baseline, BaselineRequest, open_baseline
from faults.plan import PARTS, name_left_out, plan_part_on_model
from faults.planted import PLANTS
from faults.runs import PlannedRun
from faults.trained_model import TrainedModel

from minimax_tools.errors import CheckpointError
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.tokenizer import encode_texts

TEXT = "A port of a model is right where it differs from the model by rounding alone. " * 40
BF16 = TrainedModel(folder="/models/a", digest="0" * 16, num_layers=5, is_fp8=False)
FP8 = TrainedModel(folder="/models/b", digest="0" * 16, num_layers=5, is_fp8=True)


def write_model(folder: Path, dtype: torch.dtype) -> Path:
    model = SyntheticModel(num_hidden_layers=1, num_local_experts=8, intermediate_size=64)
    synthesize(folder, model=model, dtype=dtype, shard_size_bytes=None, seed=3)
    (folder / "held_out.txt").write_text(TEXT, encoding="utf-8")
    return folder


def runs_of(part: str, model: TrainedModel) -> list[PlannedRun]:
    planned = plan_part_on_model(part, PLANTS, model, seed=0, asks_names=True)
    return [run for run in planned if isinstance(run, PlannedRun)]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Baseline]:
    folder = write_model(tmp_path_factory.mktemp("learned") / "model", torch.bfloat16)
    learned = TrainedModel.open(folder)
    request = BaselineRequest(
        name="learned", seed=2, lengths=(9, 4), start_positions=(0, 700), num_layers=1, trained=learned
    )
    with open_baseline(request, tmp_path_factory.mktemp("scratch")) as opened:
        yield opened


class TestTrainedModel:
    @pytest.mark.parametrize(
        ("dtype", "is_fp8"), [(torch.bfloat16, False), (torch.float8_e4m3fn, True)], ids=str
    )
    def test_folder_tells_how_it_is_stored(self, dtype: torch.dtype, is_fp8: bool, tmp_path: Path) -> None:
        model = TrainedModel.open(write_model(tmp_path / "model", dtype))
        assert (model.name, model.num_layers, model.is_fp8) == ("model", 1, is_fp8)

    def test_other_text_is_another_model_to_the_journal(self, tmp_path: Path) -> None:
        folder = write_model(tmp_path / "model", torch.bfloat16)
        before = TrainedModel.open(folder)
        (folder / "held_out.txt").write_text(TEXT + "More.", encoding="utf-8")
        assert TrainedModel.open(folder).digest != before.digest

    def test_folder_without_a_model_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError):
            TrainedModel.open(tmp_path)


class TestBaseline:
    def test_rows_are_cut_from_the_text(self, baseline: Baseline) -> None:
        (tokens,) = encode_texts(baseline.folder, [TEXT], chat=False)
        row = baseline.inputs.input_ids[0].tolist()
        assert baseline.inputs.lengths == (9, 4)
        assert any(tokens[start : start + 9] == row for start in range(len(tokens)))

    def test_rows_of_text_begin_where_they_were_asked_to(self, baseline: Baseline) -> None:
        assert baseline.request.has_far_positions
        assert baseline.inputs.position_ids[:, 0].tolist() == [0, 700]

    def test_golden_measures_variants_as_users_get_them(self, baseline: Baseline) -> None:
        assert baseline.golden.description.floor_variants == ("nearest", "random_1")


class TestPlan:
    def test_mistakes_in_reading_fp8_are_left_out_of_a_model_in_bf16(self) -> None:
        planted = {run.plant.name for run in runs_of("short", BF16) if run.plant}
        left_out = set(name_left_out(PLANTS, BF16))
        assert left_out == {name for name in left_out if name.startswith("fp8_")} != set()
        assert not planted & left_out
        assert "fp8_activations" in planted
        assert name_left_out(PLANTS, FP8) == ()
        assert left_out <= {run.plant.name for run in runs_of("short", FP8) if run.plant}

    def test_rows_hold_1_to_500_tokens_and_decoded_ones(self) -> None:
        totals = {sum(run.request.lengths) for part in PARTS for run in runs_of(part, FP8) if run.plant}
        assert {1, 4, 24, 500} <= totals
        assert all(run.decodes for run in runs_of("decode", FP8))
        goldens = {run.request.attention for part in PARTS for run in runs_of(part, FP8) if run.plant}
        assert goldens == {"sdpa", "eager"}

    def test_right_ports_are_every_implementation_against_every_golden(self) -> None:
        runs = runs_of("clean", BF16)
        assert all(run.plant is None for run in runs)
        stages = {(run.request.lengths, run.request.attention) for run in runs}
        assert stages == {
            (rows, golden)
            for rows in ((1,), (4,), (24, 7), (96, 61, 7), (500,))
            for golden in ("sdpa", "eager")
        }
        ports = {(Path(run.port).name, run.backend) for run in runs}
        assert {("ranks of 2", "cpu"), ("ranks of 4", "cpu"), ("ranks of 4", "xla-cpu")} <= ports
        for name in ("builtin", "reference", "planted", "minimal_port.py:DecoderLayer"):
            assert {(name, "cpu"), (name, "xla-cpu")} <= ports
        for name in ("EagerAttention", "EagerExperts", "BatchedExperts", "FlexAttention", "Same"):
            assert (f"transformers_port.py:{name}", "cpu") in ports

    def test_model_of_five_layers_gives_enough_right_layers_with_three_others(self) -> None:
        assert 4 * 5 * len(runs_of("clean", BF16)) >= 3000

    def test_no_two_runs_are_one_to_the_journal(self) -> None:
        planned = [
            repr(run)
            for part in PARTS
            for model in (BF16, FP8)
            for run in plan_part_on_model(part, PLANTS, model, seed=0, asks_names=True)
        ]
        assert len(set(planned)) == len(planned)
