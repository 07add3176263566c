"""The memory predicted for a golden, against the memory that a process takes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.checkpoint.layer_loader import grouped_storage, packed_storage
from minimax_tools.reference.variant_names import variant_names
from minimax_tools.text.input_request import InputRequest

CPU = torch.device("cpu")
# What libraries keep beside: kernels made for each new shape, and what the allocator has in pieces.
LIBRARIES = 60e6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_layers_take_what_their_storage_has(ask: Any, dtype: torch.dtype) -> None:
    footprint = ask(dtype=dtype).footprint
    for kind, expected in (
        (grouped_storage, footprint.layer_bytes),
        (packed_storage, footprint.packed_layer_bytes),
    ):
        places = kind(footprint.spec, dtype=dtype, device=CPU).places
        assert sum(place.nbytes for place in places.values()) == pytest.approx(expected, rel=1e-3)


def test_activations_grow_with_the_tokens(ask: Any) -> None:
    one, two = (ask(inputs=InputRequest(seq_lens=lengths)).footprint for lengths in ((512,), (512, 512)))
    fixed = ask(inputs=InputRequest(seq_lens=(1,))).footprint.activation_bytes
    assert two.activation_bytes - fixed == pytest.approx(2 * (one.activation_bytes - fixed), rel=0.01)
    # Scores grow with the square of a row's length, and not with the rows.
    eager, longer = (
        replace(ask(inputs=InputRequest(seq_lens=lengths)).footprint, attn_implementation="eager")
        for lengths in ((512,), (1024,))
    )
    assert longer.activation_bytes > 2.5 * eager.activation_bytes


def test_variants_run_side_by_side_and_take_their_sites_each(ask: Any) -> None:
    plain = ask(inputs=InputRequest(seq_lens=(1024,))).footprint
    one, two, three = (
        replace(plain, floor_variants=variant_names(number)).activation_bytes for number in (1, 2, 3)
    )
    assert three - two == two - one > 0
    assert plain.activation_bytes < one


@pytest.mark.slow
def test_activations_are_estimated_and_never_far_below_what_they_take(toy: Path, measure: Any) -> None:
    cases = (
        {"lens": [2048], "noise_floor": "full"},
        {"lens": [1024, 1500], "noise_floor": "stats", "experts": "eager"},
        {"lens": [2048], "attn": "eager"},
        {"lens": [512], "experts": "batched_mm"},
        {"lens": [1536], "noise_floor": "full", "floor_variants": list(variant_names(2))},
    )
    for case, measured in zip(cases, measure(toy, *cases), strict=True):
        taken = measured["peak"] - measured["layer"]
        assert taken <= 1.1 * measured["activations"] + LIBRARIES, case
        assert measured["activations"] <= 2.5 * taken, case


@pytest.mark.slow
def test_whole_model_takes_no_more_than_is_said(toy: Path, measure: Any, ask: Any) -> None:
    (measured,) = measure(toy, {"lens": [8], "whole": True})
    assert measured["peak"] <= 1.1 * ask().footprint.loading_bytes + LIBRARIES
