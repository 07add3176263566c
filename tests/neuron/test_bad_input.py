"""Bad input from the command line: one message that names the thing and the next step, and the exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

INDEX = "model.safetensors.index.json"
LAYER_0 = ("single-layer", "--layer", 0)

# Runs a layer as the root of a user's own, who mounts a small disk that nobody else sees.
NO_DISK = 77
ON_SMALL_DISK = f"""
import ctypes, os, runpy, subprocess, sys
from pathlib import Path
CLONE_NEWUSER, CLONE_NEWNS = 0x10000000, 0x00020000
user, group = os.getuid(), os.getgid()
if ctypes.CDLL(None).unshare(CLONE_NEWUSER | CLONE_NEWNS) != 0:
    sys.exit({NO_DISK})
Path("/proc/self/setgroups").write_text("deny")
Path("/proc/self/uid_map").write_text(f"0 {{{{user}}}} 1")
Path("/proc/self/gid_map").write_text(f"0 {{{{group}}}} 1")
mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", {{disk!r}}]
if subprocess.run(mount, capture_output=True).returncode != 0:
    sys.exit({NO_DISK})
sys.argv = ["", "single-layer", "--layer", "0", "--model", {{model!r}}, "--output-dir", {{disk!r}} + "/run"]
runpy.run_module("neuron", run_name="__main__", alter_sys=True)
"""


def refused(result: Any, *texts: str, exit_code: int) -> None:
    """Assert that a command is refused with one message, no traceback, and nothing on stdout."""
    stderr = result.stderr
    assert "Traceback" not in stderr
    for text in texts:
        assert text in stderr
    code = result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code
    assert code == exit_code
    assert result.stdout == ""


@pytest.fixture
def broken(toy: Path, tmp_path: Path) -> Path:
    """A copy of the toy, to be damaged."""
    return shutil.copytree(toy, tmp_path / "broken")


OUT_OF_RANGE = ("out of range", "layers 0 to 3", "config.json")
OWN_ROWS = ("--golden gives the token rows", "Leave out --prompt")


@pytest.mark.parametrize(
    ("words", "texts", "exit_code"),
    [
        ("single-layer --layer 0", ("--model",), 2),
        ("single-layer --layer 0 --model {tmp}/nowhere", ("nowhere", "mm2-split synthesize --output DIR"), 3),
        ("single-layer --layer 0 --model {tmp}", ("{tmp}", "no config.json"), 3),
        ("single-layer --layer 4 --model {toy} --golden {golden}", OUT_OF_RANGE, 2),
        ("sweep --layers 2:5 --model {toy} --golden {golden}", OUT_OF_RANGE, 2),
        ("multi-layer --layers 0:9 --model {toy} --golden {golden}", OUT_OF_RANGE, 2),
        ("sweep --model {toy} --golden {tmp}/nothing", ("nothing", "mm2-gpu extract-all"), 3),
        ("sweep --model {toy}", ("golden's own input", "--golden DIR"), 2),
        ("component --layer 0 --component moe --model {toy}", ("golden's values", "--golden DIR"), 2),
        (
            "single-layer --layer 0 --model {toy} --golden {golden} --random-input",
            ("--random-input and --golden", "Use one of them"),
            2,
        ),
        ("full --model {toy} --random-input", ("--random-input", "--seq-len"), 2),
        ("single-layer --layer 0 --model {toy} --golden {golden} --prompt Hello", OWN_ROWS, 2),
        ("single-layer --layer 0 --model {toy} --golden {golden} --seq-len 5", OWN_ROWS, 2),
        ("single-layer --layer 0 --model {toy} --golden {golden} --pad-to 64", OWN_ROWS, 2),
        (
            "single-layer --layer 0 --model {toy} --backend cpu --tp-degree 4 --ep-degree 3",
            ("4 ranks do not divide into 3 groups", "--ep-degree that divides 4"),
            2,
        ),
        ("single-layer --layer -1 --model {toy}", ("--layer", "-1"), 2),
        ("single-layer --layer 0 --model {toy} --dtype float16", ("--dtype", "bfloat16"), 2),
        ("single-layer --layer 0 --model {toy} --backend tpu", ("'tpu'", "neuron-xla"), 2),
        (
            "single-layer --layer 0 --model {toy} --target nosuch",
            ("'nosuch' is unknown", "builtin, reference, nxdi:PATH.py:NAME", "port.py:DecoderLayer"),
            2,
        ),
        (
            "single-layer --layer 0 --model {toy} --target no.such:Port",
            ("cannot be imported", "PYTHONPATH"),
            3,
        ),
        (
            "single-layer --layer 0 --model {toy} --target nowhere.py:Port",
            ("nowhere.py, named by --target, does not exist", "--target PATH.py:NAME"),
            3,
        ),
        (
            "single-layer --layer 0 --model {toy} --output-dir {tmp}/file/below",
            ("{tmp}/file/below", "another --output-dir"),
            3,
        ),
    ],
)
def test_options_that_nothing_can_run_with(
    run: Any, toy: Path, golden: Path, tmp_path: Path, words: str, texts: tuple[str, ...], exit_code: int
) -> None:
    (tmp_path / "file").write_text("")
    result = run(*(word.format(toy=toy, golden=golden, tmp=tmp_path) for word in words.split()))
    refused(result, *(text.format(tmp=tmp_path) for text in texts), exit_code=exit_code)


class TestModel:
    def test_truncated_shard(self, run: Any, broken: Path) -> None:
        shard = sorted(broken.glob("*.safetensors"))[1]
        os.truncate(shard, shard.stat().st_size - 10)
        refused(run(*LAYER_0, "--model", broken), shard.name, "bytes", "etch", exit_code=3)

    def test_missing_shard(self, run: Any, broken: Path) -> None:
        shard = sorted(broken.glob("*.safetensors"))[1]
        shard.unlink()
        refused(run(*LAYER_0, "--model", broken), shard.name, "etch", exit_code=3)

    def test_missing_tensor(self, run: Any, broken: Path) -> None:
        name = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
        index = json.loads((broken / INDEX).read_text())
        shard = broken / index["weight_map"].pop(name)
        tensors = load_file(shard)
        del tensors[name]
        save_file(tensors, shard)
        (broken / INDEX).write_text(json.dumps(index))
        refused(run(*LAYER_0, "--model", broken), name, "found nothing", "etch", exit_code=3)


class TestGolden:
    def test_golden_in_another_dtype_is_refused_before_anything_runs(
        self, run: Any, toy: Path, golden: Path, tmp_path: Path
    ) -> None:
        result = run("sweep", "--model", toy, "--golden", golden, "--dtype", "float32")
        refused(result, "another dtype", "expected bfloat16, found float32", "--dtype bfloat16", exit_code=3)
        assert not (tmp_path / "captures").exists()

    def test_golden_of_another_model_is_refused_before_anything_runs(
        self, run: Any, golden: Path, tmp_path: Path
    ) -> None:
        other = tmp_path / "other"
        synthesize(other, model=SyntheticModel(), dtype=torch.bfloat16, shard_size_bytes=None, seed=1)
        result = run("sweep", "--model", other, "--golden", golden)
        refused(result, str(golden), "another model", "layer 0 has other norms", "--model", exit_code=3)
        assert not (tmp_path / "captures").exists()

    def test_golden_without_the_layer(self, run: Any, make_golden: Any, toy: Path) -> None:
        part = ("--layer", 1, "--seq-len", 6, "--sites", "layer", "--noise-floor", "off")
        directory = make_golden(toy, *part, command="single-layer")
        common = ("--model", toy, "--golden", directory)
        sweep = run("sweep", *common)
        refused(
            sweep, f"{directory} lacks layer 0, layer 2, layer 3", "layers 1 to 1", "extract-all", exit_code=3
        )
        component = run("component", "--layer", 1, "--component", "moe", *common)
        refused(component, "lacks post_norm of layer 1", "--sites all", exit_code=3)
        assert run("sweep", "--layers", "1:2", *common).exit_code == 0


class TestTarget:
    @pytest.mark.parametrize(
        ("component", "site"),
        [("attention", "input_norm"), ("moe", "post_norm"), ("experts", "router_experts")],
    )
    def test_black_box_cannot_run_a_component(
        self, run: Any, write_port: Any, toy: Path, golden: Path, component: str, site: str
    ) -> None:
        target = write_port("class Port(ReferenceLayer):\n    sites = {}\n")
        arguments = ("component", "--layer", 0, "--component", component, "--model", toy, "--golden", golden)
        result = run(*arguments, "--target", target)
        refused(
            result,
            "cannot take the golden's values at",
            site,
            "`sites`",
            "mm2-test single-layer",
            exit_code=3,
        )

    def test_submodule_that_the_port_does_not_call_cannot_be_fed(
        self, run: Any, write_port: Any, toy: Path, golden: Path
    ) -> None:
        source = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        fused = self.post_attention_layernorm.forward(residual)
        return residual + self.block_sparse_moe(fused)
"""
        arguments = ("component", "--layer", 0, "--component", "moe", "--model", toy, "--golden", golden)
        result = run(*arguments, "--target", write_port(source))
        refused(result, "took no golden value at post_norm", "`sites`", exit_code=3)

    def test_no_such_name(self, run: Any, write_port: Any, toy: Path) -> None:
        target = write_port("class Layer(ReferenceLayer): pass\n")
        result = run(*LAYER_0, "--model", toy, "--target", target)
        refused(result, "has no 'Port' to call", "the classes Layer", ":NAME", exit_code=3)

    def test_names_and_shapes_of_weights(self, run: Any, write_port: Any, toy: Path) -> None:
        source = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.q_norm.weight = nn.Parameter(torch.empty(64))
        self.shared_expert = nn.Linear(256, 256)
        del self.input_layernorm
"""
        result = run(*LAYER_0, "--model", toy, "--target", write_port(source))
        refused(
            result,
            "Port, layer 0: the weights do not fit",
            "2 missing: shared_expert.weight, shared_expert.bias",
            "1 unexpected: input_layernorm.weight",
            "1 of another shape: self_attn.q_norm.weight (expected [64], found [512])",
            "convert_state_dict(tensors, config, layer_idx)",
            exit_code=3,
        )


class TestBackend:
    @pytest.mark.skipif(
        importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed here"
    )
    def test_xla_without_torch_xla(self, run: Any, toy: Path) -> None:
        result = run(*LAYER_0, "--model", toy, "--backend", "xla-cpu")
        refused(result, "torch_xla", "pip install 'torch==2.9.*' 'torch_xla==2.9.*'", exit_code=3)

    def test_several_ranks_of_xla_on_the_cpu(
        self, needs_xla: None, run: Any, toy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        result = run(*LAYER_0, "--model", toy, "--backend", "xla-cpu")
        expected = ("2 ranks on xla-cpu", "WORLD_SIZE=2", "silently wrong", "without torchrun: --tp-degree")
        refused(result, *expected, exit_code=3)

    def test_ranks_that_cannot_find_each_other(
        self, run: Any, toy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        result = run(*LAYER_0, "--model", toy, "--backend", "cpu")
        refused(result, "WORLD_SIZE is 2", "no RANK, MASTER_ADDR, MASTER_PORT", "torchrun", exit_code=2)

    @pytest.mark.parametrize(("launched", "asked_for"), [(4, 8), (6, 4), (4, 2)])
    def test_other_ranks_than_were_launched(
        self, run: Any, toy: Path, monkeypatch: pytest.MonkeyPatch, launched: int, asked_for: int
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(launched))
        result = run(*LAYER_0, "--model", toy, "--backend", "cpu", "--tp-degree", asked_for)
        found = f"expected WORLD_SIZE={asked_for}, found WORLD_SIZE={launched}"
        refused(result, found, f"torchrun --nproc-per-node {asked_for}", exit_code=2)

    @pytest.mark.parametrize("backend", ["neuron", "neuron-xla"])
    @pytest.mark.skipif(any(Path("/dev").glob("neuron*")), reason="this machine has a Neuron device")
    def test_not_here(self, run: Any, toy: Path, backend: str) -> None:
        result = run(*LAYER_0, "--model", toy, "--backend", backend)
        refused(result, f"the backend {backend} is not available here", "--backend", exit_code=3)


class TestOutput:
    def test_directory_with_something_else_in_it(self, run: Any, toy: Path, tmp_path: Path) -> None:
        directory = tmp_path / "thesis"
        directory.mkdir()
        (directory / "chapter.tex").write_text("years of work")
        result = run(*LAYER_0, "--model", toy, "--output-dir", directory)
        refused(result, "thesis is not empty and holds no capture", "another --output-dir", exit_code=3)
        assert (directory / "chapter.tex").read_text() == "years of work"

    @pytest.mark.slow
    def test_no_space_left(self, forked_python: Any, toy: Path, tmp_path: Path) -> None:
        disk = tmp_path / "disk"
        disk.mkdir()
        done = forked_python(ON_SMALL_DISK.format(disk=str(disk), model=str(toy)))
        if done.returncode == NO_DISK:
            pytest.skip("no small disk: a mount of one's own is not allowed here")
        refused(
            done, f"no space left to write {disk}/run/layer_0.safetensors", "Free some space", exit_code=3
        )


def test_errors_are_json_where_json_was_asked_for(run: Any, toy: Path) -> None:
    result = run(*LAYER_0, "--model", toy, "--target", "nowhere.py:Port", "--json")
    record = json.loads(result.stdout)
    assert (record["exit_code"], record["verdict"], result.exit_code) == (3, "incomparable", 3)
    assert "nowhere.py" in record["error"]
