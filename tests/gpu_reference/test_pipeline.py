"""A golden by several ranks is that of one process, byte for byte, and each rank reads its slice alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch

from gpu_reference.cli import main
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, make_plan
from minimax_tools.partition.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.partition.source import open_source
from minimax_tools.span import Span

REPOSITORY = Path(__file__).parents[2]
ROWS = ("--seq-len", "24,15")


@dataclass(frozen=True, kw_only=True)
class Ran:
    exit_code: int
    stdout: str
    stderr: str


def write_plan(folder: Path, path: Path, *spans: Span) -> PartitionPlan:
    source = open_source(str(folder))
    nodes = [
        Node(name=f"node{number}", memory_bytes=10**12, layers=span) for number, span in enumerate(spans)
    ]
    plan = make_plan(
        model=str(folder),
        config=source.config,
        architecture=source.architecture,
        tensors=source.tensors,
        folder=source.folder,
        planner="manual",
        nodes=nodes,
        workload=Workload(context_length=24, batch_size=2),
    )
    plan.write(path)
    return plan


def start(num_ranks: int, *arguments: object) -> subprocess.Popen[str]:
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(num_ranks),
    ]
    words = [*launcher, "-m", "gpu_reference", "extract-all", *map(str, arguments)]
    return subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait(process: subprocess.Popen[str]) -> Ran:
    stdout, stderr = process.communicate(timeout=600)
    return Ran(exit_code=process.returncode, stdout=stdout, stderr=stderr)


def errors(ran: Ran) -> list[str]:
    return [line for line in ran.stderr.splitlines() if line.startswith("Error:")]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def records(directory: Path) -> dict[str, ReadRecord]:
    return {
        record.node: record for record in map(ReadRecord.read, (directory / RECORDS_FOLDER).glob("*.json"))
    }


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As each rank computes: the number of threads may change sums, and stands in the manifest."""
    threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    yield
    torch.set_num_threads(threads)
    del os.environ["OMP_NUM_THREADS"]
    if variable is not None:
        os.environ["OMP_NUM_THREADS"] = variable


@pytest.fixture(scope="module")
def tied_bf16(toy_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 toy with its embedding for an lm_head."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tied"
    shutil.copytree(toy_bf16, folder)
    (shard,) = folder.glob("*.safetensors")
    tensors = safetensors.torch.load_file(shard)
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


@pytest.fixture(scope="module")
def two_ranks(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path, PartitionPlan]:
    """The FP8 toy by two ranks that hold their slices."""
    folder = tmp_path_factory.mktemp("two_ranks")
    plan = write_plan(toy, folder / "plan.json", Span(0, 1), Span(1, 4))
    arguments = ("--plan", folder / "plan.json", "--model", toy, *ROWS, "--output-dir", folder / "capture")
    return wait(start(2, *arguments, "--json")), folder / "capture", plan


def test_capture_of_two_ranks_has_the_bytes_of_one_process(
    two_ranks: tuple[Ran, Path, PartitionPlan], toy: Path, tmp_path: Path, command: Any
) -> None:
    ran, directory, _ = two_ranks
    assert ran.exit_code == 0, ran.stderr
    command(main, "extract-all", "--model", toy, *ROWS, "--stream", "on", "--quiet", "--output-dir", tmp_path)
    assert contents(directory) == contents(tmp_path)


def test_each_rank_reads_its_slice_and_every_tensor_of_it_once(
    two_ranks: tuple[Ran, Path, PartitionPlan],
) -> None:
    _, directory, plan = two_ranks
    found = records(directory)
    for part in plan.used:
        record = found[part.node.name]
        assert set(record.tensors) == set(part.names)
        assert record.bytes_read == record.bytes_asked == part.cost.stored_bytes


def test_results_and_progress_come_from_rank_0_alone(two_ranks: tuple[Ran, Path, PartitionPlan]) -> None:
    ran, _, _ = two_ranks
    assert json.loads(ran.stdout)["layers"]
    for layer in range(4):
        assert ran.stderr.count(f"Layer {layer} (") == 1


@pytest.fixture(scope="module")
def one_slice(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(toy, path, Span(0, 4))
    return path


@pytest.mark.parametrize("mode", ["on", "auto"])
def test_plan_of_one_slice_runs_without_torchrun(
    toy: Path, one_slice: Path, tmp_path: Path, command: Any, mode: str
) -> None:
    common = ("extract-all", "--model", toy, *ROWS, "--quiet", "--stream", mode)
    result = command(main, *common, "--plan", one_slice, "--output-dir", tmp_path / "plan")
    assert result.exit_code == 0, result.output
    command(main, *common, "--output-dir", tmp_path / "plain")
    assert contents(tmp_path / "plan") == contents(tmp_path / "plain")
    record = records(tmp_path / "plan")["node0"]
    assert record.bytes_read == PartitionPlan.read(one_slice).used[0].cost.stored_bytes


def test_plan_of_several_slices_without_torchrun_is_refused(toy: Path, tmp_path: Path, command: Any) -> None:
    write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    result = command(main, "extract-all", "--model", toy, *ROWS, "--plan", tmp_path / "plan.json")
    assert result.exit_code == 2
    assert "the plan has 2 slices for 1 rank" in result.stderr
    assert "torchrun --nproc-per-node 2 -m gpu_reference extract-all" in result.stderr


def test_plan_of_another_checkpoint_is_refused(
    toy_bf16: Path, one_slice: Path, tmp_path: Path, command: Any
) -> None:
    common = ("extract-all", "--model", toy_bf16, *ROWS, "--output-dir", tmp_path / "capture")
    result = command(main, *common, "--plan", one_slice)
    assert result.exit_code == 3
    assert "which the checkpoint lacks" in result.stderr
    assert not (tmp_path / "capture").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--slices", "."], "--slices belongs to a plan"),
        (["--plan", "PLAN", "--no-save"], "--plan writes a capture"),
        (["--plan", "PLAN", "--offload-folder", "x"], "a slice runs on one device"),
    ],
)
def test_options_that_do_not_go_with_a_plan_are_refused(
    toy: Path, one_slice: Path, command: Any, arguments: list[str], message: str
) -> None:
    words = [str(one_slice) if word == "PLAN" else word for word in arguments]
    result = command(main, "extract-all", "--model", toy, *ROWS, *words)
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.slow
def test_tied_head_by_three_ranks_that_stream_their_slices(
    tied_bf16: Path, tmp_path: Path, command: Any
) -> None:
    plan = write_plan(tied_bf16, tmp_path / "plan.json", Span(0, 1), Span(1, 3), Span(3, 4))
    common = ("--model", tied_bf16, *ROWS, "--stream", "on", "--noise-floor", "stats", "--quiet")
    three = ("--plan", tmp_path / "plan.json", "--output-dir", tmp_path / "three")
    ran = wait(start(3, *common, *three))
    assert ran.exit_code == 0, ran.stderr
    command(main, "extract-all", *common, "--output-dir", tmp_path / "one")
    assert contents(tmp_path / "three") == contents(tmp_path / "one")
    assert plan.shared
    for part in plan.used:
        record = records(tmp_path / "three")[part.node.name]
        assert set(record.tensors) == set(part.names)
        assert record.bytes_read == sum(tensor.size_bytes for tensor in part.tensors)


@pytest.mark.slow
def test_more_ranks_than_slices_are_refused_once(toy: Path, one_slice: Path, tmp_path: Path) -> None:
    ran = wait(start(2, "--plan", one_slice, "--model", toy, *ROWS, "--output-dir", tmp_path))
    assert ran.exit_code != 0
    (line,) = errors(ran)
    assert "the plan has 1 slice for 2 ranks" in line


@pytest.mark.slow
@pytest.mark.parametrize(("rank", "stored"), [(0, "layer_0.safetensors"), (1, "manifest.rank1.json")])
def test_killed_rank_is_named_and_the_run_resumes(
    toy: Path, tmp_path: Path, command: Any, rank: int, stored: str
) -> None:
    plan = write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    directory = tmp_path / "killed"
    common = ("--model", toy, *ROWS, "--stream", "on", "--quiet")
    arguments = (*common, "--plan", tmp_path / "plan.json", "--output-dir", directory)
    process = start(2, *arguments)
    kill_rank(process, rank, when=directory / stored)
    killed_at = time.monotonic()
    ran = wait(process)
    assert time.monotonic() - killed_at < 60
    (line,) = errors(ran)
    assert f"rank {rank} (node node{rank}) died" in line
    assert "exitcode  : -9" in ran.stderr or "exitcode  : 3" in ran.stderr
    ran = wait(start(2, *arguments))
    assert ran.exit_code == 0, ran.stderr
    command(main, "extract-all", *common, "--output-dir", tmp_path / "whole")
    assert contents(directory) == contents(tmp_path / "whole")
    if rank == 1:
        # Layer 2 was listed: of it nothing is read again but what tells the model from others.
        record = records(directory)["node1"]
        assert record.bytes_read == record.bytes_asked < plan.used[1].cost.stored_bytes * 3 / 4


def kill_rank(process: subprocess.Popen[str], rank: int, *, when: Path) -> None:
    while not when.exists():
        assert process.poll() is None, "the run ended before it could be killed"
        time.sleep(0.001)
    for child in psutil.Process(process.pid).children(recursive=True):
        if child.environ().get("RANK") == str(rank):
            child.kill()
