from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError
from minimax_tools.json_codec import DecodeError, decode, encode
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    CORRECTION_BIAS,
    EMBEDDING,
    GATE,
    INPUT_NORM,
    K_NORM,
    POST_NORM,
    Q_NORM,
    Q_PROJ,
    layer_prefix,
)
from minimax_tools.provenance import ModelFingerprint

Tensors = dict[str, torch.Tensor]
Take = Callable[..., ModelFingerprint]


@pytest.fixture
def take(spec: ModelSpec, write: Callable[..., Path]) -> Take:
    def take_fingerprint(tensors: Tensors, name: str, span: Span | None = None) -> ModelFingerprint:
        with CheckpointReader(write(tensors, name)) as reader:
            return fingerprint_model(reader, spec, span or Span(0, 2))

    return take_fingerprint


def test_copies_of_other_dtypes_agree(fp8_tensors: Tensors, bf16_tensors: Tensors, take: Take) -> None:
    fp8 = take(fp8_tensors, "fp8")
    assert take(bf16_tensors, "bf16") == fp8
    name = layer_prefix(0) + INPUT_NORM
    fp8_tensors[name] = fp8_tensors[name].to(torch.float32)
    # Weights of experts and attention are not read.
    projection = layer_prefix(0) + Q_PROJ
    fp8_tensors[projection] = torch.zeros_like(fp8_tensors[projection])
    assert take(fp8_tensors, "with a norm in float32") == fp8
    assert fp8.differences(take(fp8_tensors, "again")) == []


@pytest.mark.parametrize("name", [INPUT_NORM, POST_NORM, Q_NORM, K_NORM, GATE, CORRECTION_BIAS])
def test_another_value_in_one_layer_names_that_layer(name: str, fp8_tensors: Tensors, take: Take) -> None:
    before = take(fp8_tensors, "before")
    fp8_tensors[layer_prefix(1) + name].view(-1)[-1] += 1
    (sentence,) = before.differences(take(fp8_tensors, "after"))
    assert sentence.startswith("layer 1 has other norms, router gate or bias (sha256 ")


def test_swapped_norms_are_another_model(fp8_tensors: Tensors, take: Take) -> None:
    before = take(fp8_tensors, "before")
    first, second = layer_prefix(0) + INPUT_NORM, layer_prefix(0) + POST_NORM
    fp8_tensors[first], fp8_tensors[second] = fp8_tensors[second], fp8_tensors[first]
    assert len(before.differences(take(fp8_tensors, "after"))) == 1


def test_layers_are_compared_where_both_have_them(fp8_tensors: Tensors, take: Take) -> None:
    both = take(fp8_tensors, "both")
    fp8_tensors[layer_prefix(0) + GATE] += 1
    assert both.differences(take(fp8_tensors, "second", Span.single(1))) == []
    assert len(both.differences(take(fp8_tensors, "first", Span.single(0)))) == 1


def test_another_config_and_other_tensors_are_named(
    fp8_tensors: Tensors, take: Take, spec: ModelSpec
) -> None:
    before = take(fp8_tensors, "before")
    fp8_tensors["model.extra"] = torch.ones(1)
    other_spec = dataclasses.replace(spec, rope_theta=1e4)
    after = dataclasses.replace(take(fp8_tensors, "after"), spec_digest=other_spec.digest())
    config, tensors = before.differences(after)
    assert config.startswith("config.json differs")
    assert tensors.startswith("tensor names or shapes outside the layers differ")


def test_another_shape_in_one_layer_names_that_layer(fp8_tensors: Tensors, take: Take) -> None:
    before = take(fp8_tensors, "before")
    name = layer_prefix(1) + Q_PROJ
    fp8_tensors[name] = fp8_tensors[name][:-1].contiguous()
    (sentence,) = before.differences(take(fp8_tensors, "after"))
    assert sentence.startswith("layer 1 has other tensor names or shapes (sha256 ")


def test_a_folder_with_one_layer_agrees_with_the_whole_model_and_no_other(
    fp8_tensors: Tensors, take: Take, spec: ModelSpec, tmp_path: Path
) -> None:
    whole = take(fp8_tensors, "whole")
    part = _take_part(fp8_tensors, spec, tmp_path / "part")
    assert set(part.layers) == set(part.layer_tensors) == {0}
    assert whole.differences(part) == part.differences(whole) == []
    fp8_tensors[layer_prefix(0) + GATE] += 1
    other = _take_part(fp8_tensors, spec, tmp_path / "other")
    assert len(whole.differences(other)) == 1
    deeper = dataclasses.replace(spec, num_hidden_layers=3)
    assert len(whole.differences(dataclasses.replace(part, spec_digest=deeper.digest()))) == 1


def test_a_folder_without_the_tensors_outside_layers_is_compared_by_its_layers(
    fp8_tensors: Tensors, take: Take, spec: ModelSpec, tmp_path: Path
) -> None:
    whole = take(fp8_tensors, "whole")
    part = _take_part(fp8_tensors, spec, tmp_path / "part", has_embedding=False)
    assert part.tensors_digest is None
    assert whole.differences(part) == part.differences(whole) == []
    # Fetching more layers leaves a run's fingerprint as it is.
    assert take(fp8_tensors, "one", Span.single(0)) == _take_part(fp8_tensors, spec, tmp_path / "fetched")


def _take_part(
    tensors: Tensors, spec: ModelSpec, folder: Path, *, has_embedding: bool = True
) -> ModelFingerprint:
    """The fingerprint of a folder that lacks the shard of layer 1."""
    folder.mkdir()
    here = {name for name in tensors if not name.startswith(layer_prefix(1))}
    here -= set() if has_embedding else {EMBEDDING}
    save_file({name: tensors[name] for name in here}, folder / "here.safetensors")
    weight_map = {name: f"{'here' if name in here else 'absent'}.safetensors" for name in tensors}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with CheckpointReader(folder, layers=range(1)) as reader:
        return fingerprint_model(reader, spec, Span.single(0))


@pytest.mark.parametrize("has_embedding", [True, False])
def test_json_keeps_everything(
    has_embedding: bool, fp8_tensors: Tensors, spec: ModelSpec, tmp_path: Path
) -> None:
    fingerprint = _take_part(fp8_tensors, spec, tmp_path / "part", has_embedding=has_embedding)
    assert decode(ModelFingerprint, json.loads(json.dumps(encode(fingerprint)))) == fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"layers": None},
        {"layers": {"first": "a"}},
        {"layers": [1]},
        {"layers": {}, "layer_tensors": None},
        None,
    ],
)
def test_json_of_another_form_is_refused(change: dict[str, object] | None) -> None:
    data = {"spec_digest": "a", "tensors_digest": "b", "layer_tensors": {}, **change} if change else {}
    with pytest.raises(DecodeError, match=r"layers|layer_tensors|spec_digest"):
        decode(ModelFingerprint, data)


def test_a_layer_that_is_not_there_is_an_error(fp8_tensors: Tensors, take: Take) -> None:
    with pytest.raises(CheckpointError, match=r"model\.layers\.2\."):
        take(fp8_tensors, "model", Span(0, 3))
