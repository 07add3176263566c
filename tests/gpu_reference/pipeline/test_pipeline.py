"""A golden by several ranks is that of one process, byte for byte, and each rank reads its slice alone."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click.testing
import pytest
import safetensors.torch
import torch
from goldens import contents

from gpu_reference.cli import main
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.cli import mm2_split
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.source import open_source
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.append(str(Path(__file__).parents[2]))
from moments import KILL, of_rank, words_of

REPOSITORY = Path(__file__).parents[3]
PROGRAM = (sys.executable, "-m", "gpu_reference")
# The default rows, cut: one is padded on the left, and one has expert tokens, whose states each layer makes anew.
ROWS = ("--max-length", "24")
pytestmark = pytest.mark.usefixtures("as_in_forks")


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
    plan = source.divide(
        planner="manual",
        nodes=nodes,
        workload=Workload(context_length=24, batch_size=2),
    )
    plan.write(path)
    return plan


def start(
    num_ranks: int, *arguments: object, max_restarts: int = 0, program: Sequence[str] = PROGRAM
) -> subprocess.Popen[str]:
    """Start ranks; in an argument, `{rank}` is a rank's own number."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts)]
    words = [*program, "extract-all", *map(str, arguments)]
    line = shlex.join(words).replace("{rank}", "'$RANK'")
    return spawn([*launcher, "--no-python", "sh", "-c", f"exec {line}"])


def spawn(words: list[str]) -> subprocess.Popen[str]:
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


def records(directory: Path) -> dict[str, ReadRecord]:
    return {
        record.node: record for record in map(ReadRecord.read, (directory / RECORDS_FOLDER).glob("*.json"))
    }


@pytest.fixture(scope="module")
def tied_bf16(toy_bf16: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The BF16 toy with its embedding for an lm_head."""
    folder = tmp_path_factory.mktemp("checkpoint") / "tied"
    shutil.copytree(toy_bf16, folder)
    index_file = folder / "model.safetensors.index.json"
    index = json.loads(index_file.read_text())
    shard = folder / index["weight_map"].pop("lm_head.weight")
    index_file.write_text(json.dumps(index))
    tensors = safetensors.torch.load_file(shard)
    del tensors["lm_head.weight"]
    safetensors.torch.save_file(tensors, shard, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": True}))
    return folder


# Ranks as torchrun starts them, but as forks of this process, which has imported all that they need.
FORKED_RANKS = """
import sys
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from gpu_reference.__main__ import main

def run_rank():
    sys.argv.insert(1, "extract-all")
    try:
        main()
    except SystemExit as end:
        assert not end.code

config = LaunchConfig(
    min_nodes=1,
    max_nodes=1,
    nproc_per_node=2,
    run_id="forked",
    rdzv_backend="c10d",
    rdzv_endpoint="localhost:0",
    max_restarts=0,
    start_method="fork",
)
elastic_launch(config, run_rank)()
"""


@pytest.fixture(scope="module")
def two_ranks(
    toy: Path,
    tmp_path_factory: pytest.TempPathFactory,
    forked_python: Any,
    golden_modules: tuple[str, ...],
) -> tuple[Ran, Path, PartitionPlan]:
    """The FP8 toy by two ranks that hold their slices."""
    folder = tmp_path_factory.mktemp("two_ranks")
    plan = write_plan(toy, folder / "plan.json", Span(0, 1), Span(1, 4))
    arguments = ("--plan", folder / "plan.json", "--model", toy, *ROWS, "--output-dir", folder / "capture")
    done = forked_python(FORKED_RANKS, *arguments, "--json", modules=golden_modules)
    ran = Ran(exit_code=done.returncode, stdout=done.stdout, stderr=done.stderr)
    return ran, folder / "capture", plan


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


@pytest.mark.parametrize("options", [("on",), ("auto", "--floor-variants", "3")], ids=["streamed", "held"])
def test_plan_of_one_slice_runs_without_torchrun(
    toy: Path, one_slice: Path, tmp_path: Path, command: Any, options: tuple[str, ...]
) -> None:
    common = ("extract-all", "--model", toy, *ROWS, "--quiet", "--stream", *options)
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


def test_debug_shows_what_a_rank_will_load_and_what_it_loaded(
    one_slice: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("extract-all", "--plan", one_slice, *ROWS, "--noise-floor", "off", "--output-dir", tmp_path)
    assert "NODE SLICE ASSIGNMENT" not in command(main, *words).stderr
    monkeypatch.setenv("DEBUG", "11")
    shown = command(main, *words, "--overwrite").stderr
    assert shown.index("NODE SLICE ASSIGNMENT") < shown.index("Layer 3 (4 of 4)")
    assert shown.rindex("Bytes read over slice: 1.00") > shown.index("Layer 3 (4 of 4)")


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


def dying(rank: int, *, after: str, act: str = KILL) -> list[str]:
    """The program, of which one rank is killed once a file of the capture is there."""
    return words_of("gpu_reference", name=after, act=of_rank(rank, act))


def common_of(folder: Path) -> tuple[object, ...]:
    return ("--model", folder, *ROWS, "--stream", "on", "--quiet")


@pytest.fixture(scope="module")
def plain(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy streamed by one process."""
    directory = tmp_path_factory.mktemp("plain") / "capture"
    words = ["extract-all", *map(str, common_of(toy)), "--output-dir", str(directory)]
    assert click.testing.CliRunner().invoke(main, words).exit_code == 0
    return directory


@dataclass(frozen=True, kw_only=True)
class Killed:
    """A run of two ranks of which one was killed."""

    ran: Ran
    directory: Path
    plan_file: Path
    plan: PartitionPlan


def run_killed(toy: Path, folder: Path, rank: int, stored: str) -> Killed:
    plan = write_plan(toy, folder / "plan.json", Span(0, 2), Span(2, 4))
    words = (*common_of(toy), "--plan", folder / "plan.json", "--output-dir", folder / "capture")
    return Killed(
        ran=wait(start(2, *words, program=dying(rank, after=stored))),
        directory=folder / "capture",
        plan_file=folder / "plan.json",
        plan=plan,
    )


@pytest.fixture(scope="module")
def killed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Killed:
    """Rank 1 was killed when it had listed its first layer."""
    return run_killed(toy, tmp_path_factory.mktemp("killed"), 1, "manifest.rank1.json")


def copied(directory: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(directory, tmp_path / "capture"))


@pytest.mark.slow
def test_killed_rank_is_named(killed: Killed) -> None:
    # By torchrun; the survivor tells what it noticed first, that it lost rank 1 or was told to stop.
    assert len(errors(killed.ran)) <= 1
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9", killed.ran.stderr)


@pytest.mark.slow
def test_killed_run_resumes_with_its_proof_of_reads(
    killed: Killed, plain: Path, toy: Path, tmp_path: Path, command: Any
) -> None:
    directory = copied(killed.directory, tmp_path)
    ran = wait(start(2, *common_of(toy), "--plan", killed.plan_file, "--output-dir", directory))
    assert ran.exit_code == 0, ran.stderr
    assert contents(directory) == contents(plain)
    found = records(directory)
    for part in killed.plan.used:
        assert found[part.node.name].bytes_read == part.cost.stored_bytes
    # Layer 2 was listed: of it nothing is read again but what tells the model from others.
    assert 0 < found["node1"].bytes_read_again < killed.plan.used[1].cost.stored_bytes * 3 / 4
    verified = command(mm2_split, "verify", "--plan", killed.plan_file, "--records", directory)
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_single_process_resumes_what_ranks_began(
    killed: Killed, plain: Path, toy: Path, tmp_path: Path, command: Any
) -> None:
    directory = copied(killed.directory, tmp_path)
    common = [word for word in common_of(toy) if word != "--quiet"]
    result = command(main, "extract-all", *common, "--output-dir", directory)
    assert result.exit_code == 0, result.output
    assert "done before" in result.stderr
    assert contents(directory) == contents(plain)


@pytest.mark.slow
@pytest.mark.parametrize("spans", [(Span(0, 4),), (Span(0, 1), Span(1, 3), Span(3, 4))])
def test_other_number_of_ranks_resumes_too(
    killed: Killed, plain: Path, toy: Path, tmp_path: Path, spans: tuple[Span, ...]
) -> None:
    directory = copied(killed.directory, tmp_path)
    plan = write_plan(toy, tmp_path / "other.json", *spans)
    ran = wait(
        start(len(spans), *common_of(toy), "--plan", tmp_path / "other.json", "--output-dir", directory)
    )
    assert ran.exit_code == 0, ran.stderr
    assert contents(directory) == contents(plain)
    # By this plan not all was read: its record does not claim it.
    assert sum(record.bytes_read for record in records(directory).values()) < sum(
        part.cost.stored_bytes for part in (*plan.used, *killed.plan.used)
    )


@pytest.mark.slow
def test_run_that_is_told_to_stop_says_so_and_resumes(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    directory = tmp_path / "capture"
    arguments = (*common_of(toy), "--plan", tmp_path / "plan.json", "--output-dir", directory)
    # The launcher is told, as by a user who ends it; it ends the ranks.
    told = dying(0, after="layer_0.safetensors", act="os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    ran = wait(start(2, *arguments, program=told))
    assert ran.exit_code != 0
    (line,) = errors(ran)
    assert "was told to stop. Run the same command again" in line
    ran = wait(start(2, *arguments))
    assert ran.exit_code == 0, ran.stderr
    assert contents(directory) == contents(plain)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_anew_when_one_was_killed(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    directory = tmp_path / "capture"
    arguments = (*common_of(toy), "--plan", tmp_path / "plan.json", "--output-dir", directory)
    ran = wait(start(2, *arguments, max_restarts=1, program=dying(1, after="manifest.rank1.json")))
    assert ran.exit_code == 0, ran.stderr
    assert contents(directory) == contents(plain)


def start_machines(*arguments: object) -> list[subprocess.Popen[str]]:
    """Start two ranks as two machines do, the first of which keeps the store."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", endpoint]
    words = [*launcher, "--no-python", *PROGRAM, "extract-all", *map(str, arguments)]
    return [spawn(words), spawn(words)]


@pytest.mark.slow
def test_two_machines_make_the_capture_of_one_process(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    directory = tmp_path / "capture"
    machines = start_machines(*common_of(toy), "--plan", tmp_path / "plan.json", "--output-dir", directory)
    assert [wait(machine).exit_code for machine in machines] == [0, 0]
    assert contents(directory) == contents(plain)


@pytest.mark.slow
def test_ranks_that_go_by_different_plans_are_refused(toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan0.json", Span(0, 2), Span(2, 4))
    write_plan(toy, tmp_path / "plan1.json", Span(0, 1), Span(1, 4))
    directory = tmp_path / "capture"
    ran = wait(start(2, *common_of(toy), "--plan", tmp_path / "plan{rank}.json", "--output-dir", directory))
    (line,) = errors(ran)
    assert "rank 1 (node node1) goes by another plan than rank 0: expected" in line
    assert not directory.exists()


@pytest.mark.slow
def test_shards_of_other_slices_may_be_absent_and_folders_differ(tmp_path: Path, command: Any) -> None:
    toy = tmp_path / "toy"
    synthesize(toy, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=1_000_000, seed=0)
    command(main, "extract-all", *common_of(toy), "--output-dir", tmp_path / "plain")
    plan = write_plan(toy, tmp_path / "plan.json", Span(0, 2), Span(2, 4))
    for rank, part in enumerate(plan.used):
        folder = tmp_path / f"model{rank}"
        shutil.copytree(toy, folder)
        own = {tensor.file for tensor in part.tensors}
        absent = [path for path in folder.glob("*.safetensors") if path.name not in own]
        assert absent
        for path in absent:
            path.unlink()
    directory = tmp_path / "capture"
    words = ("--model", tmp_path / "model{rank}", *ROWS, "--stream", "on", "--quiet")
    ran = wait(start(2, *words, "--plan", tmp_path / "plan.json", "--output-dir", directory))
    assert ran.exit_code == 0, ran.stderr
    found, expected = contents(directory), contents(tmp_path / "plain")
    manifests = [json.loads(files.pop("manifest.json")) for files in (found, expected)]
    # Rank 0's name for the checkpoint stands for all.
    assert manifests[0]["provenance"].pop("model_source") == str(tmp_path / "model0")
    manifests[1]["provenance"].pop("model_source")
    assert manifests[0] == manifests[1]
    assert found == expected


@pytest.mark.slow
def test_more_ranks_than_slices_are_refused_once(toy: Path, one_slice: Path, tmp_path: Path) -> None:
    ran = wait(start(2, "--plan", one_slice, "--model", toy, *ROWS, "--output-dir", tmp_path))
    assert ran.exit_code != 0
    (line,) = errors(ran)
    assert "the plan has 1 slice for 2 ranks" in line
