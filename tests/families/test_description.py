"""Promises of a family's description, kept by its toy: config.json, stored names, and transformers' own module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, UnsupportedModelError, UsageError
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import NEUTRAL_VALUES, Family
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import (
    expected_layer_shapes,
    float32_names,
    layer_prefix,
    scale_name,
)
from minimax_tools.reference.modules import loading_arguments, modeling_class
from minimax_tools.synthetic.toy_model import PRESETS

# No key of config.json has it in any model.
FOREIGN = "of another model"


def test_presets_have_the_sizes_of_the_description(family: Family) -> None:
    for preset, sizes in ((family.preset, family.true_sizes), (family.toy_preset, family.toy_sizes)):
        spec = PRESETS[preset].spec()
        assert spec.family is family
        assert {name: getattr(spec, name) for name in sizes} == sizes


def test_sizes_that_follow_from_others_cannot_be_chosen(family: Family) -> None:
    for name in family.derived_sizes:
        with pytest.raises(UsageError, match=name):
            PRESETS[family.toy_preset].resized(**{name: 32})


def test_config_is_read(family: Family, spec: ModelSpec) -> None:
    assert spec == PRESETS[family.toy_preset].spec()
    assert (spec.family, spec.graph) == (family, family.read_graph(spec.raw))
    # A model of another graph is another model, also if all its sizes are the same.
    others = {PRESETS[other.toy_preset].spec().digest() for other in FAMILIES.values() if other is not family}
    assert spec.digest() not in others


def test_each_foreign_key_is_refused_by_name(family: Family, spec: ModelSpec) -> None:
    keys = {*family.fixed_values, *(key for key in NEUTRAL_VALUES if key not in family.read_keys)}
    for key in keys:
        with pytest.raises(UnsupportedModelError) as error:
            ModelSpec.from_config({**spec.raw, key: FOREIGN})
        assert f"sets {key}" in str(error.value)
        assert FOREIGN in str(error.value)
        assert family.title in str(error.value)


def test_keys_that_the_family_reads_pass(family: Family, spec: ModelSpec) -> None:
    for key in family.read_keys & NEUTRAL_VALUES.keys():
        for neutral in NEUTRAL_VALUES[key]:
            ModelSpec.from_config({**spec.raw, key: neutral})


def test_each_missing_size_is_named(family: Family, spec: ModelSpec) -> None:
    for name in ("num_local_experts", "num_experts_per_tok", "intermediate_size"):
        key = family.size_key(name)
        with pytest.raises(CheckpointError, match=key):
            ModelSpec.from_config({other: value for other, value in spec.raw.items() if other != key})


def test_stored_names_translate_both_ways(family: Family, spec: ModelSpec) -> None:
    names = family.stored_names
    own = sorted(
        {name for layer in range(spec.num_hidden_layers) for name in expected_layer_shapes(spec, layer)}
    )
    stored = [names.stored(name) for name in own]
    assert len(set(stored)) == len(own)
    assert [names.own(name) for name in stored] == own
    for name in own:
        full = layer_prefix(3) + name
        assert names.stored(full).endswith(layer_prefix(3) + names.stored(name))
        assert names.own(names.stored(full)) == full
        assert names.own(names.stored(scale_name(full))) == scale_name(full)


def test_the_checkpoint_is_read_by_mm2s_names_and_dtypes(made: Path, spec: ModelSpec) -> None:
    in_float32 = float32_names(spec.graph)
    with CheckpointReader(made) as reader:
        for layer in range(spec.num_hidden_layers):
            shapes = expected_layer_shapes(spec, layer)
            for name, shape in shapes.items():
                entry = reader.index[layer_prefix(layer) + name]
                assert entry.shape == shape
                assert entry.dtype.name == ("float32" if name in in_float32 else "bfloat16"), name
            assert set(reader.index.layer_names(layer)) == {layer_prefix(layer) + name for name in shapes}


def test_transformers_loads_the_toy_strictly(family: Family, made: Path) -> None:
    kind = modeling_class(family, "ForCausalLM")
    model, loading = kind.from_pretrained(
        made, dtype=torch.bfloat16, output_loading_info=True, **loading_arguments(family)
    )
    found: dict[str, Any] = loading
    assert not any(found.values()), found
    assert model.config.model_type in (family.model_type, f"{family.model_type}_text")
