"""A small model with a golden, a run, a plan, slices and dumps, whose files are damaged; and mm2's commands on them."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click
import click.testing
import torch

from compare.diagnosis.cli import main as mm2_diagnose
from gpu_reference.cli import main as mm2_gpu
from minimax_tools.cli import mm2_split
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from neuron.cli import main as mm2_test

_MODEL = SyntheticModel(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=4,
    intermediate_size=32,
    vocab_size=300,
)
_LENGTHS = "9,5"
_MODULE = "model.layers.0.input_layernorm"
_BUCKET = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The end of a command: its exit code, both streams as one text, and the seconds that it took."""

    exit_code: int
    text: str
    seconds: float
    is_traceback: bool = False  # whether an exception left the command

    @property
    def one_line(self) -> str:
        """The text without line breaks, which fall anywhere."""
        return " ".join(self.text.split())


def run_command(command: click.Command, *words: object, folder: Path | None = None) -> Outcome:
    """Run a command in this process, in a working folder if one is given."""
    started = time.monotonic()
    with _working_in(folder):
        result = click.testing.CliRunner().invoke(command, [str(word) for word in words])
    is_traceback = result.exception is not None and not isinstance(result.exception, SystemExit)
    text = f"{result.output}{result.exception!r}" if is_traceback else result.output
    seconds = time.monotonic() - started
    return Outcome(exit_code=result.exit_code, text=text, seconds=seconds, is_traceback=is_traceback)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostileWorld:
    """The files in a folder."""

    folder: Path

    @property
    def model(self) -> Path:
        """The checkpoint."""
        return self.folder / "model"

    @property
    def golden(self) -> Path:
        """A certified golden with generated tokens."""
        return self.folder / "golden"

    @property
    def run(self) -> Path:
        """A sweep of mm2's own layer, which passes."""
        return self.folder / "run"

    @property
    def plan(self) -> Path:
        """A plan for two nodes."""
        return self.folder / "plan.json"

    @property
    def slices(self) -> Path:
        """The slices of the plan."""
        return self.folder / "slices"

    def dump(self, name: str) -> Path:
        """Return the folder of a dump: one module's output, in the layout of a tool."""
        return self.folder / "dumps" / name

    @classmethod
    def make(cls, folder: Path) -> HostileWorld:
        """Make all files in an empty folder.

        Raises:
            AssertionError: A command failed.
        """
        world = cls(folder=folder)
        synthesize(world.model, model=_MODEL, dtype=torch.bfloat16, shard_size_bytes=100_000, seed=0)
        model = ("--model", world.model, "--quiet")
        lengths = ("--seq-len", _LENGTHS, "--max-new-tokens", 2)
        nodes = ("--node", "a:memory=1GB,tflops=3", "--node", "b:memory=1GB")
        _make(mm2_gpu, "full", *model, *lengths, "--output-dir", world.golden)
        _make(mm2_gpu, "certify", *model, "--golden", world.golden)
        port = ("--backend", "cpu", "--golden", world.golden)
        _make(mm2_test, "sweep", *model, *port, "--output-dir", world.run)
        _make(mm2_diagnose, "--golden", world.golden, "--run", world.run, *model)
        _make(mm2_split, "plan", *model, *nodes, "--output", world.plan)
        _make(mm2_split, "extract", "--plan", world.plan, "--all-nodes", "--quiet", "--output", world.slices)
        _make_dumps(world)
        return world


def _make(command: click.Command, *words: object) -> None:
    outcome = run_command(command, *words)
    assert outcome.exit_code == 0, f"{' '.join(map(str, words))}: {outcome.text}"


@contextlib.contextmanager
def _working_in(folder: Path | None) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder or before)
    try:
        yield
    finally:
        os.chdir(before)


def _make_dumps(world: HostileWorld) -> None:
    """Write a dump of each tool's layout."""
    rows = torch.randn(2, _BUCKET, _MODEL.hidden_size, generator=torch.Generator().manual_seed(0))
    _make_nxdi(world.dump("nxdi"), rows)
    _make_vllm_neuron(world.dump("vllm-neuron"), rows)
    _make_msprobe(world.dump("msprobe"), rows)
    _make_sglang(world.dump("sglang"), rows)


def _make_nxdi(folder: Path, rows: torch.Tensor) -> None:
    name = f"captured_tensors_cte_step_1_module_{_MODULE}_output.pt"
    folder.mkdir(parents=True)
    torch.save(rows, folder / name)
    entry = {"step": 1, "phase": "cte", "tensor_type": "output", "module_name": _MODULE}
    record = {"capture_session": {"version": "1.0"}, "tensors": {name: entry}}
    (folder / "capture_metadata.json").write_text(json.dumps(record))


def _make_vllm_neuron(folder: Path, rows: torch.Tensor) -> None:
    a_pass = folder / "dp0" / f"prefill_s{_BUCKET}_0"
    (a_pass / _MODULE).mkdir(parents=True)
    torch.save(rows.flatten(0, 1)[:_BUCKET], a_pass / _MODULE / "rank0.pt")
    positions = [*range(9), *range(5), 0, 0]
    record = {"req_ids": ["0", "1"], "positions": positions, "dp_rank": 0}
    (a_pass / f"{a_pass.name}_meta.json").write_text(json.dumps(record))


def _make_msprobe(folder: Path, rows: torch.Tensor) -> None:
    data = folder / "step0" / "rank0" / "dump_tensor_data"
    data.mkdir(parents=True)
    torch.save(rows, data / f"Module.{_MODULE}.MiniMaxM2RMSNorm.forward.0.output.0.pt")
    (folder / "step0" / "rank0" / "dump.json").write_text(json.dumps({"task": "tensor", "data": {}}))


def _make_sglang(folder: Path, rows: torch.Tensor) -> None:
    folder.mkdir(parents=True)
    name = f"non_intrusive__{_MODULE}.output"
    meta = {"step": 0, "rank": 0, "dump_index": 1, "name": name, "world_size": 1}
    meta["sglang_parallel_info"] = {"tp_rank": 0, "tp_size": 1}
    file = f"step=0___rank=0___dump_index=1___name={name}.pt"
    torch.save({"value": rows.flatten(0, 1)[:14], "meta": meta}, folder / file)
