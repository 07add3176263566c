"""Weights that a golden computed with: found, refused if they are another model's, and kept open while needed."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from compare.sides.golden_weights import (
    CheckpointWeights,
    find_weights,
    keep_layer_open,
    refuse_other_model,
)
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, IncomparableError
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import FINAL_NORM, head_name
from minimax_tools.provenance import ModelFingerprint

LAYER_NORM = "model.layers.{}.input_layernorm.weight"


def fingerprint(toy: Path, *layers: int, spec_digest: str | None = None) -> ModelFingerprint:
    spec = ModelSpec.from_folder(toy)
    with CheckpointReader(toy) as reader:
        found = fingerprint_model(reader, spec, layers)
    return found if spec_digest is None else replace(found, spec_digest=spec_digest)


def capture(
    toy: Path,
    *,
    source: str | None = None,
    dtype: str = "bfloat16",
    spec_digest: str | None = None,
    layers: tuple[int, ...] = (0, 1, 2, 3),
) -> Any:
    """A capture that was made from the toy, as it says."""
    provenance = SimpleNamespace(
        model=fingerprint(toy, 0, 3, spec_digest=spec_digest),
        model_source=str(toy) if source is None else source,
        dtypes={"weights": dtype},
    )
    description = SimpleNamespace(provenance=provenance)
    return SimpleNamespace(known_description=description, directory=Path("golden"), layers=layers)


def dump() -> Any:
    """A capture that does not say what it was made from."""
    return SimpleNamespace(known_description=None, directory=Path("dump"), layers=())


class TestFinding:
    def test_checkpoint_of_either_side(self, toy: Path) -> None:
        gone = capture(toy, source="/not/here")
        for sides in ((capture(toy), dump()), (dump(), capture(toy)), (gone, capture(toy))):
            assert find_weights(None, *sides) == CheckpointWeights(model=str(toy))
        for sides in ((dump(), dump()), (gone, gone), (gone, dump())):
            assert find_weights(None, *sides) is None

    def test_checkpoint_that_is_no_longer_the_goldens_is_not_taken(self, toy: Path, tmp_path: Path) -> None:
        assert find_weights(None, capture(toy, spec_digest="0" * 64), capture(toy)) is None
        (tmp_path / "config.json").write_text((toy / "config.json").read_text())
        lost = capture(toy, source=str(tmp_path))
        assert find_weights(None, lost, dump()) is None
        assert find_weights(None, lost, capture(toy)) == CheckpointWeights(model=str(toy))

    def test_first_layer_of_the_run_tells_the_checkpoint(self, toy: Path) -> None:
        # The golden knows the values of the layers 0 and 3.
        golden = capture(toy)
        model = golden.known_description.provenance.model
        golden.known_description.provenance.model = replace(model, layers={**model.layers, 3: "0" * 64})
        assert find_weights(None, golden, capture(toy, layers=(3,))) is None
        assert find_weights(None, golden, capture(toy, layers=(0, 3))) is not None
        assert find_weights(None, golden, capture(toy, layers=())) is not None

    def test_named_folder_holds_a_model_and_no_hub_is_asked_yet(self, toy: Path, tmp_path: Path) -> None:
        for model in (str(toy), "nobody/no-such-model"):
            assert find_weights(model, dump(), dump()) == CheckpointWeights(model=model)
        with pytest.raises(CheckpointError):
            find_weights(str(tmp_path), capture(toy), dump())


class TestRefusal:
    def test_other_model_is_named_and_its_layers_and_head_are_refused(self, toy: Path) -> None:
        golden = capture(toy, spec_digest="0" * 64)
        sentence = rf"the golden golden is not of the checkpoint here: found config\.json differs .*{toy}"
        with pytest.raises(IncomparableError, match=sentence):
            refuse_other_model(golden, fingerprint(toy, 0), "here")
        weights = CheckpointWeights(model=str(toy))
        with pytest.raises(IncomparableError), weights.open_layer(0, golden):
            pass
        with pytest.raises(IncomparableError), weights.open_head(golden):
            pass
        # The same model and unknown ones pass.
        refuse_other_model(capture(toy), fingerprint(toy, 0), "here")
        refuse_other_model(dump(), fingerprint(toy, 0, spec_digest="0" * 64), "here")

    def test_head_is_told_by_the_last_layer(self, toy: Path) -> None:
        weights, golden = CheckpointWeights(model=str(toy)), capture(toy)
        model = golden.known_description.provenance.model
        # The golden knows the values of the layers 0 and 3.
        golden.known_description.provenance.model = replace(model, layers={**model.layers, 0: "0" * 64})
        with weights.open_head(golden):
            pass
        golden.known_description.provenance.model = replace(model, layers={**model.layers, 3: "0" * 64})
        with pytest.raises(IncomparableError, match="layer 3"), weights.open_head(golden):
            pass


class TestReading:
    @pytest.mark.parametrize(
        ("name", "dtype"), [("bfloat16", torch.bfloat16), ("float32", torch.float32), (None, torch.bfloat16)]
    )
    def test_weights_are_in_the_goldens_dtype(self, toy: Path, name: str | None, dtype: torch.dtype) -> None:
        golden = dump() if name is None else capture(toy, dtype=name)
        weights = CheckpointWeights(model=str(toy))
        spec = weights.read_spec()
        assert spec == ModelSpec.from_folder(toy)
        with CheckpointReader(toy) as reader:
            norm, head = (reader.read_weight(key, dtype) for key in (FINAL_NORM, head_name(spec)))
            of_layer = reader.read_weight(LAYER_NORM.format(2), dtype)
        with weights.open_head(golden) as found:
            assert (found.spec, found.norm.dtype, found.lm_head.dtype) == (spec, dtype, dtype)
            assert torch.equal(found.norm, norm)
            assert torch.equal(found.lm_head, head)
        with weights.open_layer(2, golden) as layer:
            assert layer.spec == spec
            assert torch.equal(layer.tensors["input_layernorm.weight"], of_layer)
            assert layer.tensors["input_layernorm.weight"].dtype == dtype

    def test_config_is_read_once(self, toy: Path, tmp_path: Path) -> None:
        shutil.copy(toy / "config.json", tmp_path)
        weights = CheckpointWeights(model=str(tmp_path))
        spec = weights.read_spec()
        (tmp_path / "config.json").unlink()
        assert weights.read_spec() is spec

    def test_headers_of_a_whole_checkpoint_are_read_once(self, toy: Path, tmp_path: Path) -> None:
        folder = tmp_path / "toy"
        shutil.copytree(toy, folder)
        weights = CheckpointWeights(model=str(folder))
        with weights.open_layer(0, dump()):
            pass
        (folder / "model.safetensors.index.json").write_text("{}")
        with weights.open_layer(1, dump()) as layer:
            assert layer.tensors["input_layernorm.weight"].numel() > 0


class Source:
    """A source of weights that notes what is opened and closed."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    @contextmanager
    def open_layer(self, layer: int, reference: Any) -> Iterator[Any]:
        name = f"{layer} of {reference.directory}"
        self.notes.append(f"open {name}")
        yield name
        self.notes.append(f"close {name}")

    @contextmanager
    def open_head(self, reference: Any) -> Iterator[Any]:
        yield f"head of {reference.directory}"


class TestKeepingOpen:
    def test_layer_stays_open_until_another_is_asked_for(self) -> None:
        source: Any = Source()
        one, other = dump(), SimpleNamespace(directory=Path("other"))
        with keep_layer_open(source) as kept:
            assert kept is not None
            for layer, reference in ((2, one), (2, one), (3, one), (3, other)):
                with kept.open_layer(layer, reference) as weights:
                    assert weights == f"{layer} of {reference.directory}"  # type: ignore[comparison-overlap]
            closed = ["open 2 of dump", "close 2 of dump", "open 3 of dump", "close 3 of dump"]
            assert source.notes == [*closed, "open 3 of other"]
            with kept.open_head(one) as head:
                assert head == "head of dump"  # type: ignore[comparison-overlap]
        assert source.notes[-1] == "close 3 of other"

    def test_no_source_stays_none(self) -> None:
        with keep_layer_open(None) as kept:
            assert kept is None
