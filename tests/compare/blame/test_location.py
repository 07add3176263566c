"""Location of the error of a blamed site: by experts, decoded tokens, positions and heads, of either side.

The verdict says where it lies, and of which sides it was taken.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import write_manifest

from compare.blame.location import locate_blamed
from compare.blame.recompute import Recomputed
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.rho import token_ratios
from compare.noise.rows import Rows
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.manifest import Manifest
from minimax_tools.capture.passes import GENERATION_NAME
from minimax_tools.machine.files import digest_file
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Blame, Comparison, SiteResult, SiteStatus
from reports.data import comparison_record
from reports.terminal import render_comparison

ROWS, LENGTH, NUM_EXPERTS, LAYER = 3, 40, 16, 5
PLACES = torch.ones(ROWS, LENGTH).nonzero()
EXPERTS = torch.stack(
    [torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(token))[:4] for token in range(120)]
).unflatten(0, (ROWS, LENGTH))
OF_11 = (EXPERTS == 11).any(dim=-1).flatten()


@dataclass
class Side:
    """Side of one layer."""

    values: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    num_decoded: int = 0
    positions: torch.Tensor | None = None
    mask: torch.Tensor | None = field(default_factory=lambda: torch.ones(ROWS, LENGTH, dtype=torch.int64))
    is_own: bool = True
    by_row: bool = False
    directory: Path = Path("side")

    @property
    def known_description(self) -> Any:
        run = SimpleNamespace(num_decoded=self.num_decoded, decodes_by_row=self.by_row)
        return SimpleNamespace(run=run, calls=()) if self.is_own else None

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(self.values) if layer == LAYER else ()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        return self.values[site]

    def read_attention_mask(self) -> torch.Tensor | None:
        return self.mask

    def read_inputs(self) -> Any:
        usual = torch.arange(LENGTH).expand(ROWS, -1)
        return SimpleNamespace(position_ids=usual if self.positions is None else self.positions)


def rows(wrong: torch.Tensor, channels: slice = slice(None), *, has_twin: bool = True) -> Rows:
    """Rows with other values at some tokens and channels."""
    twin = torch.randn(ROWS * LENGTH, 64, generator=torch.Generator().manual_seed(0))
    target = twin.bfloat16()
    other = torch.randn(twin.shape, generator=torch.Generator().manual_seed(1)).bfloat16()
    part = torch.zeros(twin.shape, dtype=torch.bool)
    part[:, channels] = True
    target = torch.where(part & wrong[:, None], 10.0 * other, target)
    massive = torch.zeros(64, dtype=torch.bool)
    return Rows(
        reference=twin.bfloat16(),
        target=target,
        massive=massive,
        places=PLACES,
        twin=twin if has_twin else None,
    )


def locate(
    found: Rows | None,
    *,
    site: Site = Site.MOE_DELTA,
    golden: Side | None = None,
    port: Side | None = None,
    criteria: str = "noise",
    layer: int | None = LAYER,
) -> tuple[str, ...]:
    reference: Any = golden or Side()
    target: Any = port or Side()
    sides = Sides(
        reference=reference,
        target=target,
        batch=Batch(None),
        criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )
    result = SiteResult(layer=layer, site=str(site), status=SiteStatus.FAIL)

    def is_right(_: Site, part: Rows) -> bool:
        return float(token_ratios(part).max()) < 2.0

    judge: Any = SimpleNamespace(judged_rows=lambda _: found, is_right=is_right)
    blame = (Blame(layer=layer, sites=("post_norm", str(site)), reason=""),)
    results = locate_blamed({site: result}, blame, judge=judge, recomputed={}, sides=sides)
    # A site that was recomputed is located by its rows of then.
    other: Any = SimpleNamespace(judged_rows=None, is_right=is_right)
    again = (
        locate_blamed(
            {site: result},
            blame,
            judge=other,
            recomputed={site: Recomputed(result=result, rows=found)},
            sides=sides,
        )
        if criteria == "noise"
        else results
    )
    assert again == results
    assert not results[site].regions or results[site].where
    return results[site].where


CHOSEN: Mapping[Site, torch.Tensor] = {
    Site.ROUTER_EXPERTS: EXPERTS,
    Site.ROUTER_LOGITS: torch.zeros(ROWS, LENGTH, NUM_EXPERTS),
}
OTHER_EXPERTS = (EXPERTS + 1) % NUM_EXPERTS


def test_places_read_as_their_golden_text(expect_text: Callable[..., None]) -> None:
    golden, everywhere = Side(CHOSEN), torch.ones(ROWS * LENGTH, dtype=torch.bool)
    others = Side({**CHOSEN, Site.ROUTER_EXPERTS: OTHER_EXPERTS})
    port = Side({Site.ROUTER_EXPERTS: EXPERTS})
    broken = {number: OTHER_EXPERTS.clone() for number in (-1, NUM_EXPERTS)}
    for number, chosen in broken.items():
        chosen[2, 3, 1] = number
    flat = Side({site: value.flatten(0, 1) for site, value in CHOSEN.items()}, mask=None, is_own=False)
    in_one_row = torch.stack((torch.zeros(120), torch.arange(120)), dim=1).long()
    experts = {
        **{
            f"experts of the port at {site}, {title}": locate(
                rows(OF_11), site=site, golden=others, port=Side({Site.ROUTER_EXPERTS: layout})
            )
            for site in (Site.MOE_DELTA, Site.OUTPUT)
            for title, layout in (
                ("by row", EXPERTS),
                ("flat", EXPERTS.flatten(0, 1)),
                ("int", EXPERTS.int()),
            )
        },
        "the golden's choice is another": locate(rows(OF_11), golden=others),
        "the port shows none": locate(rows(OF_11), golden=golden),
        **{
            f"the port shows expert {number}": locate(
                rows(OF_11), golden=golden, port=Side({Site.ROUTER_EXPERTS: chosen})
            )
            for number, chosen in broken.items()
        },
        "a batch without a mask is one row": locate(
            replace(rows(OF_11), places=in_one_row), golden=flat, port=Side(is_own=False)
        ),
        **{
            f"the golden lacks {site}": locate(
                rows(OF_11),
                golden=Side({other: CHOSEN[other] for other in CHOSEN if other != site}),
                port=port,
            )
            for site in CHOSEN
        },
        "a site before the experts": locate(rows(OF_11), site=Site.ATTN_DELTA, golden=golden),
    }
    # The last seven columns, whose tokens are scattered over three rows.
    decoded, late, second = PLACES[:, 1] >= 33, PLACES[:, 1] >= 30, PLACES[:, 0] == 1
    positions = torch.arange(LENGTH).repeat(ROWS, 1)
    positions[1] += 1000
    tokens = {
        "decoded tokens": locate(rows(decoded), port=Side(num_decoded=7)),
        "of a run that decodes none": locate(rows(decoded)),
        "of another tool's run": locate(rows(decoded), port=Side(is_own=False, num_decoded=7)),
        "positions that are not the places": locate(rows(second | late), golden=Side(positions=positions)),
        "positions that are": locate(rows(late)),
        "positions of another tool": locate(rows(second), golden=Side(positions=positions, is_own=False)),
    }
    part = rows(everywhere, slice(16, 32))
    channels = {
        **{
            f"channels of {site} beside {shown}": locate(
                part, site=site, golden=Side({shown: torch.zeros(ROWS, 2, LENGTH, 16)})
            )
            for site in (Site.Q_PROJ, Site.ATTN_CONTEXT, Site.ATTN_DELTA, Site.ROUTER_LOGITS)
            for shown in (Site.K_ROPE, Site.Q_ROPE)
        },
        "heads whose size nothing tells": locate(part, site=Site.Q_PROJ),
    }
    nothing = {
        "no rows": locate(None),
        "no floor": locate(rows(late, has_twin=False)),
        "no tokens": locate(rows(late).select(torch.zeros(120, dtype=torch.bool))),
        "fixed limits": locate(rows(late), criteria="classic"),
        "no layer": locate(rows(late), layer=None),
    }
    cases = {**experts, **tokens, **channels, **nothing}
    expect_text("location.txt", {title: "\n".join(told) or "nothing" for title, told in cases.items()})


def where(comparison: Comparison, layer: int, site: Site) -> tuple[str, ...]:
    return next(one.where for one in comparison.sites if (one.layer, one.site) == (layer, str(site)))


def test_places_within_blamed_sites_are_told_in_text_and_data(copyist: Any, judge: Any) -> None:
    experts = copyist.source.read(1, Site.ROUTER_EXPERTS)
    number = int(experts[0, 0, 0])
    takes = (experts == number).any(dim=-1, keepdim=True)
    head_dim = copyist.source.read(1, Site.K_ROPE).shape[-1]

    def turn_late_tokens(tensor: torch.Tensor) -> torch.Tensor:
        tensor[:, 40:] = tensor[:, 40:].flip(-1)
        return tensor

    def scale_second_head(tensor: torch.Tensor) -> torch.Tensor:
        tensor[..., head_dim : 2 * head_dim] *= 1.5
        return tensor

    changes = {
        (0, Site.Q_PROJ): scale_second_head,
        (1, Site.MOE_DELTA): lambda tensor: torch.where(takes, tensor * -0.5, tensor),
        (2, Site.ATTN_DELTA): turn_late_tokens,
        (3, Site.MOE_DELTA): scale_second_head,
    }
    # The golden's experts tell those of the tokens where the port shows none.
    comparison = judge(copyist.device_run(changes, not_exposed=(Site.ROUTER_EXPERTS,)))

    sentence = "wrong tokens: row 0: 40-47; the 73 others are right"
    assert where(comparison, 2, Site.ATTN_DELTA) == (sentence,)
    assert sentence in render_comparison(comparison, width=120, is_terminal=False)
    sites = comparison_record(comparison)["sites"]
    assert [site["where"] for site in sites if site["layer"] == 2 and site["where"]] == [[sentence]]
    assert "of head 1;" in where(comparison, 0, Site.Q_PROJ)[0]
    assert f"from channels {head_dim} to {2 * head_dim - 1};" in where(comparison, 3, Site.MOE_DELTA)[0]
    assert any(f"of expert {number};" in told for told in where(comparison, 1, Site.MOE_DELTA))


def test_a_capture_compared_with_itself_and_exchanged_sides_are_noted(
    golden: Path, copyist: Any, judge: Any
) -> None:
    assert any("both sides are the same capture" in note for note in judge(golden).notes)
    exchanged = judge(golden, reference=copyist.device_run())
    assert any("exchange --golden and --run" in note for note in exchanged.notes)


def test_figures_of_a_site_that_is_nan_throughout_are_not_drawn(copyist: Any, judge: Any) -> None:
    comparison = judge(copyist.device_run({(1, Site.MOE_DELTA): lambda tensor: tensor * torch.nan}))

    text = render_comparison(comparison, width=120, is_terminal=False, is_verbose=True)
    (row,) = (line.split() for line in text.splitlines() if line.split()[:2] == ["cause", "moe_delta"])
    assert set(row[2:]) == {"-"}


def test_tokens_that_the_golden_did_not_generate_are_noted(copyist: Any, judge: Any) -> None:
    run = copyist.device_run()
    right = judge(run)
    assert not any(site.where for site in right.sites)
    assert not any("generated no tokens" in note for note in right.notes)
    row = {"prompt_ids": [1, 2], "generated_ids": [3], "text": None, "likeliest": []}
    record = {"rows": [row], "sampling": {"do_sample": False}}
    (run / GENERATION_NAME).write_text(json.dumps(record), encoding="utf-8")
    manifest = Manifest.read(run)
    write_manifest(run, manifest.with_text(GENERATION_NAME, digest_file(run / GENERATION_NAME)))
    assert any("the golden generated no tokens" in note for note in judge(run).notes)
