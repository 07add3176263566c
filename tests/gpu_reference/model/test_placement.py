from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import open_golden
from gpu_reference.model.placement import Placement, describe_placement, parse_placement, watched_memory
from minimax_tools.checkpoint.layer_loader import grouped_storage, packed_storage
from minimax_tools.errors import BackendError, UsageError
from minimax_tools.reference.variant_names import variant_names
from minimax_tools.text.input_request import InputRequest

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")

MAPS = ("gpu", "cuda:x", "[]", "{}", "{", '"cpu"', "absent.json", '{"": "tpu"}', '{"": 7.5}', '{"": null}')
LIMITS = ("40", "forty GB", "cpu", "cpu:", "cpu:40", "gpu:40GB", "cpu:1GB,,", "-1GB")
SIZES = {
    "cpu:100GB": 100 * 10**9,
    "cpu:1.5GiB": 3 * 2**29,
    "cpu: 8 mb": 8 * 10**6,
    "cpu:2TiB": 2 * 2**40,
    "cpu:500KB": 500_000,
}


def parse(device_map: str, max_memory: str | None = None) -> Placement:
    return parse_placement(device_map, max_memory=max_memory, offload_folder=None)


@no_gpu
def test_without_a_gpu_every_strategy_and_limit_is_the_cpus() -> None:
    for strategy in ("auto", "balanced", "balanced_low_0", "sequential", "cpu"):
        assert parse(strategy) == Placement(device_map={"": "cpu"})
    assert parse("auto", "40GB") == Placement(device_map="auto", max_memory={"cpu": 40 * 10**9})


@no_gpu
@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", "cuda:3", '{"": 0}', '{"": "cuda:1"}'])
def test_gpu_that_is_not_here_is_refused(device_map: str) -> None:
    with pytest.raises(BackendError, match=r"GPU \d is not here: expected a CUDA GPU, found torch .* sees 0"):
        parse(device_map)


def test_sizes_are_read_in_their_unit() -> None:
    assert parse("auto", "").max_memory is None
    for text, size in SIZES.items():
        assert parse("sequential", text).max_memory == {"cpu": size}


@pytest.mark.parametrize("text", LIMITS)
def test_unreadable_limit_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--max-memory .* cannot be read at .*: expected 40GB, or 0:40GB"):
        parse("auto", text)


def test_limit_beside_an_explicit_map_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-memory has no effect with --device-map cpu"):
        parse("cpu", "cpu:40GB")


def test_map_is_read_from_json_and_from_a_file(tmp_path: Path) -> None:
    mapping = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(mapping))
    for text in (json.dumps(mapping), str(tmp_path / "map.json")):
        assert parse(text).device_map == mapping


@pytest.mark.parametrize("text", MAPS)
def test_unreadable_map_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--device-map .* cannot be read"):
        parse(text)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model.nothing": "cpu", "": "cpu"}, "names modules that the model does not have: model.nothing"),
        ({"model.layers.9": "cpu", "": "cpu"}, "names modules that the model does not have: model.layers.9"),
        ({"model": "cpu"}, "gives no device for lm_head.weight. Name every module"),
        ({"model.layers.1": "cpu"}, "gives no device for model.embed_tokens.weight"),
    ],
)
def test_map_that_does_not_fit_the_model_is_refused(
    ask: Any, device_map: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"--device-map {message}"):
        with open_golden(ask(placement=Placement(device_map=device_map))):
            pass


def test_modules_are_named_by_device(ask: Any, tmp_path: Path) -> None:
    mapping = {
        **dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu"),
        **{f"model.layers.{layer}": "disk" if layer == 2 else "cpu" for layer in range(4)},
        "lm_head": "disk",
    }
    with open_golden(ask(placement=Placement(device_map=mapping, offload_folder=tmp_path))) as golden:
        lines = describe_placement(golden.model)
    assert lines == ["cpu: layers 0-1, 3, embed_tokens, norm, rotary_emb", "disk: layer 2, lm_head"]


def test_exhausted_gpu_memory_is_an_error_that_says_what_to_do() -> None:
    message = r"a GPU ran out of memory: found CUDA out of memory\. Lower --max-memory"
    with pytest.raises(BackendError, match=message), watched_memory():
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


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
