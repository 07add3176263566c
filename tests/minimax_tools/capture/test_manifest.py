from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.capture.manifest import SCHEMA_VERSION, Entry, Manifest, TensorDigest, digest_tensor
from minimax_tools.capture.store import MANIFEST_NAME
from minimax_tools.errors import CaptureError
from minimax_tools.json_codec import encode
from minimax_tools.model.sites import Site


def entry(layer: int | None, site: str) -> Entry:
    return Entry.of(layer, site, file=f"layer_{layer}.safetensors", tensor=torch.ones(2, 3))


def store(directory: Path, record: object) -> Path:
    (directory / MANIFEST_NAME).write_text(record if isinstance(record, str) else json.dumps(record))
    return directory


@pytest.fixture
def manifest(recipe: Any) -> Manifest:
    return (
        Manifest(description=recipe.describe())
        .with_layer(
            0,
            (entry(0, "output"), entry(0, "input")),
            not_exposed=(Site.ROUTER_LOGITS,),
            observed_dtypes={"router_gate": "bfloat16"},
        )
        .with_layer(None, (entry(None, "logits"),))
    )


def test_manifest_survives_its_file(manifest: Manifest, tmp_path: Path) -> None:
    finished = replace(manifest, is_complete=True)
    store(tmp_path, encode(finished))
    assert Manifest.read(tmp_path) == finished
    assert finished.not_exposed == {0: (Site.ROUTER_LOGITS,)}
    assert finished.observed_dtypes == {"router_gate": "bfloat16"}


def test_entries_stand_in_execution_order_and_the_model_last(manifest: Manifest) -> None:
    longer = manifest.with_layer(2, (entry(2, "output"),), not_exposed=(), observed_dtypes={})
    longer = longer.with_layer(1, (entry(1, "output"),), not_exposed=(), observed_dtypes={})
    places = [(one.layer, one.site) for one in longer.entries]
    assert places == [(0, "input"), (0, "output"), (1, "output"), (2, "output"), (None, "logits")]
    assert longer.complete_layers == (0, 1, 2)


def test_digest_is_that_of_the_bytes_in_row_major_order() -> None:
    tensor = torch.arange(6.0).reshape(2, 3)
    assert digest_tensor(tensor) == digest_tensor(tensor.T.contiguous().T)
    assert digest_tensor(tensor) != digest_tensor(tensor.T)
    assert digest_tensor(tensor.bfloat16()) != digest_tensor(tensor)
    assert digest_tensor(torch.tensor(1.0)) == digest_tensor(torch.ones(1))


@pytest.mark.parametrize(
    ("changes", "names"),
    [
        ({"options": {"attn_implementation": "sdpa", "proved": {"a": 1}}}, ["options.proved"]),
        ({"options": {"attn_implementation": "sdpa", "proved": ["b", "a"]}}, ["options.proved"]),
        ({"options": {"proved": ["a", "b"], "attn_implementation": "sdpa"}}, []),
        ({"options": {}}, ["options.attn_implementation", "options.proved"]),
        ({"model_config": {"hidden_size": 7}}, []),
        ({"inputs_digest": "x"}, ["inputs_digest"]),
        ({"target": "other"}, ["target"]),
        ({"environment": {"NEURON_CC_FLAGS": "-O1"}}, ["environment.NEURON_CC_FLAGS"]),
        ({"versions": {"torch": "9"}}, ["versions.torch"]),
    ],
)
def test_differences_name_the_values_that_differ(
    recipe: Any, changes: dict[str, Any], names: list[str]
) -> None:
    plain = {"versions": {"torch": "2"}, "environment": {}}
    description, changed = recipe.describe(**plain), recipe.describe(**{**plain, **changes})
    assert description.differences(changed) == names
    assert changed.differences(description) == names


def test_missing_manifest_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"no capture at .*: expected manifest\.json\. Make one: mm2-gpu"):
        Manifest.read(tmp_path)


@pytest.mark.parametrize("version", [SCHEMA_VERSION - 1, SCHEMA_VERSION + 1, True])
def test_other_schema_is_told_apart_from_damage(version: int, manifest: Manifest, tmp_path: Path) -> None:
    store(tmp_path, {**encode(manifest), "schema_version": version})
    refused = (
        rf"another schema: expected version {SCHEMA_VERSION}, found {version}\. .* run the capture again"
    )
    with pytest.raises(CaptureError, match=refused):
        Manifest.read(tmp_path)


DAMAGES: dict[str, Callable[[dict[str, Any]], Any]] = {
    "cut": lambda record: json.dumps(record)[:100],
    "a list": lambda record: [record],
    "no run": lambda record: {name: value for name, value in record.items() if name != "run"},
    "no digests": lambda record: {name: value for name, value in record.items() if name != "digests"},
    "an unknown site": lambda record: {**record, "run": {**record["run"], "sites": ["nowhere"]}},
    "an empty span": lambda record: {**record, "run": {**record["run"], "stop_layer": 0}},
    "an entry of text": lambda record: {**record, "entries": ["x"]},
    "an entry without statistics": lambda record: {**record, "entries": [{"shape": [1], "statistics": {}}]},
    "a file elsewhere": lambda record: {**record, "entries": [{**record["entries"][0], "file": "../../a.b"}]},
    "digests of a file elsewhere": lambda record: {**record, "digests": {"/etc/elsewhere.safetensors": {}}},
    "a text elsewhere": lambda record: {**record, "text_digests": {".bashrc": "0"}},
    "a fingerprint of text": lambda record: {**record, "provenance": {**record["provenance"], "model": "x"}},
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_damaged_manifest_is_named(manifest: Manifest, tmp_path: Path, damage: Any) -> None:
    store(tmp_path, damage(encode(manifest)))
    with pytest.raises(CaptureError, match=r"manifest\.json is damaged: found .*Run the capture again"):
        Manifest.read(tmp_path)


def test_manifest_of_another_program_is_not_taken_for_ones_own(manifest: Manifest, tmp_path: Path) -> None:
    assert not Manifest.is_in(tmp_path)
    assert not Manifest.is_in(store(tmp_path, {"name": "my app"}))
    assert not Manifest.is_in(store(tmp_path, "{"))
    assert Manifest.is_in(store(tmp_path, encode(manifest)))
    assert Manifest.is_in(store(tmp_path, {**encode(manifest), "schema_version": 99}))
    (tmp_path / "inputs.safetensors").touch()
    assert Manifest.is_in(store(tmp_path, "{"))


DIGEST = TensorDigest(dtype="float32", shape=(2, 3), sha256="1" * 64)


@pytest.fixture
def digested(manifest: Manifest) -> Manifest:
    """The manifest with digests of two files of tensors and one of JSON."""
    files = {f"layer_0.{kind}.safetensors": {"b": DIGEST, "a": DIGEST} for kind in ("fp32", "floor")}
    return manifest.with_digests(files).with_text("generation.json", "2" * 64)


def test_digests_are_replaced_file_by_file_and_lie_in_one_order(digested: Manifest) -> None:
    other, file = replace(DIGEST, dtype="int64"), "layer_0.floor.safetensors"
    changed = digested.with_digests({file: {"b": DIGEST, "a": other}}).with_text("a.json", "3")
    assert list(changed.digests[file].items()) == [("a", other), ("b", DIGEST)]
    assert list(changed.digests) == [file, "layer_0.fp32.safetensors"]
    assert changed.with_text("a.json", "4").text_digests["a.json"] == "4"
    assert list(changed.text_digests) == ["a.json", "generation.json"]


def test_files_are_those_of_entries_digests_and_texts(digested: Manifest) -> None:
    own = {"manifest.json", "layer_0.safetensors", "layer_None.safetensors"}
    others = {"layer_0.fp32.safetensors", "layer_0.floor.safetensors", "generation.json"}
    assert digested.file_names() == tuple(sorted(own | others))
    # Names of tensors that have entries are left out.
    assert digested.names_in("layer_0.fp32.safetensors") == ("a", "b")
    assert digested.names_in("layer_0.safetensors") == ()


def test_text_and_values_are_the_same_record(digested: Manifest, tmp_path: Path) -> None:
    described = replace(digested, description=replace(digested.description, input_source="Grüße"))
    text = described.as_text()
    assert json.loads(text) == json.loads(json.dumps(encode(described)))
    assert "Grüße" in text
    store(tmp_path, text)
    assert Manifest.read(tmp_path) == described


def test_not_a_number_is_no_json(recipe: Any) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        Manifest(description=recipe.describe(options={"x": float("nan")})).as_text()


def test_manifest_without_variants_does_not_name_them(recipe: Any) -> None:
    assert "floor_variants" not in encode(Manifest(description=recipe.describe()))
    varied = Manifest(description=recipe.describe(floor_variants=("eager",)))
    assert encode(varied)["floor_variants"] == ["eager"]


def test_content_digest_covers_all_that_is_stored(digested: Manifest) -> None:
    described = replace(digested.description, input_source="another")
    changed = [
        replace(digested, description=described),
        replace(digested, entries=digested.entries[1:]),
        digested.with_text("x.json", "3"),
        digested.with_digests({"x.y": {}}),
    ]
    assert len({digested.content_digest(), *(manifest.content_digest() for manifest in changed)}) == 5
    # Layers that are complete, and a certificate, are no content.
    assert replace(digested, is_complete=True).content_digest() == digested.content_digest()


def test_content_digest_does_not_depend_on_the_order_of_options(recipe: Any) -> None:
    one, other = (
        Manifest(description=recipe.describe(options=options))
        for options in ({"a": 1, "b": 2}, {"b": 2, "a": 1})
    )
    assert one.content_digest() == other.content_digest()
