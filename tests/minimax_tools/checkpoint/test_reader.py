"""Tensors and weights are read exactly, whole or in rows and columns, and copied transposed bit for bit."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from minimax_tools.checkpoint.header import TensorEntry
from minimax_tools.checkpoint.reader import CheckpointReader, copy_matrix, is_transposed
from minimax_tools.errors import CheckpointError

Tensors = dict[str, torch.Tensor]
Writer = Callable[..., Path]

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
Q_SCALE = Q_PROJ + "_scale_inv"
NORM = "model.layers.1.input_layernorm.weight"
GATE = "model.layers.1.block_sparse_moe.gate.weight"


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


def test_every_tensor_is_read_byte_exactly(fp8_tensors: Tensors, write: Writer) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader:
        for name, tensor in fp8_tensors.items():
            found = reader.read(name)
            assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
            assert _bytes(found) == _bytes(tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.tensor([True, False]),
        torch.arange(5),
        torch.arange(3, dtype=torch.uint8),
        torch.ones(2, dtype=torch.float8_e5m2),
        torch.ones(2, dtype=torch.float16),
    ],
    ids=str,
)
def test_every_dtype_and_odd_shape_is_read(tensor: torch.Tensor, tmp_path: Path) -> None:
    save_file({"a": tensor}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        found = reader.read("a")
    assert (found.dtype, found.shape, _bytes(found)) == (tensor.dtype, tensor.shape, _bytes(tensor))


def test_reading_into_a_slice_touches_nothing_else(fp8_tensors: Tensors, write: Writer) -> None:
    storage = torch.full((3, *fp8_tensors[GATE].shape), -1.0)
    with CheckpointReader(write(fp8_tensors)) as reader:
        reader.read_into(GATE, storage[1])
    assert torch.equal(storage[1], fp8_tensors[GATE])
    assert (storage[0] == -1).all()
    assert (storage[2] == -1).all()


@pytest.mark.parametrize(
    "out",
    [torch.empty(4, 160, dtype=torch.bfloat16), torch.empty(160, 4).T, torch.empty(160, 4), torch.empty(640)],
    ids=["dtype", "strides", "shape", "flat"],
)
def test_reading_into_another_form_is_refused(out: torch.Tensor, fp8_tensors: Tensors, write: Writer) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader, pytest.raises(ValueError, match="out"):
        reader.read_into(GATE, out)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_fp8_weights_are_the_rounded_product(
    dtype: torch.dtype, fp8_tensors: Tensors, float32_products: Tensors, write: Writer
) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader:
        for name, product in float32_products.items():
            assert torch.equal(reader.read_weight(name, dtype), product.to(dtype))


def test_weights_of_other_dtypes_are_cast(fp8_tensors: Tensors, write: Writer) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader:
        assert torch.equal(reader.read_weight(NORM, torch.float32), fp8_tensors[NORM].to(torch.float32))
        assert torch.equal(reader.read_weight(GATE, torch.bfloat16), fp8_tensors[GATE].to(torch.bfloat16))
        assert torch.equal(reader.read_weight(GATE, torch.float32), fp8_tensors[GATE])


def test_weights_go_into_storage_of_any_stride(
    fp8_tensors: Tensors, float32_products: Tensors, write: Writer
) -> None:
    storage = torch.zeros(160, 192, dtype=torch.bfloat16)
    with CheckpointReader(write(fp8_tensors)) as reader:
        reader.read_weight_into(Q_PROJ, storage.T)
    assert torch.equal(storage.T, float32_products[Q_PROJ].to(torch.bfloat16))


ROWS = (range(192), range(1, 130), range(100, 131), range(3), range(5, 5))
COLUMNS = (range(160), range(3), range(120, 140), range(128, 160), range(9, 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["plain", "a.weight"])
def test_columns_of_rows_are_those_of_the_whole(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    codes = torch.randn(192, 160, generator=torch.Generator().manual_seed(0))
    tensors = {"plain": codes, "a.weight": codes.to(torch.float8_e4m3fn)}
    save_file({**tensors, "a.weight_scale_inv": torch.rand(2, 2) + 0.5}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        whole = reader.read_weight(name, dtype)
        for rows, columns in itertools.product(ROWS, COLUMNS):
            out = torch.empty(len(rows), len(columns), dtype=dtype)
            # All columns need not be named.
            named = None if columns == range(160) else columns
            reader.read_weight_into(name, out, rows=rows, columns=named)
            assert torch.equal(out, whole[rows.start : rows.stop, columns.start : columns.stop])
            as_columns = torch.empty(len(columns), len(rows), dtype=dtype)
            reader.read_weight_into(name, as_columns.mT, rows=rows, columns=named)
            assert torch.equal(as_columns, out.mT)


def test_only_the_rows_that_are_asked_for_are_read(tmp_path: Path) -> None:
    save_file({"a": torch.ones(10, 4)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader:
        reader.read_weight_into("a", torch.empty(3, 4), rows=range(2, 5))
        assert reader.num_bytes_read == 3 * 4 * 4


@pytest.mark.parametrize(
    ("rows", "height", "fault"),
    [
        (range(8, 11), 3, "a has 10 rows, not range"),
        (range(0, 4, 2), 2, "a has 10 rows"),
        (range(2), 3, r"has shape \[2, 4\], out has \[3, 4\]"),
    ],
)
def test_rows_that_are_not_there_are_refused(rows: range, height: int, fault: str, tmp_path: Path) -> None:
    save_file({"a": torch.ones(10, 4)}, tmp_path / "model.safetensors")
    with CheckpointReader(tmp_path) as reader, pytest.raises(ValueError, match=fault):
        reader.read_weight_into("a", torch.empty(height, 4), rows=rows)


def test_fp8_without_scales_is_refused(fp8_tensors: Tensors, write: Writer) -> None:
    del fp8_tensors[Q_SCALE]
    with CheckpointReader(write(fp8_tensors)) as reader:
        fault = rf"FP8 without scales: expected a tensor {Q_SCALE}, found none"
        with pytest.raises(CheckpointError, match=fault):
            reader.read_weight(Q_PROJ, torch.bfloat16)


@pytest.mark.parametrize(
    "scale",
    [torch.ones(1, 2), torch.ones(2), torch.ones(2, 2, dtype=torch.float16)],
    ids=["grid", "dim", "dtype"],
)
def test_scales_that_do_not_fit_are_refused(scale: torch.Tensor, fp8_tensors: Tensors, write: Writer) -> None:
    fp8_tensors[Q_SCALE] = scale
    with CheckpointReader(write(fp8_tensors)) as reader:
        fault = r"does not fit its weight \[192, 160\]: expected .*\[2, 2\]"
        with pytest.raises(CheckpointError, match=fault):
            reader.read_weight(Q_PROJ, torch.bfloat16)


@pytest.mark.parametrize("dtype", [torch.float8_e5m2, torch.int8])
def test_codes_of_another_kind_are_no_weight(dtype: torch.dtype, fp8_tensors: Tensors, write: Writer) -> None:
    fp8_tensors[Q_PROJ] = fp8_tensors[Q_PROJ].to(torch.float32).to(dtype)
    with CheckpointReader(write(fp8_tensors)) as reader:
        with pytest.raises(CheckpointError, match="is no weight that mm2 can read"):
            reader.read_weight(Q_PROJ, torch.bfloat16)


@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda entry: os.truncate(entry.file, entry.offset + 10), "the file ends after 10 of 30720 bytes"),
        (lambda entry: entry.file.unlink(), "No such file"),
    ],
)
def test_a_shard_that_shrank_or_vanished_after_the_check_is_an_error(
    damage: Callable[[TensorEntry], object], found: str, fp8_tensors: Tensors, write: Writer
) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader:
        damage(reader.index[Q_PROJ])
        with pytest.raises(CheckpointError, match=found):
            reader.read(Q_PROJ)


def test_many_threads_read_the_same_bytes(fp8_tensors: Tensors, write: Writer) -> None:
    names = sorted(fp8_tensors) * 4
    with CheckpointReader(write(fp8_tensors)) as reader, ThreadPoolExecutor(4) as pool:
        for name, found in zip(names, pool.map(reader.read, names), strict=True):
            assert _bytes(found) == _bytes(fp8_tensors[name])


def test_reading_past_the_cache_gives_the_same_bytes_and_counts_in_the_same_totals(
    fp8_tensors: Tensors, write: Writer
) -> None:
    with CheckpointReader(write(fp8_tensors)) as reader:
        past_cache = reader.past_cache()
        for number, (name, tensor) in enumerate(fp8_tensors.items()):
            source = past_cache if number % 2 else reader
            assert _bytes(source.read(name)) == _bytes(tensor)
        num_bytes = sum(tensor.nbytes for tensor in fp8_tensors.values())
        assert reader.num_bytes_read == past_cache.num_bytes_read == num_bytes


def test_closing_gives_every_descriptor_back(fp8_tensors: Tensors, write: Writer) -> None:
    folder = write(fp8_tensors)
    before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with CheckpointReader(folder) as reader:
        for name in fp8_tensors:
            reader.read(name)
        assert len(os.listdir("/proc/self/fd")) == before + 2  # noqa: PTH208
    assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


NAN_AND_SIGNED_ZERO = (0x7FC1, 0xFFA5 - 0x10000, -0x8000, 0x0001)


def _bits(rows: int, columns: int) -> torch.Tensor:
    """BF16 values of any bits, NaN of any payload among them."""
    bits = torch.randint(-(2**15), 2**15, (rows, columns), dtype=torch.int16)
    bits.view(-1)[: len(NAN_AND_SIGNED_ZERO)] = torch.tensor(NAN_AND_SIGNED_ZERO, dtype=torch.int16)
    return bits.view(torch.bfloat16)


# Fewer rows than go at a time, one more, a prime number, and one column or row.
@pytest.mark.parametrize("shape", [(4, 4), (511, 64), (513, 96), (1031, 7), (1, 9), (9, 1)])
def test_transposed_copy_is_that_of_torch_bit_for_bit(shape: tuple[int, int]) -> None:
    source = _bits(*shape) if shape != (1, 9) else torch.arange(9, dtype=torch.bfloat16)[None]
    storage = torch.zeros(shape[1], 2 * shape[0], dtype=torch.bfloat16)
    copy_matrix(source, storage[:, shape[0] :].T)
    assert torch.equal(storage[:, shape[0] :].T.view(torch.int16), source.view(torch.int16))
    assert not storage[:, : shape[0]].any()


def test_wide_rows_and_values_to_cast_are_copied_transposed() -> None:
    wide = torch.arange(2 * 2_000_000, dtype=torch.int32).view(torch.float32).view(2, -1)
    out = torch.zeros(2_000_000, 2)
    copy_matrix(wide, out.T)
    assert torch.equal(out.T.view(torch.int32), wide.view(torch.int32))
    source = torch.randn(600, 40)
    out = torch.empty(40, 600, dtype=torch.bfloat16)
    copy_matrix(source, out.T)
    assert torch.equal(out.T, source.bfloat16())


def test_what_is_not_transposed_is_copied_as_ever() -> None:
    source = torch.randn(3, 5)
    for out in (torch.empty(3, 5), torch.empty(3, 10)[:, ::2], torch.empty(6, 5)[::2]):
        assert not is_transposed(out)
        copy_matrix(source, out)
        assert torch.equal(out, source)
    with pytest.raises(RuntimeError):
        copy_matrix(torch.randn(4, 5), torch.empty(5, 3).T)


def test_a_view_with_contiguous_columns_is_transposed() -> None:
    matrix = torch.zeros(3, 4)
    assert is_transposed(matrix.T)
    assert not is_transposed(matrix)
    assert is_transposed(torch.zeros(3, 2).T)
    # One row or one column has no order of its own.
    assert not is_transposed(torch.zeros(4, 1))
    assert not is_transposed(torch.zeros(4, 1).T)
    # The rows overlap.
    assert not is_transposed(torch.zeros(5).as_strided((2, 3), (1, 1)))
