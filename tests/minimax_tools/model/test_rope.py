from __future__ import annotations

from typing import Any

import pytest

from minimax_tools.model.rope import find_rope_faults, read_rope_theta, read_rotary_dim

HEAD_DIM = 128
PLAIN = {"rope_theta": 5_000_000, "rope_type": "default", "partial_rotary_factor": 0.5}
HALF = {"rotary_dim": 64, "rope_theta": 5_000_000}


@pytest.mark.parametrize(
    "config",
    [
        HALF,
        {"rope_parameters": PLAIN},
        {"rope_theta": 5_000_000, "partial_rotary_factor": 0.5},
        {**HALF, "rope_parameters": PLAIN, "rope_scaling": None, "partial_rotary_factor": 0.5},
        # Written by transformers that did not know `rotary_dim`.
        {"rotary_dim": 64, "rope_parameters": {"rope_theta": 5e6, "rope_type": "default"}},
        {"rotary_dim": None, "rope_theta": 5e6, "rope_parameters": {"partial_rotary_factor": 0.5}},
        {**HALF, "rope_scaling": {"type": "default"}},
        {**HALF, "rope_scaling": {"rope_type": "default", "factor": 1.0}},
        {**HALF, "rope_scaling": {}},
    ],
)
def test_one_rope_is_read_under_all_its_names(config: dict[str, Any]) -> None:
    assert find_rope_faults(config, head_dim=HEAD_DIM) == []
    assert (read_rotary_dim(config, head_dim=HEAD_DIM), read_rope_theta(config)) == (64, 5e6)


def test_without_a_width_all_dims_are_rotated_and_without_a_theta_its_name_is_told() -> None:
    assert read_rotary_dim({"rope_theta": 1e4}, head_dim=HEAD_DIM) == HEAD_DIM
    with pytest.raises(KeyError, match="rope_theta"):
        read_rope_theta({"rotary_dim": 64})


def test_widths_that_differ_by_rounding_do_not_contradict_each_other() -> None:
    config = {"rotary_dim": 42, "partial_rotary_factor": 0.33, "rope_theta": 1e4}
    assert find_rope_faults(config, head_dim=HEAD_DIM) == []


@pytest.mark.parametrize("kind", ["yarn", "linear", "dynamic", "llama3", "longrope"])
def test_scaled_rope_is_named_and_no_other_transformers_advised(kind: str) -> None:
    for parent, name in (("rope_scaling", "type"), ("rope_parameters", "rope_type")):
        scaled = {name: kind, "factor": 4.0, "original_max_position_embeddings": 196608}
        (fault,) = find_rope_faults({**HALF, parent: scaled}, head_dim=HEAD_DIM)
        assert (fault.key, fault.expected, fault.found) == (f"{parent}.{name}", "'default'", repr(kind))
        assert fault.next_step.startswith("mm2 computes plain RoPE only.")
        assert "nstall" not in fault.next_step


@pytest.mark.parametrize(
    ("changes", "key", "found"),
    [
        ({"rope_scaling": {"factor": 4.0}}, "rope_scaling.factor", "4.0"),
        ({"rope_scaling": "yarn"}, "rope_scaling", "'yarn'"),
        (
            {"rope_parameters": {"full_attention": PLAIN}},
            "rope_parameters.full_attention",
            "parameters of its own",
        ),
        (
            {"rope_parameters": {**PLAIN, "partial_rotary_factor": 0.25}},
            "rotary_dim",
            "64 by rotary_dim, 32 by rope_parameters.partial_rotary_factor",
        ),
        ({"partial_rotary_factor": 1.0}, "rotary_dim", "64 by rotary_dim, 128 by partial_rotary_factor"),
        (
            {"rope_parameters": {**PLAIN, "rope_theta": 10000}},
            "rope_theta",
            "5e+06 by rope_theta, 10000 by rope_parameters.rope_theta",
        ),
    ],
)
def test_what_is_no_plain_rope_is_named(changes: dict[str, Any], key: str, found: str) -> None:
    (fault,) = find_rope_faults({**HALF, **changes}, head_dim=HEAD_DIM)
    assert (fault.key, fault.found) == (key, found)
