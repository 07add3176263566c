from __future__ import annotations

import collections
import json
import os
import shutil
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from minimax_tools.checkpoint.index import TensorIndex, find_index
from minimax_tools.checkpoint.pickled import PickledEntry
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.checkpoint.weight_files import refuse_pickled_module
from minimax_tools.errors import CheckpointError
from minimax_tools.model.quantisation import scale_shape
from minimax_tools.model.weight_names import scale_name
from minimax_tools.stored_dtype import BFLOAT16
from minimax_tools.torch_file import find_pickled_module
from neuron.cli import main as mm2_test

Q_PROJ, NORM = "model.layers.0.self_attn.q_proj.weight", "model.norm.weight"


class Call:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.reduced = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.reduced


ONE = {"x": torch.ones(2)}


def save(value: Any, path: Path) -> Path:
    torch.save(value, path)
    return path


def open_file(path: Path) -> CheckpointReader:
    return CheckpointReader(path.parent, index=TensorIndex.from_file(path))


def knot() -> list[Any]:
    """Lists that hold each other three times: their text would have no end."""
    lists: list[Any] = [[] for _ in range(60)]
    for one, following in zip(lists, lists[1:] + lists[:1], strict=True):
        one.extend([following] * 3)
    return lists


def num_bytes_read_by(action: Callable[[], object]) -> int:
    """Bytes that this process read from files meanwhile, as the kernel counts them."""

    def count() -> int:
        return int(Path("/proc/self/io").read_text().split()[1])

    idle = -count() + count()
    before = count()
    action()
    return count() - before - idle


def test_every_tensor_is_read_as_it_was_saved(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.randn(5, 7).bfloat16(),
        "fp8": torch.randn(4, 4).to(torch.float8_e4m3fn),
        "half": torch.randn(3).half(),
        "ids": torch.arange(6).view(1, 6),
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "parameter": torch.nn.Parameter(torch.randn(2, 2)),
    }
    path = save(collections.OrderedDict(tensors), tmp_path / "pytorch_model.bin")
    with open_file(path) as reader:
        assert set(reader.index.names) == set(tensors)
        for name, tensor in tensors.items():
            entry = reader.index[name]
            assert (entry.dtype.as_torch(), entry.shape) == (tensor.dtype, tuple(tensor.shape))
            assert entry.size_bytes == tensor.nbytes
            found = reader.read(name)
            assert type(found) is torch.Tensor
            assert found.dtype == tensor.dtype
            assert torch.equal(found.float(), tensor.detach().float())


def test_views_and_tied_tensors_are_read_each_by_itself(tmp_path: Path) -> None:
    base = torch.arange(48.0).reshape(6, 8)
    tensors = {
        "base": base,
        "tied": base,
        "rows": base[1:3],
        "column": base[:, 3],
        "turned": base.t(),
        "steps": base[::2, 1::3],
        "folded": base.view(2, 3, 8).permute(2, 0, 1),
        "one": base[5:, 7:],
        "none": base[6:],
    }
    with open_file(save(tensors, tmp_path / "pytorch_model.bin")) as reader:
        for name, tensor in tensors.items():
            found = reader.read(name)
            assert torch.equal(found, tensor)
            assert found.is_contiguous()
            assert found.untyped_storage().nbytes() == tensor.nbytes
            out = torch.full(tensor.shape, -1.0)
            reader.read_into(name, out)
            assert torch.equal(out, tensor)
        reader.read("base").zero_()
        assert torch.equal(reader.read("tied"), base)


def test_expanded_tensor_is_no_larger_than_what_is_stored(tmp_path: Path) -> None:
    # All of it would be a terabyte.
    path = save({"wide": torch.ones(1).expand(10**6, 10**6)}, tmp_path / "pytorch_model.bin")
    with open_file(path) as reader:
        found = reader.read("wide")
        assert found.shape == (10**6, 10**6)
        assert found.untyped_storage().nbytes() == 4
        assert found[-1, -1] == 1


def test_conjugate_and_negative_views_give_their_values(tmp_path: Path) -> None:
    value = torch.randn(4, dtype=torch.complex64)
    path = save({"conj": value.conj(), "neg": value.clone().conj().imag}, tmp_path / "pytorch_model.bin")
    with open_file(path) as reader:
        assert torch.equal(reader.read("conj"), value.conj())
        assert torch.equal(reader.read("neg"), -value.imag)


def test_values_that_no_tensor_can_have_are_refused(tmp_path: Path) -> None:
    storage = torch.ones(2, dtype=torch.bool).untyped_storage()
    negated = Call(
        torch._utils._rebuild_tensor_v2,
        torch.storage.TypedStorage(wrap_storage=storage, dtype=torch.bool, _internal=True),
        *(0, (2,), (1,), False, collections.OrderedDict(), {"neg": True}),
    )
    with open_file(save({"x": negated}, tmp_path / "pytorch_model.bin")) as reader:
        with pytest.raises(CheckpointError, match="is damaged"):
            reader.read("x")


def test_tensor_of_an_xla_device_has_the_dtype_it_had_there(tmp_path: Path) -> None:
    tensor = torch.randn(3).bfloat16()
    moved = Call(torch._utils._rebuild_device_tensor_from_cpu_tensor, tensor, tensor.dtype, "xla:0", False)
    with open_file(save({"x": moved}, tmp_path / "pytorch_model.bin")) as reader:
        assert reader.index["x"].dtype == BFLOAT16
        assert torch.equal(reader.read("x"), tensor)


def test_opening_reads_no_storage_and_a_tensor_only_itself(tmp_path: Path) -> None:
    tensors = {str(index): torch.randn(1024, 256) for index in range(8)}
    path = save(tensors, tmp_path / "pytorch_model.bin")
    # So that nothing is imported while bytes are counted.
    open_file(path).close()
    opened: list[CheckpointReader] = []
    assert num_bytes_read_by(lambda: opened.append(open_file(path))) < 64_000
    reader = opened[0]
    out = torch.empty(1024, 256)
    assert num_bytes_read_by(lambda: reader.read_into("5", out)) == out.nbytes
    assert torch.equal(out, tensors["5"])
    assert num_bytes_read_by(lambda: reader.read("6")) == out.nbytes
    reader.close()


def test_weight_is_cast_or_dequantised_with_its_scales(tmp_path: Path) -> None:
    codes = torch.randn(160, 130).to(torch.float8_e4m3fn)
    scales = torch.rand(scale_shape((160, 130)))
    tensors = {Q_PROJ: codes, scale_name(Q_PROJ): scales, NORM: torch.randn(8)}
    with open_file(save(tensors, tmp_path / "pytorch_model.bin")) as reader:
        spread = scales.repeat_interleave(128, 0)[:160].repeat_interleave(128, 1)[:, :130]
        expected = (codes.float() * spread).bfloat16()
        assert torch.equal(reader.read_weight(Q_PROJ, torch.bfloat16), expected)
        out = torch.empty(8, dtype=torch.float64)
        reader.read_weight_into(NORM, out)
        assert torch.equal(out, tensors[NORM].double())


@pytest.mark.parametrize("rows", [range(0, 1), range(2, 131), range(130, 160), range(160)])
def test_rows_of_a_weight_are_those_of_the_whole(rows: range, tmp_path: Path) -> None:
    tensors = {
        "contiguous": torch.randn(160, 130),
        "transposed": torch.randn(130, 160).T,
        "vector": torch.randn(160),
        Q_PROJ: torch.randn(160, 130).to(torch.float8_e4m3fn),
        scale_name(Q_PROJ): torch.rand(scale_shape((160, 130))),
    }
    with open_file(save(tensors, tmp_path / "pytorch_model.bin")) as reader:
        for name in ("contiguous", "transposed", "vector", Q_PROJ):
            whole = reader.read_weight(name, torch.float32)
            out = torch.empty(len(rows), *whole.shape[1:])
            reader.read_weight_into(name, out, rows=rows)
            assert torch.equal(out, whole[rows.start : rows.stop])
        out = torch.empty(len(rows), 3)
        reader.read_weight_into("transposed", out, rows=rows, columns=range(4, 7))
        assert torch.equal(out, tensors["transposed"][rows.start : rows.stop, 4:7])


def test_folder_of_shards_is_read_with_and_without_its_index(tmp_path: Path) -> None:
    first, second = (f"pytorch_model-0000{number}-of-00002.bin" for number in (1, 2))
    save({Q_PROJ: torch.randn(8, 8)}, tmp_path / first)
    save({NORM: torch.randn(8)}, tmp_path / second)
    save({"seed": 1}, tmp_path / "training_args.bin")
    for weight_map in ({Q_PROJ: first, NORM: second}, None):
        if weight_map is not None:
            text = json.dumps({"metadata": None, "weight_map": weight_map})
            (tmp_path / "pytorch_model.bin.index.json").write_text(text)
        else:
            (tmp_path / "pytorch_model.bin.index.json").unlink()
        with CheckpointReader(tmp_path, index=find_index(tmp_path)) as reader:
            assert (reader.index.names, reader.index.layers) == ((Q_PROJ, NORM), (0,))
            assert reader.index[Q_PROJ].file.name == first
            assert reader.read(NORM).shape == (8,)


@pytest.mark.parametrize("key", ["state_dict", "model_state_dict", "model", "module"])
def test_nested_state_dict_is_found_beside_other_values(key: str, tmp_path: Path) -> None:
    value = {"epoch": 3, "optimizer": {"state": {0: {"m": torch.ones(2)}}}, key: {"x": torch.ones(2)}}
    with open_file(save(value, tmp_path / "last.pt")) as reader:
        assert reader.index.names == ("x",)


def test_values_beside_the_tensors_are_logged_and_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    path = save({"x": torch.ones(2), "step": 7, "extra_state": b"abc"}, tmp_path / "last.pt")
    with open_file(path) as reader:
        assert reader.index.names == ("x",)
    assert "left out, as they are not tensors of its state dict: step, extra_state" in caplog.text


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (torch.ones(2), "a single tensor"),
        # Lists that hold each other: their text would have no end.
        (knot(), "found list of length 60"),
        ({}, "a dict with nothing"),
        ({"epoch": 3, "args": {"lr": 0.1}}, "a dict with epoch, args"),
        ({"state_dict": ONE, "ema": torch.ones(2)}, "several places: state_dict, and beside them"),
        ({"model": {"x": torch.ones(2)}, "state_dict": ONE}, "several places: state_dict, model"),
        (torch.nn.Linear(2, 2), "an object of torch.nn.modules.linear.Linear"),
    ],
)
def test_file_without_one_state_dict_is_refused(value: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"holds no state dict.*{found}"):
        open_file(save(value, tmp_path / "pytorch_model.bin"))


@pytest.mark.parametrize(
    ("name", "tensor", "found"),
    [
        ((1, 2), torch.ones(2), "a tuple of length 2 .a key that is not text"),
        ("x", torch.eye(2).to_sparse(), r"x \(sparse, nested or quantised\)"),
        ("x", torch.ones(2, device="meta"), r"x \(without data\)"),
        (3, torch.ones(2), "3 .a key that is not text"),
    ],
)
def test_tensor_that_cannot_be_read_is_named(name: Any, tensor: Any, found: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"cannot read.*{found}.*safetensors"):
        open_file(save({"fine": torch.ones(1), name: tensor}, tmp_path / "pytorch_model.bin"))


def test_function_in_a_file_is_not_called(tmp_path: Path) -> None:
    victim = tmp_path / "kept"
    victim.mkdir()
    value = {**ONE, "attack": Call(shutil.rmtree, str(victim))}
    with open_file(save(value, tmp_path / "pytorch_model.bin")) as reader:
        assert torch.equal(reader.read("x"), torch.ones(2))
    assert victim.is_dir()
    path = save({**ONE, "attack": Call(os.rmdir, str(victim))}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin.*module posix is blocked\. Fetch"):
        open_file(path)
    assert victim.is_dir()


def test_file_that_is_not_whole_or_of_an_old_torch_says_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    torch.save(ONE, path, _use_new_zipfile_serialization=False)
    with pytest.raises(
        CheckpointError, match=r"no zip archive; if torch before 1\.6 wrote it, load and save"
    ):
        open_file(path)
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")
    with pytest.raises(CheckpointError, match="Git LFS pointer"):
        open_file(path)
    content = save({"a": torch.ones(8), "b": torch.ones(3)}, path).read_bytes()
    for length in range(0, len(content), 47):
        path.write_bytes(content[:length])
        with pytest.raises(CheckpointError, match=r"pytorch_model\.bin is damaged.*Fetch the file again"):
            open_file(path)


def test_numpy_array_that_was_a_tensor_is_named(tmp_path: Path) -> None:
    array = np.ones((2, 3), np.float32)
    tensor = Call(torch._utils._rebuild_device_tensor_from_numpy, array, torch.float32, "xla:0", False)
    path = save({"fine": torch.ones(2, 3), "x": tensor}, tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"cannot read.*found x \(inside the pickle\)"):
        open_file(path)


@pytest.mark.parametrize("b", [torch.full((64,), 9.0), torch.full((8, 8), 9.0).t()], ids=["whole", "view"])
def test_flipped_bit_is_found_when_its_tensor_is_read(b: torch.Tensor, tmp_path: Path) -> None:
    path = save({"a": torch.full((64,), 7.0), "b": b}, tmp_path / "pytorch_model.bin")
    content = bytearray(path.read_bytes())
    content[content.index(torch.full((64,), 9.0).numpy().tobytes()) + 9] ^= 1
    path.write_bytes(content)
    with open_file(path) as reader:
        assert torch.equal(reader.read("a"), torch.full((64,), 7.0))
        with pytest.raises(CheckpointError, match=r"b in .* is damaged: expected checksum"):
            reader.read("b")


def test_changed_byte_is_read_or_refused(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        path = save({"a": torch.ones(4), "b": torch.ones(2, 3).t()}, tmp_path / "x.bin")
    finally:
        torch.serialization.set_crc32_options(before)
    content = path.read_bytes()
    refused = 0
    for position in range(0, len(content), 17):
        for value in (0, 0x52, 0xFF):  # 0x52 is REDUCE
            path.write_bytes(content[:position] + bytes([value]) + content[position + 1 :])
            try:
                with open_file(path) as reader:
                    for name in reader.index.names:
                        reader.read(name)
            except CheckpointError:
                refused += 1
    assert refused > 15


@pytest.mark.parametrize(
    ("tensor", "found"),
    [(torch.ones(1000), "the file ends after"), (torch.ones(100, 100).t(), "became shorter")],
)
def test_file_that_became_shorter_is_named(tensor: torch.Tensor, found: str, tmp_path: Path) -> None:
    path = save({"a": tensor}, tmp_path / "pytorch_model.bin")
    with open_file(path) as reader:
        os.truncate(path, 500)
        with pytest.raises(CheckpointError, match=rf"a cannot be read from .*{found}"):
            reader.read("a")


def test_checksum_covers_a_whole_storage_only(tmp_path: Path) -> None:
    base = torch.arange(64.0)
    path = save({"part": base[8:16], "whole": base}, tmp_path / "pytorch_model.bin")
    with open_file(path) as reader:
        part, whole = reader.index["part"], reader.index["whole"]
        assert isinstance(part, PickledEntry)
        assert isinstance(whole, PickledEntry)
        assert (part.crc32, whole.crc32) == (None, zlib.crc32(base.numpy().tobytes()))
        assert torch.equal(reader.read("part"), base[8:16])


# Modules that torch.save pickled whole are told by name, and nothing in them is run.


@pytest.fixture
def pickled(tmp_path: Path) -> Path:
    path = tmp_path / "module.pt"
    torch.save(torch.nn.Linear(2, 2), path)
    return path


def test_other_files_are_none(tmp_path: Path) -> None:
    torch.save({"weight": torch.zeros(2)}, tmp_path / "state.pt")
    (tmp_path / "port.py").write_text("class Layer: ...")
    (tmp_path / "broken.pt").write_bytes(b"PK\x03\x04 no archive")
    for path in (*tmp_path.iterdir(), tmp_path, tmp_path / "gone.pt"):
        assert find_pickled_module(path) is None
        refuse_pickled_module(path)


def run(command: Any, *words: object) -> str:
    result = command(mm2_test, "single-layer", "--layer", 0, "--seq-len", 8, "--backend", "cpu", *words)
    assert result.exit_code == 3
    return str(result.stderr)


def test_checkpoint_that_is_a_pickled_module_names_itself(
    command: Any, toy: Path, pickled: Path, tmp_path: Path
) -> None:
    assert "found a pickled module, torch.nn.modules.linear.Linear" in run(command, "--model", pickled)
    (tmp_path / "config.json").write_text((toy / "config.json").read_text())
    folder = run(command, "--model", tmp_path)
    assert "found a pickled module, module.pt: torch.nn.modules.linear.Linear" in folder


def test_port_that_is_a_pickled_module_names_itself(command: Any, toy: Path, pickled: Path) -> None:
    disguised = pickled.with_suffix(".py")
    disguised.write_bytes(pickled.read_bytes())
    for path in (pickled, disguised):
        told = run(command, "--model", toy, "--target", f"{path}:Linear")
        assert "found a pickled module of the class torch.nn.modules.linear.Linear" in told
        assert "as in port.py:Linear" in told
