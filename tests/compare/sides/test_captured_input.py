"""A layer's input: the golden's, another layer's output, or not known; in mm2's captures and in other dumps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.captured_input import CapturedInput, read_captured_input
from compare.sides.sides import Batch, Sides
from minimax_tools.errors import IncomparableError
from minimax_tools.model.sites import ModelSite, Site

NUM_TOKENS, WIDTH = 6, 8
GOLDEN = torch.randn(1, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


@dataclass
class Dump:
    """A capture of another tool, which does not say what it ran."""

    values: Mapping[tuple[int, Site], torch.Tensor]
    model_values: Mapping[ModelSite, torch.Tensor] = field(default_factory=dict)
    may_omit_inputs: bool = True
    known_description: Any = None
    directory: Path = Path("dump")

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(site for number, site in self.values if number == layer)

    def read(self, layer: int | None, site: Any) -> torch.Tensor:
        return self.model_values[site] if layer is None else self.values[layer, site]

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(self.model_values)


def read(
    port: torch.Tensor | None,
    *,
    layer: int = 1,
    golden: torch.Tensor | None = GOLDEN,
    before: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    may_omit_inputs: bool = True,
) -> CapturedInput:
    """Read the input of a layer of a dump, with the output of the layer before and the embedding, if it has them."""
    values = {} if port is None else {(layer, Site.INPUT): port}
    if before is not None:
        values[layer - 1, Site.OUTPUT] = before
    target: Any = Dump(
        values,
        model_values={} if embedding is None else {ModelSite.EMBEDDING: embedding},
        may_omit_inputs=may_omit_inputs,
    )
    reference: Any = Dump({} if golden is None else {(layer, Site.INPUT): golden})
    sides = Sides(
        reference=reference,
        target=target,
        batch=Batch(None),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )
    return read_captured_input(sides, layer)


def off(share: float) -> torch.Tensor:
    """The golden's values, off by a share of them."""
    return GOLDEN * (1.0 + share)


def test_goldens_own_input_is_known() -> None:
    for port in (GOLDEN.clone(), GOLDEN.bfloat16(), GOLDEN[0]):
        found = read(port)
        assert (found.known, found.error) == ((Site.INPUT,), None)
        assert (found.is_inherited, found.is_recorded) == (False, True)


def test_nan_equals_nan_and_nothing_else() -> None:
    golden = GOLDEN.clone()
    golden[0, 0, 0] = torch.nan
    assert not read(golden.clone(), golden=golden).is_inherited
    for port, other in ((GOLDEN, golden), (golden, GOLDEN)):
        with pytest.raises(IncomparableError, match="layer 1 got other hidden states"):
            read(port, golden=other, before=off(0.1))


def test_output_of_the_layer_before_is_inherited() -> None:
    found = read(off(3.0), before=off(3.0))
    assert found.is_inherited
    assert found.error is not None
    assert found.error.overall == pytest.approx(3.0)
    assert (found.known, found.is_recorded) == ((Site.INPUT,), True)
    # It may hold NaN.
    port = off(3.0)
    port[0, 1] = torch.nan
    assert read(port, before=port.clone()).is_inherited


def test_other_values_than_the_output_before_are_refused() -> None:
    for before in (off(0.2), off(0.1)[:, :, :4], off(0.1)[0]):
        with pytest.raises(IncomparableError, match=r"golden's own, bit for bit, found what dump holds"):
            read(off(0.1), before=before)


def test_embedding_is_the_output_before_the_first_layer() -> None:
    assert read(off(3.0), layer=0, embedding=off(3.0)).is_inherited
    for layer, embedding in ((0, off(0.2)), (0, None), (1, off(3.0))):
        with pytest.raises(IncomparableError, match=f"layer {layer} got other hidden states"):
            read(off(3.0), layer=layer, embedding=embedding)


def test_input_near_the_goldens_may_come_from_layers_that_a_dump_lacks() -> None:
    assert read(off(0.49)).is_inherited
    # No layer is before the first one.
    for share, layer, may_omit in ((0.51, 1, True), (0.49, 0, True), (0.49, 1, False)):
        with pytest.raises(IncomparableError, match="other hidden states"):
            read(off(share), layer=layer, may_omit_inputs=may_omit)


def test_input_that_either_side_lacks_is_not_known() -> None:
    for port, golden in ((None, GOLDEN), (GOLDEN, None), (GOLDEN[:, :, :4], GOLDEN)):
        found = read(port, golden=golden)
        assert (found.known, found.error, found.is_recorded, found.is_inherited) == ((), None, False, False)
