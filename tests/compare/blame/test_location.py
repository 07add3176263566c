"""The verdict says where within a site to blame the error lies, and of which sides it was taken."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import write_manifest

from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.passes import GENERATION_NAME
from minimax_tools.machine.files import digest_file
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Comparison
from reports.data import comparison_record
from reports.terminal import render_comparison


def where(comparison: Comparison, layer: int, site: Site) -> tuple[str, ...]:
    return next(one.where for one in comparison.sites if (one.layer, one.site) == (layer, str(site)))


def test_positions_that_are_wrong_are_told_in_text_and_data(copyist: Any, judge: Any) -> None:
    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        wrong = tensor.clone()
        wrong[:, 40:] = wrong[:, 40:].flip(-1)
        return wrong

    comparison = judge(copyist.device_run({(2, Site.ATTN_DELTA): spoil}))

    sentence = "wrong tokens: row 0: 40-47; the 73 others are right"
    assert where(comparison, 2, Site.ATTN_DELTA) == (sentence,)
    assert sentence in render_comparison(comparison, width=120, is_terminal=False)
    sites = comparison_record(comparison)["sites"]
    assert [site["where"] for site in sites if site["where"]] == [[sentence]]


def test_an_expert_is_told_where_the_port_shows_no_experts(copyist: Any, judge: Any) -> None:
    experts = copyist.source.read(1, Site.ROUTER_EXPERTS)
    number = int(experts[0, 0, 0])
    takes = (experts == number).any(dim=-1)

    def spoil(tensor: torch.Tensor) -> torch.Tensor:
        return torch.where(takes[..., None], tensor * -0.5, tensor)

    comparison = judge(
        copyist.device_run({(1, Site.MOE_DELTA): spoil}, not_exposed=(Site.ROUTER_EXPERTS,), name="blind")
    )

    assert any(f"of expert {number};" in sentence for sentence in where(comparison, 1, Site.MOE_DELTA))


def test_channels_are_heads_where_a_site_has_heads(copyist: Any, judge: Any) -> None:
    num_channels = copyist.source.read(1, Site.K_ROPE).shape[-1]

    def scale(tensor: torch.Tensor) -> torch.Tensor:
        wrong = tensor.clone()
        wrong[..., num_channels : 2 * num_channels] *= 1.5
        return wrong

    changes = {(1, Site.Q_PROJ): scale, (2, Site.MOE_DELTA): scale}
    comparison = judge(copyist.device_run(changes))

    assert "of head 1;" in where(comparison, 1, Site.Q_PROJ)[0]
    assert (
        f"from channels {num_channels} to {2 * num_channels - 1};" in where(comparison, 2, Site.MOE_DELTA)[0]
    )


def test_nothing_is_told_of_runs_that_pass(copyist: Any, judge: Any) -> None:
    assert not any(site.where for site in judge(copyist.device_run()).sites)


def test_a_capture_compared_with_itself_is_noted(golden: Path, judge: Any) -> None:
    assert any("both sides are the same capture" in note for note in judge(golden).notes)


def test_exchanged_sides_are_noted(golden: Path, copyist: Any, judge: Any) -> None:
    comparison = judge(golden, reference=copyist.device_run())

    assert any("exchange --golden and --run" in note for note in comparison.notes)


def test_figures_of_a_site_that_is_nan_throughout_are_not_drawn(copyist: Any, judge: Any) -> None:
    comparison = judge(copyist.device_run({(1, Site.MOE_DELTA): lambda tensor: tensor * torch.nan}))

    text = render_comparison(comparison, width=120, is_terminal=False, is_verbose=True)
    (row,) = (line.split() for line in text.splitlines() if line.split()[:2] == ["cause", "moe_delta"])
    assert set(row[2:]) == {"-"}


def test_tokens_that_the_golden_did_not_generate_are_noted(copyist: Any, judge: Any) -> None:
    run = copyist.device_run()
    assert not any("generated no tokens" in note for note in judge(run).notes)
    row = {"prompt_ids": [1, 2], "generated_ids": [3], "text": None, "likeliest": []}
    record = {"rows": [row], "sampling": {"do_sample": False}}
    (run / GENERATION_NAME).write_text(json.dumps(record), encoding="utf-8")
    manifest = Manifest.read(run)
    write_manifest(run, manifest.with_text(GENERATION_NAME, digest_file(run / GENERATION_NAME)))
    assert any("the golden generated no tokens" in note for note in judge(run).notes)
