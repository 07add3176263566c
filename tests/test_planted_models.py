"""Planted whole ports: each mistake is detected, placed and named; right ports are never flagged."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
from faults.model_judging import ModelCase, ModelGround, judge_model_port
from faults.model_ports import MODEL_MISTAKES, RIGHT_MODELS, ModelPlant, choose_model_ports

# A mistake in front of the layers, and in a cache that mm2 does not read. Slow tests plant the others.
FEW = ("embedding_scaled", "cache_hidden_one_row_off")
FEW_RIGHT = ("own_cache", "cache_fp8_with_scales")


def judge(plant: ModelPlant, toy: Path, golden: Path, directory: Path) -> ModelCase:
    ground = ModelGround(name="toy", model=toy, golden=golden)
    return judge_model_port(plant, ground, backend="cpu", directory=directory / "run")


def require_named(plant: ModelPlant, case: ModelCase) -> None:
    assert case.is_detected, case
    assert case.is_placed, case
    assert case.is_named, case


def require_right(case: ModelCase) -> None:
    assert case.verdict in ("pass", "warn"), case


@pytest.mark.parametrize("name", FEW)
def test_mistake_is_detected_placed_and_named(name: str, toy: Path, golden: Path, tmp_path: Path) -> None:
    (plant,) = choose_model_ports([name])
    require_named(plant, judge(plant, toy, golden, tmp_path))


@pytest.mark.parametrize("name", FEW_RIGHT)
def test_right_port_is_not_flagged(name: str, toy: Path, golden: Path, tmp_path: Path) -> None:
    (plant,) = choose_model_ports([name])
    case = judge(plant, toy, golden, tmp_path)
    assert case.verdict == ("warn" if name == "cache_fp8_with_scales" else "pass"), case


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant",
    [plant for plant in MODEL_MISTAKES if plant.name not in FEW],
    ids=lambda plant: plant.name,
)
def test_every_mistake_is_named(plant: ModelPlant, toy: Path, golden: Path, tmp_path: Path) -> None:
    require_named(plant, judge(plant, toy, golden, tmp_path))


@pytest.mark.slow
@pytest.mark.parametrize(
    "plant", [plant for plant in RIGHT_MODELS if plant.name not in FEW_RIGHT], ids=lambda plant: plant.name
)
def test_no_right_port_is_flagged(plant: ModelPlant, toy: Path, golden: Path, tmp_path: Path) -> None:
    require_right(judge(plant, toy, golden, tmp_path))


def test_names_of_planted_ports_are_unique() -> None:
    names = [plant.name for plant in (*MODEL_MISTAKES, *RIGHT_MODELS)]
    assert len(set(names)) == len(names)
