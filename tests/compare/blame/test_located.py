"""Location of the error of a blamed site: by experts, decoded tokens, positions and heads, of either side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.blame.location import locate_blamed
from compare.blame.recompute import Recomputed
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.noise.rho import token_ratios
from compare.noise.rows import Rows
from compare.sides.sides import Batch, Sides
from minimax_tools.model.sites import Site
from minimax_tools.results.results import Blame, SiteResult, SiteStatus

ROWS, LENGTH, NUM_EXPERTS, LAYER = 3, 40, 16, 5
PLACES = torch.ones(ROWS, LENGTH).nonzero()
EXPERTS = torch.stack(
    [torch.randperm(NUM_EXPERTS, generator=torch.Generator().manual_seed(token))[:4] for token in range(120)]
).unflatten(0, (ROWS, LENGTH))
OF_11 = (EXPERTS == 11).any(dim=-1).flatten()
NAMED = f"wrong tokens: all {int(OF_11.sum())} of expert 11; the {int((~OF_11).sum())} others are right"


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


class TestExperts:
    @pytest.mark.parametrize("site", [Site.MOE_DELTA, Site.OUTPUT])
    @pytest.mark.parametrize("experts", [EXPERTS, EXPERTS.flatten(0, 1), EXPERTS.int()])
    def test_ports_experts_count_in_any_layout(self, site: Site, experts: torch.Tensor) -> None:
        golden = Side({**CHOSEN, Site.ROUTER_EXPERTS: OTHER_EXPERTS})
        assert NAMED in locate(
            rows(OF_11), site=site, golden=golden, port=Side({Site.ROUTER_EXPERTS: experts})
        )
        assert NAMED not in locate(rows(OF_11), site=site, golden=golden)

    def test_goldens_experts_count_where_the_port_shows_none_or_none_that_exist(self) -> None:
        assert NAMED in locate(rows(OF_11), golden=Side(CHOSEN))
        for wrong in (-1, NUM_EXPERTS):
            experts = OTHER_EXPERTS.clone()
            experts[2, 3, 1] = wrong
            port = Side({Site.ROUTER_EXPERTS: experts})
            assert NAMED in locate(rows(OF_11), golden=Side(CHOSEN), port=port)

    def test_batch_without_a_mask_is_one_row(self) -> None:
        flat = {site: value.flatten(0, 1) for site, value in CHOSEN.items()}
        places = torch.stack((torch.zeros(120), torch.arange(120)), dim=1).long()
        found = replace(rows(OF_11), places=places)
        assert NAMED in locate(found, golden=Side(flat, mask=None, is_own=False), port=Side(is_own=False))

    @pytest.mark.parametrize("lacking", [*CHOSEN])
    def test_none_are_told_if_the_golden_lacks_them_or_their_number(self, lacking: Site) -> None:
        golden = Side({site: value for site, value in CHOSEN.items() if site is not lacking})
        assert NAMED not in locate(rows(OF_11), golden=golden, port=Side({Site.ROUTER_EXPERTS: EXPERTS}))

    def test_sites_before_the_experts_are_not_of_experts(self) -> None:
        assert NAMED not in locate(rows(OF_11), site=Site.ATTN_DELTA, golden=Side(CHOSEN))


class TestTokens:
    def test_decoded_tokens_are_told(self) -> None:
        # The last seven columns, whose tokens are scattered over three rows.
        decoded = PLACES[:, 1] >= 33
        (sentence,) = locate(rows(decoded), port=Side(num_decoded=7))
        assert sentence.startswith("wrong tokens: all 21 decoded one at a time")
        for port in (Side(), Side(is_own=False, num_decoded=7)):
            assert locate(rows(decoded), port=port)[0].startswith("wrong tokens: all 21 at tokens from 33 on")

    def test_positions_are_told_where_they_are_not_the_places(self) -> None:
        positions = torch.arange(LENGTH).repeat(ROWS, 1)
        positions[1] += 1000
        late = PLACES[:, 0] == 1
        golden = Side(positions=positions)
        (sentence,) = locate(rows(late | (PLACES[:, 1] >= 30)), golden=golden)
        assert "at positions from 30 on" in sentence
        (sentence,) = locate(rows(PLACES[:, 1] >= 30))
        assert "at tokens from 30 on" in sentence
        dump = Side(positions=positions, is_own=False)
        assert not any("position" in told for told in locate(rows(late), golden=dump))


class TestChannels:
    @pytest.mark.parametrize(
        ("site", "words"),
        [
            (Site.Q_PROJ, "of head 1"),
            (Site.ATTN_CONTEXT, "of head 1"),
            (Site.ATTN_DELTA, "from channels 16 to 31"),
            (Site.ROUTER_LOGITS, "from experts 16 to 31"),
        ],
    )
    @pytest.mark.parametrize("shows", [Site.K_ROPE, Site.Q_ROPE])
    def test_heads_channels_and_experts(self, site: Site, words: str, shows: Site) -> None:
        everywhere = torch.ones(ROWS * LENGTH, dtype=torch.bool)
        golden = Side({shows: torch.zeros(ROWS, 2, LENGTH, 16)})
        told = locate(rows(everywhere, slice(16, 32)), site=site, golden=golden)
        assert any(words in sentence for sentence in told), told

    def test_heads_without_a_site_that_tells_their_size_are_channels(self) -> None:
        everywhere = torch.ones(ROWS * LENGTH, dtype=torch.bool)
        told = locate(rows(everywhere, slice(16, 32)), site=Site.Q_PROJ)
        assert any("from channels 16 to 31" in sentence for sentence in told)


def test_nothing_is_located_without_rows_a_floor_or_limits_on_tokens() -> None:
    wrong = PLACES[:, 1] >= 30
    assert locate(rows(wrong))
    assert locate(None) == ()
    assert locate(rows(wrong, has_twin=False)) == ()
    assert locate(rows(wrong).select(torch.zeros(120, dtype=torch.bool))) == ()
    assert locate(rows(wrong), criteria="classic") == ()
    assert locate(rows(wrong), layer=None) == ()
