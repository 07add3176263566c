"""Bad input from the command line: one message that names the thing and the next step, and the exit code."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

INDEX = "model.safetensors.index.json"
EXPERT = "model.layers.0.block_sparse_moe.experts.3.w2.weight"
LAYER_0 = ("single-layer", "--layer", 0)


def refused(result: Any, *texts: str, exit_code: int) -> None:
    """Assert that a command is refused with one message, no traceback, and nothing on stdout."""
    stderr = result.stderr
    assert "Traceback" not in stderr
    for text in texts:
        assert text in stderr
    assert (result.exit_code, result.stdout) == (exit_code, "")


OUT_OF_RANGE = ("out of range", "layers 0 to 3", "config.json")
OWN_ROWS = ("--golden gives the token rows", "Leave out --prompt")
ONE_OF_THEM = ("--random-input and --golden", "Use one of them")
TARGETS = ("'nosuch' is unknown", "builtin, reference, nxdi:PATH.py:NAME", "port.py:DecoderLayer")
ON_GOLDEN = "--model {model} --golden {golden}"
LAYER = "single-layer --layer 0 --model {model}"


@pytest.mark.parametrize(
    ("words", "texts", "exit_code"),
    [
        ("single-layer --layer 0", ("--model",), 2),
        ("single-layer --layer 0 --model {tmp}/nowhere", ("nowhere", "mm2-split synthesize --output DIR"), 3),
        ("single-layer --layer 0 --model {tmp}", ("{tmp}", "no config.json"), 3),
        (f"single-layer --layer 4 {ON_GOLDEN}", OUT_OF_RANGE, 2),
        (f"sweep --layers 2:5 {ON_GOLDEN}", OUT_OF_RANGE, 2),
        (f"multi-layer --layers 0:9 {ON_GOLDEN}", OUT_OF_RANGE, 2),
        ("sweep --model {model} --golden {tmp}/nothing", ("nothing", "mm2-gpu extract-all"), 3),
        ("sweep --model {model}", ("golden's own input", "--golden DIR"), 2),
        ("component --layer 0 --component moe --model {model}", ("golden's values", "--golden DIR"), 2),
        ("full --model {model} --random-input", ("--random-input", "--seq-len"), 2),
        (f"single-layer --layer 0 {ON_GOLDEN} --random-input", ONE_OF_THEM, 2),
        (f"single-layer --layer 0 {ON_GOLDEN} --prompt Hello", OWN_ROWS, 2),
        (f"single-layer --layer 0 {ON_GOLDEN} --seq-len 5", OWN_ROWS, 2),
        (f"single-layer --layer 0 {ON_GOLDEN} --pad-to 64", OWN_ROWS, 2),
        (
            f"{LAYER} --backend cpu --tp-degree 4 --ep-degree 3",
            ("4 ranks do not divide into 3 groups", "--ep-degree that divides 4"),
            2,
        ),
        ("single-layer --layer -1 --model {model}", ("--layer", "-1"), 2),
        (f"{LAYER} --dtype float16", ("--dtype", "bfloat16"), 2),
        (f"{LAYER} --backend tpu", ("'tpu'", "neuron-xla"), 2),
        (f"{LAYER} --target nosuch", TARGETS, 2),
        (f"{LAYER} --target no.such:Port", ("cannot be imported", "PYTHONPATH"), 3),
        (
            f"{LAYER} --target nowhere.py:Port",
            ("nowhere.py, named by --target, does not exist", "--target PATH.py:NAME"),
            3,
        ),
        (f"{LAYER} --output-dir {{tmp}}/file/below", ("{tmp}/file/below", "another --output-dir"), 3),
    ],
)
def test_options_that_nothing_can_run_with(
    run: Any,
    small_fp8: Path,
    small_golden: Path,
    tmp_path: Path,
    words: str,
    texts: tuple[str, ...],
    exit_code: int,
) -> None:
    (tmp_path / "file").write_text("")
    folders = {"model": small_fp8, "golden": small_golden, "tmp": tmp_path}
    result = run(*(word.format(**folders) for word in words.split()))
    refused(result, *(text.format(tmp=tmp_path) for text in texts), exit_code=exit_code)


def truncate(shard: Path) -> None:
    os.truncate(shard, shard.stat().st_size - 10)


def lose_expert(shard: Path) -> None:
    """Take an expert's matrix of layer 0 out of its shard and out of the index."""
    index = json.loads((shard.parent / INDEX).read_text())
    shard = shard.parent / index["weight_map"].pop(EXPERT)
    tensors = load_file(shard)
    del tensors[EXPERT]
    save_file(tensors, shard)
    (shard.parent / INDEX).write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("damage", "texts"),
    [
        (truncate, ("{shard}", "bytes", "etch")),
        (Path.unlink, ("{shard}", "etch")),
        (lose_expert, (EXPERT, "found nothing", "etch")),
    ],
)
def test_damaged_checkpoint(
    run: Any, toy: Path, tmp_path: Path, damage: Callable[[Path], None], texts: tuple[str, ...]
) -> None:
    broken = shutil.copytree(toy, tmp_path / "broken")
    shard = sorted(broken.glob("*.safetensors"))[1]
    damage(shard)
    result = run(*LAYER_0, "--model", broken)
    refused(result, *(text.format(shard=shard.name) for text in texts), exit_code=3)


class TestGolden:
    def test_golden_in_another_dtype_is_refused_before_anything_runs(
        self, run: Any, on_small: tuple[object, ...], tmp_path: Path
    ) -> None:
        result = run("sweep", *on_small, "--dtype", "float32")
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

    def test_golden_without_the_layer(self, run: Any, make_golden: Any, small_fp8: Path) -> None:
        part = ("--layer", 1, "--seq-len", 6, "--sites", "layer", "--noise-floor", "off")
        directory = make_golden(small_fp8, *part, command="single-layer")
        common = ("--model", small_fp8, "--golden", directory)
        lacks = f"{directory} lacks layer 0, layer 2, layer 3"
        refused(run("sweep", *common), lacks, "layers 1 to 1", "extract-all", exit_code=3)
        component = run("component", "--layer", 1, "--component", "moe", *common)
        refused(component, "lacks post_norm of layer 1", "--sites all", exit_code=3)
        assert run("sweep", "--layers", "1:2", *common).exit_code == 0


# Fuses what it feeds its experts: nobody calls the module of the norm.
UNCALLED_NORM = """
class Port(ReferenceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        normed = self.input_layernorm(hidden_states)
        residual = hidden_states + self.self_attn(normed, attention_mask, position_ids)
        fused = self.post_attention_layernorm.forward(residual)
        return residual + self.block_sparse_moe(fused)
"""
OTHER_WEIGHTS = """
class Port(ReferenceLayer):
    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.self_attn.q_norm.weight = nn.Parameter(torch.empty(64))
        self.shared_expert = nn.Linear(256, 256)
        del self.input_layernorm
"""
CLOSED = "class Port(ReferenceLayer):\n    sites = {}\n"
CANNOT_TAKE = ("cannot take the golden's values at", "`sites`", "mm2-test single-layer")


class TestTarget:
    @pytest.mark.parametrize(
        ("source", "component", "texts"),
        [
            (CLOSED, "attention", (*CANNOT_TAKE, "input_norm")),
            (CLOSED, "moe", (*CANNOT_TAKE, "post_norm")),
            (CLOSED, "experts", (*CANNOT_TAKE, "router_experts")),
            (UNCALLED_NORM, "moe", ("took no golden value at post_norm", "`sites`")),
        ],
    )
    def test_component_that_cannot_be_fed(
        self,
        run: Any,
        write_port: Any,
        on_small: tuple[object, ...],
        source: str,
        component: str,
        texts: tuple[str, ...],
    ) -> None:
        target = ("--target", write_port(source))
        result = run("component", "--layer", 0, "--component", component, *on_small, *target)
        refused(result, *texts, exit_code=3)

    @pytest.mark.parametrize(
        ("source", "texts"),
        [
            (
                "class Layer(ReferenceLayer): pass\n",
                ("has no 'Port' to call", "the classes Layer", ":NAME"),
            ),
            (
                OTHER_WEIGHTS,
                (
                    "Port, layer 0: the weights do not fit",
                    "2 missing: shared_expert.weight, shared_expert.bias",
                    "1 unexpected: input_layernorm.weight",
                    "1 of another shape: self_attn.q_norm.weight (expected [64], found [512])",
                    "convert_state_dict(tensors, config, layer_idx)",
                ),
            ),
        ],
    )
    def test_port_that_cannot_be_built_or_loaded(
        self, run: Any, write_port: Any, toy: Path, source: str, texts: tuple[str, ...]
    ) -> None:
        refused(run(*LAYER_0, "--model", toy, "--target", write_port(source)), *texts, exit_code=3)


class TestBackend:
    @pytest.mark.skipif(
        importlib.util.find_spec("torch_xla") is not None, reason="torch_xla is installed here"
    )
    def test_xla_without_torch_xla(self, run: Any, small: Path) -> None:
        result = run(*LAYER_0, "--model", small, "--backend", "xla-cpu")
        refused(result, "torch_xla", "pip install 'torch==2.9.*' 'torch_xla==2.9.*'", exit_code=3)

    def test_several_ranks_of_xla_on_the_cpu(
        self, needs_xla: None, run: Any, small: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", "2")
        result = run(*LAYER_0, "--model", small, "--backend", "xla-cpu")
        expected = ("2 ranks on xla-cpu", "WORLD_SIZE=2", "silently wrong", "without torchrun: --tp-degree")
        refused(result, *expected, exit_code=3)

    @pytest.mark.parametrize(
        ("launched", "options", "texts"),
        [
            (2, (), ("WORLD_SIZE is 2", "no RANK, MASTER_ADDR, MASTER_PORT", "torchrun")),
            (4, ("--tp-degree", 8), ("expected WORLD_SIZE=8, found WORLD_SIZE=4", "--nproc-per-node 8")),
            (4, ("--tp-degree", 2), ("expected WORLD_SIZE=2, found WORLD_SIZE=4", "--nproc-per-node 2")),
        ],
    )
    def test_other_ranks_than_were_launched(
        self, run: Any, small: Path, monkeypatch: pytest.MonkeyPatch, launched: int, options: Any, texts: Any
    ) -> None:
        monkeypatch.setenv("WORLD_SIZE", str(launched))
        refused(run(*LAYER_0, "--model", small, "--backend", "cpu", *options), *texts, exit_code=2)

    @pytest.mark.parametrize("backend", ["neuron", "neuron-xla"])
    @pytest.mark.skipif(any(Path("/dev").glob("neuron*")), reason="this machine has a Neuron device")
    def test_not_here(self, run: Any, small: Path, backend: str) -> None:
        result = run(*LAYER_0, "--model", small, "--backend", backend)
        refused(result, f"the backend {backend} is not available here", "--backend", exit_code=3)


def test_directory_with_something_else_in_it(run: Any, small: Path, tmp_path: Path) -> None:
    directory = tmp_path / "thesis"
    directory.mkdir()
    (directory / "chapter.tex").write_text("years of work")
    result = run(*LAYER_0, "--model", small, "--output-dir", directory)
    refused(result, "thesis is not empty and holds no capture", "another --output-dir", exit_code=3)
    assert (directory / "chapter.tex").read_text() == "years of work"


def test_errors_are_json_where_json_was_asked_for(run: Any, small: Path) -> None:
    result = run(*LAYER_0, "--model", small, "--target", "nowhere.py:Port", "--json")
    record = json.loads(result.stdout)
    assert (record["exit_code"], record["verdict"], result.exit_code) == (3, "incomparable", 3)
    assert "nowhere.py" in record["error"]
