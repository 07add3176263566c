"""Rows of both sides that may be compared, the stream of the golden, and words for what may not be compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.diagnosis.kept_diagnosis import has_changed
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.pairing import find_mismatch, is_of_shape, refuse_other_runs, select_layers
from compare.sides.sides import Batch, Sides
from minimax_tools.capture.source import DumpListing
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.model.sites import Site
from minimax_tools.provenance import digest_sources

RESIDUAL, DELTA, OUTPUT = Site.ATTN_RESIDUAL, Site.MOE_DELTA, Site.OUTPUT


def filled(value: float, *, width: int = 2) -> torch.Tensor:
    return torch.full((1, 3, width), value, dtype=torch.bfloat16)


@dataclass
class Side:
    """Side of one layer, 5."""

    values: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    twins: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    layers: tuple[int, ...] = ()
    found: DumpListing | None = None
    has_checked_tokens: bool = False
    known_description: Any = None
    directory: Path = Path("side")

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(self.values) if layer == 5 else ()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        return self.values[site]

    def read_twin(self, layer: int, site: Site) -> torch.Tensor | None:
        return self.twins.get(site)

    def listing(self) -> DumpListing | None:
        return self.found

    def refuse_void_certificate(self) -> None:
        """Refuse nothing."""


def sides(golden: Side, port: Side | None = None, *, criteria: str = "noise") -> Sides:
    reference: Any = golden
    target: Any = port or Side()
    return Sides(
        reference=reference,
        target=target,
        batch=Batch(torch.tensor([[1, 1, 0]])),
        criteria=Criteria(name=criteria, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )


class TestRows:
    def test_both_sides_of_real_tokens(self) -> None:
        found = sides(Side({OUTPUT: filled(1.0)}), Side({OUTPUT: filled(2.0)[0]})).read_rows(5, OUTPUT)
        assert found is not None
        assert [rows.tolist() for rows in found] == [[[1.0, 1.0]] * 2, [[2.0, 2.0]] * 2]

        lacking: dict[Site, torch.Tensor] = {}
        one, wider = {OUTPUT: filled(1.0)}, {OUTPUT: filled(1.0, width=3)}
        for golden, port in ((lacking, one), (one, lacking), (one, wider)):
            assert sides(Side(golden), Side(port)).read_rows(5, OUTPUT) is None

    def test_twin_is_more_exact_than_the_golden(self) -> None:
        both = sides(Side({OUTPUT: filled(1.0)}, {OUTPUT: filled(1.5).float()}))
        for rows, value in ((both.read_golden(5, OUTPUT), 1.0), (both.read_exact(5, OUTPUT), 1.5)):
            assert rows is not None
            assert (rows.tolist(), rows.dtype) == ([[value, value]] * 2, torch.float32)
        without = sides(Side({OUTPUT: filled(1.0)}))
        assert torch.equal(without.read_exact(5, OUTPUT), filled(1.0)[0, :2])  # type: ignore[arg-type]
        assert sides(Side()).read_golden(5, OUTPUT) is None

    def test_criteria(self) -> None:
        assert sides(Side(), criteria="classic").is_classic
        assert not sides(Side()).is_classic
        context = sides(Side()).limit_context()
        assert (context.hides_flips, context.backend, context.is_float32) == (False, None, False)
        assert sides(Side()).limit_context(hides_flips=True).hides_flips


class TestStream:
    VALUES: Mapping[Site, torch.Tensor] = {RESIDUAL: filled(1.0), OUTPUT: filled(5.0), DELTA: filled(2.0)}
    TWINS: Mapping[Site, torch.Tensor] = {OUTPUT: filled(6.0).float(), DELTA: filled(2.0).float()}

    def read(self, *lacking: Site, is_exact: bool = False) -> float | None:
        values = {site: value for site, value in self.VALUES.items() if site not in lacking}
        rows = sides(Side(values, self.TWINS)).read_stream(5, is_exact=is_exact)
        return None if rows is None else float(rows[0, 0])

    def test_residual_or_what_the_output_has_beside_the_experts(self) -> None:
        assert (self.read(), self.read(RESIDUAL)) == (1.0, 3.0)
        assert self.read(RESIDUAL, is_exact=True) == 4.0
        assert (self.read(RESIDUAL, OUTPUT), self.read(RESIDUAL, DELTA)) == (None, None)
        assert self.read(OUTPUT) == self.read(DELTA) == 1.0


class TestMismatch:
    @pytest.mark.parametrize(
        ("golden", "port", "reason"),
        [
            ((2, 3, 4), (2, 3, 4), None),
            ((2, 3, 4), (6, 4), None),
            ((6, 4), (2, 3, 4), None),
            ((2, 3, 4), (5, 4), "shape: expected (2, 3, 4), found (5, 4)"),
            ((2, 3, 4), (4, 6), "shape: expected (2, 3, 4), found (4, 6)"),
            ((2, 3, 4, 1), (24, 1), "shape: expected (2, 3, 4, 1), found (24, 1)"),
            ((2, 3, 4), (2, 4, 3), "shape: expected (2, 3, 4), found (2, 4, 3): axes 1 and 2 are exchanged"),
            ((2, 3, 4), (4, 3, 2), "shape: expected (2, 3, 4), found (4, 3, 2): axes 0 and 2 are exchanged"),
            ((2, 3, 4), (2, 4, 4), "shape: expected (2, 3, 4), found (2, 4, 4)"),
            ((2, 3, 4), (2, 4, 5), "shape: expected (2, 3, 4), found (2, 4, 5)"),
            ((2, 3, 4), (4, 2, 3), "shape: expected (2, 3, 4), found (4, 2, 3)"),
        ],
    )
    def test_shapes(self, golden: tuple[int, ...], port: tuple[int, ...], reason: str | None) -> None:
        found = find_mismatch(torch.zeros(golden), torch.zeros(port))
        assert found == reason
        assert found is None or is_of_shape(found)

    def test_numbers_and_floats(self) -> None:
        found = find_mismatch(torch.zeros(2, dtype=torch.int64), torch.zeros(2))
        assert found == "dtype: expected torch.int64, found torch.float32"
        assert not is_of_shape(found)
        assert find_mismatch(torch.zeros(2).bfloat16(), torch.zeros(2)) is None


class TestLayers:
    @staticmethod
    def select(golden: Side, port: Side, pattern: str = "layer_*") -> tuple[int, ...]:
        both = sides(golden, port)
        return select_layers(both.reference, both.target, pattern)

    def test_layers_that_match_and_both_sides_have(self) -> None:
        assert self.select(Side(layers=(1, 2, 3)), Side(layers=(2, 3))) == (2, 3)
        assert self.select(Side(layers=(1, 2)), Side(layers=(2, 3)), "layer_2") == (2,)
        twelve = Side(layers=tuple(range(12)))
        for pattern, layers in (("layer_1*", (1, 10, 11)), ("layer_?", tuple(range(10))), ("layer_1", (1,))):
            assert self.select(twelve, twelve, pattern) == layers

    def test_layers_that_a_side_lacks_are_named(self) -> None:
        for layers, words in (
            ((0, 1), "layer_0, layer_1"),
            ((0, 1, 2, 3), "layer_0, layer_1, layer_2, layer_3"),
            ((0, 1, 2, 3, 9), "layer_0, layer_1, layer_2, layer_3 … layer_9"),
            ((), "no layer"),
        ):
            with pytest.raises(UsageError, match="the run has") as error:
                self.select(Side(layers=(0,)), Side(layers=layers), "layer_77")
            assert f"the run has {words}" in str(error.value).replace("\n", " ")
        words = "the golden side holds no layer_3, layer_4: found layer_2"
        with pytest.raises(IncomparableError, match=words):
            self.select(Side(layers=(2,)), Side(layers=(2, 3, 4)))

    @pytest.mark.parametrize("num_modules", [0, 12, 13])
    def test_dump_without_layers_names_its_modules(self, num_modules: int) -> None:
        names = tuple(f"m{index}" for index in range(num_modules))
        listing: Any = SimpleNamespace(unmapped=names)
        with pytest.raises(IncomparableError, match="no site of a layer was found in side") as error:
            self.select(Side(layers=(1,)), Side(found=listing))
        assert ("m11" in str(error.value), " …" in str(error.value)) == (num_modules > 11, num_modules > 12)
        assert ("no module" in str(error.value)) is (num_modules == 0)


def test_what_a_dump_does_not_record_is_noted() -> None:
    for golden, port, words in (
        (False, False, "model and tokens"),
        (True, False, "model"),
        (False, True, "model"),
    ):
        both = sides(Side(has_checked_tokens=golden), Side(has_checked_tokens=port))
        (note,) = refuse_other_runs(both.reference, both.target)
        assert note == f"one side does not record its {words}: that they agree was not checked"
    described = Side(known_description=SimpleNamespace())
    for both in (sides(described, Side()), sides(Side(), described)):
        assert len(refuse_other_runs(both.reference, both.target)) == 1


class TestPortSource:
    @staticmethod
    def run(folder: Path, *, target: str, digest: str | None) -> Any:
        manifest = folder / MANIFEST_NAME
        manifest.write_text("{}")
        os.utime(manifest, (1000, 1000))
        provenance = SimpleNamespace(target=target, target_digest=digest)
        return SimpleNamespace(known_description=SimpleNamespace(provenance=provenance), directory=folder)

    def test_newer_file_of_another_digest_has_changed(self, tmp_path: Path) -> None:
        file = tmp_path / "port.py"
        file.write_text("class Layer: ...\n")
        same = digest_sources({"port.py": file})
        for time, digest, is_changed in (
            (1001, "0" * 64, True),
            (1000, "0" * 64, False),
            (1001, same, False),
        ):
            os.utime(file, (time, time))
            assert has_changed(self.run(tmp_path, target=f"{file}:Layer", digest=digest)) is is_changed

    def test_nothing_is_told_without_a_digest_or_a_python_file(self, tmp_path: Path) -> None:
        for name in ("port.py", "port.txt"):
            (tmp_path / name).write_text("")
        file = tmp_path / "port.py"
        assert has_changed(self.run(tmp_path, target=f"{file}:Layer", digest="0" * 64))
        assert not has_changed(self.run(tmp_path, target=f"{file}:Layer", digest=None))
        lost = (f"{tmp_path}/port.txt:Layer", f"{tmp_path}/lost.py:Layer", "package.module:Layer", "test")
        for target in lost:
            assert not has_changed(self.run(tmp_path, target=target, digest="0" * 64))
        unknown: Any = SimpleNamespace(known_description=None)
        assert not has_changed(unknown)
