from __future__ import annotations

import json
import platform
from dataclasses import replace
from typing import Any

import pytest
import torch

from minimax_tools.json_codec import decode, encode
from minimax_tools.provenance import (
    ModelFingerprint,
    Provenance,
    library_versions,
    numeric_environment,
    plain_values,
)


def provenance() -> Provenance:
    return Provenance(
        model=ModelFingerprint(spec_digest="0" * 64, tensors_digest="1" * 64, layers={3: "2" * 64}),
        model_source="/models/MiniMax-M2",
        backend="cpu",
        device="cpu",
        dtypes={"weights": "bfloat16"},
        target="builtin",
        options={"attn_implementation": "sdpa"},
    )


@pytest.mark.parametrize(
    "configs",
    [{}, {"model_config": {"rope_theta": 5000000}, "port_config": {"cast_type": "as-declared"}}],
    ids=["as before there were configs", "with configs"],
)
def test_provenance_survives_a_manifest(configs: dict[str, Any]) -> None:
    kept = replace(provenance(), **configs)
    record = encode(kept)
    assert {"model_config", "port_config"} & record.keys() == configs.keys()
    assert decode(Provenance, json.loads(json.dumps(record))) == kept


def test_versions_are_those_of_what_is_installed() -> None:
    versions = library_versions()
    assert versions["python"] == platform.python_version()
    assert versions["torch"].partition("+")[0] == torch.__version__.partition("+")[0]
    assert "neuronx-cc" not in versions or versions["neuronx-cc"]


def test_variables_that_change_numbers_are_kept_and_others_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEURON_CC_FLAGS", "--auto-cast none")
    monkeypatch.setenv("SOME_TOKEN", "secret")
    monkeypatch.delenv("XLA_USE_BF16", raising=False)
    environment = numeric_environment()
    assert environment["NEURON_CC_FLAGS"] == "--auto-cast none"
    assert "XLA_USE_BF16" not in environment
    assert "secret" not in environment.values()
    assert provenance().environment == environment


def test_values_without_a_form_in_json_become_text() -> None:
    values = {"dtype": torch.bfloat16, "nested": {"on": True, "list": (1, None)}, "scale": float("inf")}
    expected = {"dtype": "torch.bfloat16", "nested": {"on": True, "list": [1, None]}, "scale": "inf"}
    assert plain_values(values) == expected
    json.dumps(plain_values(values), allow_nan=False)
