from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))
from calibrate import calibrate
from fit_limits import fit_floorless, fit_ratios

from compare.limits.limits import NOISE_FIGURES, RATIO_FIGURES, Limit
from compare.limits.limits_file import read_limits

SITES = ("attn_delta", "router_logits", "moe_delta", "output")


def records(*, usual: float = 1.1, spread: float = 0.02, token_spread: float = 0.2) -> list[dict[str, Any]]:
    """Return differences that clean ports might have been measured to have."""
    generator = np.random.default_rng(0)
    found = []
    for port, furthest in (("builtin on cpu", 1.0), ("other on cpu", usual)):
        for seed in range(4):
            for num_tokens in (164, 41, 4):
                for mode in ("isolated", "chained"):
                    for layer in range(6):
                        for floor in ("full", "stats", "off"):
                            common = {
                                **{"port": port, "golden": "sdpa", "shape": "toy", "seed": seed},
                                **{"lengths": [num_tokens], "tokens": num_tokens, "mode": mode},
                                **{"layer": layer, "floor": floor, "hidden": False, "torch": "2.9"},
                            }
                            incoming = 0.01 if mode == "chained" and layer else 0.0
                            flips = {**common, "site": "router_experts", "flipped": num_tokens // 40}
                            found.append({**flips, "unexplained": 0})
                            for site in SITES:
                                deviation = spread + token_spread / math.sqrt(num_tokens)
                                values = furthest * np.exp(deviation * generator.standard_normal(10))
                                noise = dict(zip(NOISE_FIGURES, map(float, values), strict=True))
                                wanted = NOISE_FIGURES if floor == "full" else RATIO_FIGURES
                                figures: dict[str, Any] = {"incoming": incoming, "floor_relative": 4e-3}
                                if floor == "off":
                                    figures["relative_l2"] = 5e-3 + 2 * incoming
                                else:
                                    figures |= {figure: noise[figure] for figure in wanted} | {
                                        "channels": 256
                                    }
                                found.append({**common, "site": site, **figures})
    return found


def test_limit_follows_the_implementation_that_is_furthest_off() -> None:
    for usual in (1.05, 1.3):
        table = fit_ratios(records(usual=usual), mode="isolated", floor="full")
        assert table["all"]["whole"].usual == pytest.approx(usual, rel=0.03)
        assert table["all"]["whole"].spread == pytest.approx(0.035, abs=0.015)


def test_no_clean_figure_is_beyond_its_limit_and_each_limit_is_near() -> None:
    measured = records()
    table = fit_ratios(measured, mode="isolated", floor="full")
    judged = [r for r in measured if r["mode"] == "isolated" and r["floor"] == "full" and "whole" in r]
    for record in judged:
        limit = table.get(record["site"], {}).get("whole", table["all"]["whole"])
        value = limit.at(num_tokens=record["tokens"], share=1e-3 / len(judged))
        assert record["whole"] < value
        assert value < (1.5 if record["tokens"] == 164 else 3.5)


def test_file_that_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(calibrate(records()), encoding="utf-8")
    limits = read_limits(path)
    assert limits.backends == {"cpu"}
    fitted = fit_ratios(records(), mode="isolated", floor="full")["all"]["whole"]
    assert limits.isolated.find("q_proj", "whole") == fitted
    # What is estimated may go as far as what it estimates.
    assert (limits.isolated_estimated.find("q_proj", "whole") or fitted).usual >= fitted.usual
    assert json.loads(path.read_text().split("ports: ")[1].splitlines()[0]) == [
        "builtin on cpu",
        "other on cpu",
    ]


def test_growth_is_told_by_errors_that_outweigh_rounding_and_by_those_that_grow() -> None:
    def amplification(growth: float, *, incoming: float) -> Limit:
        """Return records of runs in which an error doubles at moe_delta, and of some that inherit another error."""
        measured = records()
        others = [
            {**record, "incoming": incoming, "relative_l2": growth * incoming}
            for record in measured
            if record["floor"] == "off" and record.get("incoming") and record["seed"] == 0
        ]
        table = fit_floorless([*measured, *others], fit_ratios(measured, mode="isolated", floor="full"))
        return table["moe_delta"]["amplification"]

    usual = amplification(2.0, incoming=0.01)
    assert amplification(8.0, incoming=0.001) == usual
    assert amplification(0.5, incoming=0.05) == usual
    wider = amplification(8.0, incoming=0.05)
    assert wider.at(num_tokens=164, share=1e-6) > usual.at(num_tokens=164, share=1e-6)


def test_goldens_with_variants_have_limits_of_their_own(tmp_path: Path) -> None:
    plain = records(usual=1.3)
    # In a wider unit the port that is furthest off is no further off than the others.
    widened = [
        {**record, "floor": f"{record['floor']}_variants", "whole": min(record["whole"], 1.0)}
        for record in plain
        if record["floor"] != "off" and record.get("whole") is not None
    ]
    path = tmp_path / "limits.yaml"
    path.write_text(calibrate(plain + widened), encoding="utf-8")
    limits = read_limits(path)
    assert limits.isolated_variants is not None
    others, own = limits.isolated.find("all", "whole"), limits.isolated_variants.find("all", "whole")
    assert others is not None
    assert own is not None
    assert others.usual == pytest.approx(1.3, rel=0.03)
    # With room for models that were not measured, and for single tokens.
    assert own.usual == pytest.approx(1.15, rel=0.03)
    assert own.token_spread >= 0.1


def test_limits_measured_before_stay_and_grow_no_tighter(tmp_path: Path) -> None:
    path = tmp_path / "before.yaml"
    path.write_text(calibrate(records(usual=1.4)), encoding="utf-8")
    before = read_limits(path)
    isolated = [record for record in records(usual=1.1) if record["mode"] == "isolated"]
    again = tmp_path / "again.yaml"
    again.write_text(calibrate(isolated, before=before), encoding="utf-8")
    limits = read_limits(again)
    assert limits.chained == before.chained
    for site in SITES:
        earlier, now = before.isolated.find(site, "whole"), limits.isolated.find(site, "whole")
        assert earlier is not None
        assert now is not None
        assert now.usual >= earlier.usual


def test_numbers_of_tokens_that_came_once_are_taken_together() -> None:
    measured = records()
    one = next(
        record
        for record in measured
        if record["floor"] == "off" and record.get("incoming") and record["tokens"] == 41
    )
    strays = [{**one, "site": "moe_delta", "tokens": tokens, "relative_l2": 0.03} for tokens in range(33, 41)]
    ratios = fit_ratios(measured, mode="isolated", floor="full")
    without = fit_floorless(measured, ratios)["moe_delta"]["amplification"]
    with_them = fit_floorless([*measured, *strays], ratios)["moe_delta"]["amplification"]
    assert without.token_spread < with_them.token_spread < 0.5
    for stray in strays:
        growth = stray["relative_l2"] / stray["incoming"]
        assert growth < with_them.at(num_tokens=stray["tokens"], share=1e-4)
