"""Rows of both sides that may be compared, the inputs of their layers, and words for what may not be compared."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.diagnosis.kept_diagnosis import has_changed
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.captured_input import CapturedInput, read_captured_input
from compare.sides.pairing import find_mismatch, is_of_shape, refuse_other_runs, select_layers
from compare.sides.sides import Batch, Sides, spread_evenly
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import IncomparableError, UsageError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.provenance import digest_sources

RESIDUAL, DELTA, OUTPUT = Site.ATTN_RESIDUAL, Site.MOE_DELTA, Site.OUTPUT


def filled(value: float, *, width: int = 2) -> torch.Tensor:
    return torch.full((1, 3, width), value, dtype=torch.bfloat16)


class Side(CaptureSource):
    """Side of some layers; the values of a site alone are those of layer 5."""

    directory = Path("side")
    layers = ()  # type: ignore[assignment]
    known_description = None  # type: ignore[assignment]

    def __init__(self, values: Any = (), twins: Any = (), **said: Any) -> None:
        keyed = dict(values).items()
        self._values = {(5, key) if isinstance(key, Site) else key: value for key, value in keyed}
        self._twins = dict(twins)
        for name, value in said.items():
            setattr(self, name, value)

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(key[1] for key in self._values if isinstance(key, tuple) and key[0] == layer)

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(key for key in self._values if isinstance(key, ModelSite))

    def read(self, layer: int | None, site: Any) -> torch.Tensor:
        values: torch.Tensor = self._values[site if layer is None else (layer, site)]
        return values

    def read_twin(self, layer: int | None, site: Any) -> torch.Tensor | None:
        return self._twins.get(site)

    def read_attention_mask(self) -> torch.Tensor | None:
        return None


def sides(golden: Side, port: Side | None = None, *, criteria: str = "noise") -> Sides:
    return Sides(
        reference=golden,
        target=port or Side(),
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
            self.select(Side(layers=(1,)), Side(listing=lambda: listing))
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


MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
PLACES = [[0, 0], [0, 1], [0, 2], [1, 0]]


def masked(mask: torch.Tensor | None) -> Any:
    kept = None if mask is None else mask.bool()
    return SimpleNamespace(read_attention_mask=lambda: mask, read_kept_mask=lambda: kept)


class TestBatch:
    VALUES = torch.arange(12.0).reshape(2, 3, 2)
    ROWS = torch.tensor([[0.0, 1.0], [2.0, 3.0], [4.0, 5.0], [6.0, 7.0]])

    def test_real_tokens_of_either_layout_and_of_all_sites(self) -> None:
        batch = Batch(MASK)
        for values in (self.VALUES, self.VALUES.flatten(0, 1)):
            assert torch.equal(batch.rows(values, Site.OUTPUT), self.ROWS)
            assert batch.places(values, Site.OUTPUT).tolist() == PLACES
        assert torch.equal(batch.rows(self.VALUES, ModelSite.LOGITS), self.ROWS)

    def test_all_tokens_are_real_without_a_mask(self) -> None:
        batch, flat = Batch(None), self.VALUES.flatten(0, 1)
        places = [[0, 0], [0, 1], [0, 2], [1, 0], [1, 1], [1, 2]]
        for values, expected in ((self.VALUES, places), (flat, [[0, token] for token in range(6)])):
            assert torch.equal(batch.rows(values, Site.OUTPUT), flat)
            assert batch.places(values, Site.OUTPUT).tolist() == expected

    def test_nothing_is_copied_if_all_tokens_are_real(self) -> None:
        rows = Batch(torch.ones(2, 3)).rows(self.VALUES, Site.OUTPUT)
        assert torch.equal(rows, self.VALUES.flatten(0, 1))
        assert rows.data_ptr() == self.VALUES.data_ptr()

    def test_heads_lie_side_by_side(self) -> None:
        heads = torch.arange(24.0).reshape(2, 2, 3, 2)
        rows = Batch(MASK).rows(heads, Site.Q_ROPE)
        assert rows.shape == (4, 4)
        assert rows[3].tolist() == [*heads[1, 0, 0].tolist(), *heads[1, 1, 0].tolist()]

    @pytest.mark.parametrize("shape", [(2, 4, 2), (5, 2), (3, 2, 2)])
    def test_tensor_of_another_batch_is_refused(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(IncomparableError, match=r"different batches: expected \[B,S\] of \(2, 3\)"):
            Batch(MASK).rows(torch.zeros(shape), Site.OUTPUT)


class TestMask:
    def test_of_either_side_or_of_both(self) -> None:
        for golden, port in ((MASK, None), (None, MASK), (MASK, MASK.bool())):
            assert Batch.of(masked(golden), masked(port)).tokens(torch.zeros(2, 3)).shape == (4,)
        assert Batch.of(masked(None), masked(None)).tokens(torch.zeros(2, 3)).shape == (6,)

    def test_other_mask_and_one_of_padding_alone_are_refused(self) -> None:
        sentence = r"attention_mask differs: expected rows of 3, 1 tokens \(golden\), found 3, 3"
        with pytest.raises(IncomparableError, match=sentence):
            Batch.of(masked(MASK), masked(torch.ones_like(MASK)))
        with pytest.raises(IncomparableError, match="no token is real"):
            Batch(torch.zeros_like(MASK))


@pytest.mark.parametrize(
    ("num_tokens", "most", "indices"),
    [(10, 4, [0, 3, 6, 9]), (3, 4, [0, 1, 2]), (9, 1, [0]), (5, 2, [0, 4]), (1, 1, [0])],
)
def test_few_tokens_are_evenly_spread(num_tokens: int, most: int, indices: list[int]) -> None:
    spread = spread_evenly(num_tokens, most)
    assert (spread.tolist(), spread.dtype) == (indices, torch.int64)


NUM_TOKENS, WIDTH = 6, 8
GOLDEN = torch.randn(1, NUM_TOKENS, WIDTH, generator=torch.Generator().manual_seed(0))


def read_input(
    port: torch.Tensor | None,
    *,
    layer: int = 1,
    golden: torch.Tensor | None = GOLDEN,
    before: torch.Tensor | None = None,
    embedding: torch.Tensor | None = None,
    may_omit_inputs: bool = True,
) -> CapturedInput:
    """Read the input of a layer of a dump, with the output of the layer before and the embedding, if it has them."""
    values: dict[Any, torch.Tensor] = {} if port is None else {(layer, Site.INPUT): port}
    if before is not None:
        values[layer - 1, Site.OUTPUT] = before
    if embedding is not None:
        values[ModelSite.EMBEDDING] = embedding
    sides = Sides(
        reference=Side({} if golden is None else {(layer, Site.INPUT): golden}),
        target=Side(values, may_omit_inputs=may_omit_inputs),
        batch=Batch(None),
        criteria=Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL),
    )
    return read_captured_input(sides, layer)


def off(share: float) -> torch.Tensor:
    """The golden's values, off by a share of them."""
    return GOLDEN * (1.0 + share)


def test_goldens_own_input_is_known() -> None:
    for port in (GOLDEN.clone(), GOLDEN.bfloat16(), GOLDEN[0]):
        found = read_input(port)
        assert (found.known, found.error) == ((Site.INPUT,), None)
        assert (found.is_inherited, found.is_recorded) == (False, True)


def test_nan_equals_nan_and_nothing_else() -> None:
    golden = GOLDEN.clone()
    golden[0, 0, 0] = torch.nan
    assert not read_input(golden.clone(), golden=golden).is_inherited
    for port, other in ((GOLDEN, golden), (golden, GOLDEN)):
        with pytest.raises(IncomparableError, match="layer 1 got other hidden states"):
            read_input(port, golden=other, before=off(0.1))


def test_output_of_the_layer_before_is_inherited() -> None:
    found = read_input(off(3.0), before=off(3.0))
    assert found.is_inherited
    assert found.error is not None
    assert found.error.overall == pytest.approx(3.0)
    assert (found.known, found.is_recorded) == ((Site.INPUT,), True)
    # It may hold NaN.
    port = off(3.0)
    port[0, 1] = torch.nan
    assert read_input(port, before=port.clone()).is_inherited


def test_other_values_than_the_output_before_are_refused() -> None:
    for before in (off(0.2), off(0.1)[:, :, :4], off(0.1)[0]):
        with pytest.raises(IncomparableError, match=r"golden's own, bit for bit, found what side holds"):
            read_input(off(0.1), before=before)


def test_embedding_is_the_output_before_the_first_layer() -> None:
    assert read_input(off(3.0), layer=0, embedding=off(3.0)).is_inherited
    for layer, embedding in ((0, off(0.2)), (0, None), (1, off(3.0))):
        with pytest.raises(IncomparableError, match=f"layer {layer} got other hidden states"):
            read_input(off(3.0), layer=layer, embedding=embedding)


def test_input_near_the_goldens_may_come_from_layers_that_a_dump_lacks() -> None:
    assert read_input(off(0.49)).is_inherited
    # No layer is before the first one.
    for share, layer, may_omit in ((0.51, 1, True), (0.49, 0, True), (0.49, 1, False)):
        with pytest.raises(IncomparableError, match="other hidden states"):
            read_input(off(share), layer=layer, may_omit_inputs=may_omit)


def test_input_that_either_side_lacks_is_not_known() -> None:
    for port, golden in ((None, GOLDEN), (GOLDEN, None), (GOLDEN[:, :, :4], GOLDEN)):
        found = read_input(port, golden=golden)
        assert (found.known, found.error, found.is_recorded, found.is_inherited) == ((), None, False, False)
