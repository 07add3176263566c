from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.golden import open_golden
from gpu_reference.model.placement import (
    Placement,
    describe_placement,
    parse_placement,
    watched_memory,
)
from minimax_tools.errors import BackendError, UsageError

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")


def parse(device_map: str, max_memory: str | None = None, offload_folder: Path | None = None) -> Placement:
    return parse_placement(device_map, max_memory=max_memory, offload_folder=offload_folder)


@no_gpu
@pytest.mark.parametrize("strategy", ["auto", "balanced", "balanced_low_0", "sequential", "cpu"])
def test_without_a_gpu_every_strategy_means_the_cpu(strategy: str) -> None:
    assert parse(strategy) == Placement(device_map={"": "cpu"})


@no_gpu
def test_limit_without_a_gpu_is_the_cpus() -> None:
    assert parse("auto", "40GB") == Placement(device_map="auto", max_memory={"cpu": 40 * 10**9})


@no_gpu
@pytest.mark.parametrize("device_map", ["cuda", "cuda:0", "cuda:3", '{"": 0}', '{"": "cuda:1"}'])
def test_gpu_that_is_not_here_is_refused(device_map: str) -> None:
    with pytest.raises(BackendError, match=r"GPU \d is not here: expected a CUDA GPU, found torch .* sees 0"):
        parse(device_map)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("cpu:100GB", 100 * 10**9),
        ("cpu:1.5GiB", 3 * 2**29),
        ("cpu: 8 mb", 8 * 10**6),
        ("cpu:2TiB", 2 * 2**40),
        ("cpu:500KB", 500_000),
    ],
)
def test_sizes_are_read_in_their_unit(text: str, size: int) -> None:
    assert parse("sequential", text).max_memory == {"cpu": size}


@pytest.mark.parametrize(
    "text", ["40", "forty GB", "cpu", "cpu:", "cpu:40", "gpu:40GB", "cpu:1GB,,", "-1GB", ""]
)
def test_unreadable_limit_is_refused(text: str) -> None:
    if text == "":
        assert parse("auto", text).max_memory is None
        return
    with pytest.raises(UsageError, match=r"--max-memory .* cannot be read at .*: expected 40GB, or 0:40GB"):
        parse("auto", text)


def test_limit_beside_an_explicit_map_is_refused() -> None:
    with pytest.raises(UsageError, match="--max-memory has no effect with --device-map cpu"):
        parse("cpu", "cpu:40GB")


def test_map_is_read_from_json_and_from_a_file(tmp_path: Path) -> None:
    mapping = {"model.layers.0": "cpu", "model.layers.1": "disk"}
    (tmp_path / "map.json").write_text(json.dumps(mapping))
    assert parse(json.dumps(mapping)).device_map == mapping
    assert parse(str(tmp_path / "map.json")).device_map == mapping


UNREADABLE_MAPS = [
    "gpu",
    "cuda:x",
    "[]",
    "{}",
    "{",
    '"cpu"',
    "absent.json",
    '{"": "tpu"}',
    '{"": 7.5}',
    '{"": null}',
]


@pytest.mark.parametrize("text", UNREADABLE_MAPS)
def test_unreadable_map_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match=r"--device-map .* cannot be read"):
        parse(text)


@pytest.mark.parametrize(
    ("device_map", "message"),
    [
        ({"model.nothing": "cpu", "": "cpu"}, "modules that the model does not have: model.nothing"),
        ({"model.layers.9": "cpu", "": "cpu"}, "modules that the model does not have: model.layers.9"),
        ({"model": "cpu"}, "gives no device for lm_head.weight. Name every module"),
        ({"model.layers.1": "cpu"}, "gives no device for model.embed_tokens.weight"),
    ],
)
def test_map_that_does_not_fit_the_model_is_refused(
    ask: Any, device_map: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=f"--device-map {message}|--device-map names {message}"):
        with open_golden(ask(placement=Placement(device_map=device_map))):
            pass


def test_modules_are_named_by_device(ask: Any, tmp_path: Path) -> None:
    mapping = {
        "model.embed_tokens": "cpu",
        "model.layers.0": "cpu",
        "model.layers.1": "cpu",
        "model.layers.2": "disk",
        "model.layers.3": "cpu",
        "model.norm": "cpu",
        "model.rotary_emb": "cpu",
        "lm_head": "disk",
    }
    with open_golden(ask(placement=Placement(device_map=mapping, offload_folder=tmp_path))) as golden:
        lines = describe_placement(golden.model)
    assert lines == ["cpu: layers 0-1, 3, embed_tokens, norm, rotary_emb", "disk: layer 2, lm_head"]


def test_exhausted_gpu_memory_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(
        BackendError, match=r"a GPU ran out of memory: found CUDA out of memory\. Lower --max-memory"
    ):
        with watched_memory():
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
