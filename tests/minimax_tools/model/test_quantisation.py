from __future__ import annotations

from typing import Any

import pytest

from minimax_tools.model.quantisation import find_other_format, find_quantisation_faults

FP8: dict[str, Any] = {
    "activation_scheme": "dynamic",
    "fmt": "float8_e4m3fn",
    "quant_method": "fp8",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
}
MLX = {"group_size": 64, "bits": 4, "mode": "affine"}


@pytest.mark.parametrize(
    "quantised",
    [
        None,
        FP8,
        {"quant_method": "fp8"},
        {**FP8, "scale_fmt": "float", "ignored_layers": ["gate"], "dequantize": True},
    ],
)
def test_weights_as_in_the_originals_and_plain_ones_pass(quantised: dict[str, Any] | None) -> None:
    assert find_quantisation_faults({"quantization_config": quantised}) == []
    assert find_quantisation_faults({}) == []


def check_other_format(config: dict[str, Any], *, key: str, found: str) -> None:
    config = {"model_type": "minimax_m2", **config}
    (fault,) = find_quantisation_faults(config)
    assert (fault.key, fault.found) == (key, found)
    assert "Use the original (MiniMaxAI/MiniMax-M2" in fault.next_step
    assert find_other_format(config) == fault


@pytest.mark.parametrize(
    ("quantised", "found"),
    [
        (
            {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"},
            "quant_method 'awq', bits 4, group_size 128",
        ),
        (
            {"quant_method": "compressed-tensors", "format": "pack-quantized"},
            "quant_method 'compressed-tensors', format pack-quantized",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "quant_method 'modelopt', quant_algo NVFP4"),
        ({"quant_method": "mxfp4"}, "quant_method 'mxfp4'"),
        ({}, "no quant_method"),
        ("fp8", "'fp8'"),
        (MLX, "no quant_method, mode affine, bits 4, group_size 64"),
    ],
)
def test_another_format_is_named(quantised: object, found: str) -> None:
    check_other_format({"quantization_config": quantised}, key="quantization_config", found=found)


def test_format_of_another_key_is_named() -> None:
    mlx = {"quantization": MLX, "quantization_config": MLX}
    check_other_format(mlx, key="quantization", found="the format of MLX, mode affine, bits 4, group_size 64")
    tensors = {"compression_config": {"format": "naive-quantized"}}
    found = "the format of compressed-tensors, format naive-quantized"
    check_other_format(tensors, key="compression_config", found=found)


@pytest.mark.parametrize(
    ("name", "value", "found"),
    [
        ("weight_block_size", [64, 64], "[64, 64]"),
        ("weight_block_size", [1, 128], "[1, 128]"),
        ("weight_block_size", None, "null: no blocks"),
        ("activation_scheme", "static", "'static'"),
        ("fmt", "float8_e5m2", "'float8_e5m2'"),
        ("scale_fmt", "ue8m0", "'ue8m0'"),
        ("expert_dtype", "fp4", "'fp4'"),
        ("modules_to_convert", ["embed_tokens"], "['embed_tokens']"),
    ],
)
def test_another_fp8_is_named(name: str, value: object, found: str) -> None:
    config = {"quantization_config": {**FP8, name: value}}
    (fault,) = find_quantisation_faults(config)
    assert (fault.key, fault.found) == (f"quantization_config.{name}", found)
    # Other families may store FP8 in other blocks.
    assert find_other_format(config) is None
