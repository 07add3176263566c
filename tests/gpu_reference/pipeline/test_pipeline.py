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
from pathlib import Path
from typing import Any

import click.testing
import pytest
import safetensors.torch
import torch
from goldens import contents

from gpu_reference.cli import main
from gpu_reference.pipeline.pipeline import Step, plan_steps
from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.cli import mm2_split
from minimax_tools.model.span import Span
from minimax_tools.partition.cost import Workload
from minimax_tools.partition.node import Node, Stage
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.source import open_source
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.append(str(Path(__file__).parents[2]))
from moments import KILL, of_rank, words_of

Ran = subprocess.CompletedProcess[str]

REPOSITORY = Path(__file__).parents[3]
PROGRAM = (sys.executable, "-m", "gpu_reference")
# The default rows, cut: one is padded on the left, and one has expert tokens, whose states each layer makes anew.
ROWS = ("--max-length", "24")
HALVES = (Span(0, 2), Span(2, 4))
pytestmark = pytest.mark.usefixtures("as_in_forks")


def write_plan(folder: Path, path: Path, *spans: Span) -> PartitionPlan:
    nodes = [
        Node(name=f"node{number}", memory_bytes=10**12, layers=span) for number, span in enumerate(spans)
    ]
    workload = Workload(context_length=24, batch_size=2)
    plan = open_source(str(folder)).divide(planner="manual", nodes=nodes, workload=workload)
    plan.write(path)
    return plan


def streamed(folder: Path, *options: object) -> tuple[object, ...]:
    return ("--model", folder, *ROWS, "--stream", "on", "--quiet", *options)


def to_capture(folder: Path) -> tuple[object, ...]:
    """Options: the plan that lies in a folder, and the capture beside it."""
    return ("--plan", folder / "plan.json", "--output-dir", folder / "capture")


def start(num_ranks: int, *arguments: object, max_restarts: int = 0, program: Sequence[str] = PROGRAM) -> Ran:
    """Run ranks to their end; in an argument, `{rank}` is a rank's own number."""
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += ["--nproc-per-node", str(num_ranks), "--max-restarts", str(max_restarts)]
    words = [*program, "extract-all", *map(str, arguments)]
    line = shlex.join(words).replace("{rank}", "'$RANK'")
    return wait(spawn([*launcher, "--no-python", "sh", "-c", f"exec {line}"]))


def spawn(words: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    pipe = subprocess.PIPE
    return subprocess.Popen(words, cwd=REPOSITORY, env=environment, stdout=pipe, stderr=pipe, text=True)


def wait(process: subprocess.Popen[str]) -> Ran:
    stdout, stderr = process.communicate(timeout=600)
    return Ran(process.args, process.returncode, stdout, stderr)


def errors(ran: Ran) -> list[str]:
    return [line for line in ran.stderr.splitlines() if line.startswith("Error:")]


def records(directory: Path) -> dict[str, ReadRecord]:
    found = map(ReadRecord.read, (directory / RECORDS_FOLDER).glob("*.json"))
    return {record.node: record for record in found}


def stage(layers: range, *, has_embedding: bool = False, has_head: bool = False) -> Stage:
    node = Node(name="x", memory_bytes=1)
    return Stage(node=node, layers=layers, has_embedding=has_embedding, has_head=has_head)


@pytest.mark.parametrize(
    ("complete", "has_model_sites", "expected"),
    [
        ((), False, [(range(2), False, "tokens", True), (range(2, 4), True, "rank", False)]),
        ((0,), False, [(range(1, 2), False, "stored", True), (range(2, 4), True, "rank", False)]),
        ((0, 1), False, [(range(2, 2), False, "stored", False), (range(2, 4), True, "stored", False)]),
        ((2, 3), False, [(range(2), False, "tokens", False), (range(4, 4), True, "stored", False)]),
        ((0, 1, 2, 3), True, [(range(2, 2), False, "stored", False), (range(4, 4), False, "stored", False)]),
        ((2,), True, [(range(2), False, "tokens", False), (range(3, 4), False, "stored", False)]),
    ],
)
def test_layers_whose_input_is_stored_wait_for_nobody(
    complete: tuple[int, ...], has_model_sites: bool, expected: list[Any]
) -> None:
    stages = (stage(range(2), has_embedding=True), stage(range(2, 4), has_head=True))
    steps = plan_steps(stages, complete, has_model_sites=has_model_sites)
    assert [(step.layers, step.runs_head, step.source, step.passes_on) for step in steps] == expected


def test_rank_without_layers_hands_on_what_the_next_needs() -> None:
    stages = (stage(range(0), has_embedding=True), stage(range(3)), stage(range(3, 3), has_head=True))
    steps = plan_steps(stages, (), has_model_sites=False)
    assert [step.passes_on for step in steps] == [True, True, False]
    assert [step.source for step in steps] == ["tokens", "rank", "rank"]
    assert all(step.is_idle for step in plan_steps(stages, (0, 1, 2), has_model_sites=True))
    last = Step(layers=range(3, 3), runs_head=True, source="stored", passes_on=False)
    assert plan_steps(stages, (0, 1, 2), has_model_sites=False)[2] == last


@pytest.fixture(scope="module")
def plain(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The toy streamed by one process."""
    directory = tmp_path_factory.mktemp("plain") / "capture"
    words = map(str, ("extract-all", *streamed(toy, "--output-dir", directory)))
    assert click.testing.CliRunner().invoke(main, list(words)).exit_code == 0
    return directory


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
    toy: Path, tmp_path_factory: pytest.TempPathFactory, forked_python: Any, golden_modules: tuple[str, ...]
) -> tuple[Ran, Path]:
    """The FP8 toy by two ranks that hold their slices, and its folder."""
    folder = tmp_path_factory.mktemp("two_ranks")
    write_plan(toy, folder / "plan.json", Span(0, 1), Span(1, 4))
    arguments = ("--model", toy, *ROWS, *to_capture(folder), "--json")
    return forked_python(FORKED_RANKS, *arguments, modules=golden_modules), folder


def test_capture_of_two_ranks_has_the_bytes_of_one_process(two_ranks: tuple[Ran, Path], plain: Path) -> None:
    ran, folder = two_ranks
    assert ran.returncode == 0, ran.stderr
    assert contents(folder / "capture") == contents(plain)


def test_each_rank_reads_its_slice_and_every_tensor_of_it_once(two_ranks: tuple[Ran, Path]) -> None:
    _, folder = two_ranks
    found = records(folder / "capture")
    for part in PartitionPlan.read(folder / "plan.json").used:
        record = found[part.node.name]
        assert set(record.tensors) == set(part.names)
        assert record.bytes_read == record.bytes_asked == part.cost.stored_bytes


def test_results_and_progress_come_from_rank_0_alone(two_ranks: tuple[Ran, Path]) -> None:
    ran, _ = two_ranks
    assert json.loads(ran.stdout)["layers"]
    for layer in range(4):
        assert ran.stderr.count(f"Layer {layer} (") == 1


@pytest.fixture(scope="module")
def one_slice(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    write_plan(toy, path, Span(0, 4))
    return path


def test_streamed_plan_of_one_slice_runs_without_torchrun(
    toy: Path, one_slice: Path, plain: Path, tmp_path: Path, command: Any
) -> None:
    result = command(main, "extract-all", *streamed(toy, "--plan", one_slice, "--output-dir", tmp_path))
    assert result.exit_code == 0, result.output
    assert contents(tmp_path) == contents(plain)
    assert records(tmp_path)["node0"].bytes_read == PartitionPlan.read(one_slice).used[0].cost.stored_bytes


def test_held_plan_of_one_slice_runs_without_torchrun(
    toy: Path, one_slice: Path, tmp_path: Path, command: Any
) -> None:
    common = ("extract-all", "--model", toy, "--seq-len", 5, "--floor-variants", 3, "--output-dir")
    result = command(main, *common, tmp_path / "plan", "--plan", one_slice)
    assert result.exit_code == 0, result.output
    assert "NODE SLICE ASSIGNMENT" not in result.stderr
    command(main, *common, tmp_path / "plain")
    assert contents(tmp_path / "plan") == contents(tmp_path / "plain")
    record = records(tmp_path / "plan")["node0"]
    assert record.bytes_read == PartitionPlan.read(one_slice).used[0].cost.stored_bytes


def test_debug_shows_what_a_rank_will_load_and_what_it_loaded(
    one_slice: Path, tmp_path: Path, command: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEBUG", "11")
    words = ("--plan", one_slice, "--seq-len", 5, "--noise-floor", "off", "--output-dir", tmp_path)
    shown = command(main, "extract-all", *words).stderr
    assert shown.index("NODE SLICE ASSIGNMENT") < shown.index("Layer 3 (4 of 4)")
    assert shown.rindex("Bytes read over slice: 1.00") > shown.index("Layer 3 (4 of 4)")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["--plan", "TWO"], 2, "the plan has 2 slices for 1 rank"),
        (["--plan", "TWO"], 2, "torchrun --nproc-per-node 2 -m gpu_reference extract-all"),
        (["--plan", "ONE", "--model", "OTHER"], 3, "which the checkpoint lacks"),
        (["--slices", "."], 2, "--slices belongs to a plan"),
        (["--plan", "ONE", "--no-save"], 2, "--plan writes a capture"),
        (["--plan", "ONE", "--offload-folder", "x"], 2, "a slice runs on one device"),
    ],
)
def test_plan_that_cannot_run_here_is_refused(
    toy: Path,
    toy_bf16: Path,
    one_slice: Path,
    tmp_path: Path,
    command: Any,
    arguments: list[str],
    code: int,
    message: str,
) -> None:
    write_plan(toy, tmp_path / "two.json", *HALVES)
    named = {"ONE": one_slice, "TWO": tmp_path / "two.json", "OTHER": toy_bf16}
    place = ("--model", toy, *ROWS, "--captures", tmp_path / "captures")
    result = command(main, "extract-all", *place, *(named.get(word, word) for word in arguments))
    assert result.exit_code == code
    assert message in result.stderr
    assert not (tmp_path / "captures").exists()


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


@pytest.mark.slow
def test_tied_head_by_three_ranks_that_stream_their_slices(
    tied_bf16: Path, tmp_path: Path, command: Any
) -> None:
    plan = write_plan(tied_bf16, tmp_path / "plan.json", Span(0, 1), Span(1, 3), Span(3, 4))
    common = streamed(tied_bf16, "--noise-floor", "stats")
    ran = start(3, *common, *to_capture(tmp_path))
    assert ran.returncode == 0, ran.stderr
    command(main, "extract-all", *common, "--output-dir", tmp_path / "one")
    assert contents(tmp_path / "capture") == contents(tmp_path / "one")
    assert plan.shared
    for part in plan.used:
        record = records(tmp_path / "capture")[part.node.name]
        assert set(record.tensors) == set(part.names)
        assert record.bytes_read == sum(tensor.size_bytes for tensor in part.tensors)


def dying(rank: int, *, after: str, act: str = KILL) -> list[str]:
    """The program, of which one rank is killed once a file of the capture is there."""
    return words_of("gpu_reference", name=after, act=of_rank(rank, act))


@pytest.fixture(scope="module")
def killed(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Ran, Path]:
    """A run of two ranks, and its folder: rank 1 was killed when it had listed its first layer."""
    folder = tmp_path_factory.mktemp("killed")
    write_plan(toy, folder / "plan.json", *HALVES)
    words = streamed(toy, *to_capture(folder))
    return start(2, *words, program=dying(1, after="manifest.rank1.json")), folder


@pytest.fixture
def stopped(killed: tuple[Ran, Path], tmp_path: Path) -> Path:
    """A copy of that folder, to resume in."""
    return Path(shutil.copytree(killed[1], tmp_path / "stopped"))


@pytest.mark.slow
def test_killed_rank_is_named(killed: tuple[Ran, Path]) -> None:
    ran, _ = killed
    # By torchrun; the survivor tells what it noticed first, that it lost rank 1 or was told to stop.
    assert len(errors(ran)) <= 1
    assert re.search(r"rank +: 1 \(local_rank: 1\)\n +exitcode +: -9", ran.stderr)


@pytest.mark.slow
def test_killed_run_resumes_with_its_proof_of_reads(
    stopped: Path, plain: Path, toy: Path, command: Any
) -> None:
    ran = start(2, *streamed(toy, *to_capture(stopped)))
    assert ran.returncode == 0, ran.stderr
    assert contents(stopped / "capture") == contents(plain)
    found, plan = records(stopped / "capture"), PartitionPlan.read(stopped / "plan.json")
    for part in plan.used:
        assert found[part.node.name].bytes_read == part.cost.stored_bytes
    # Layer 2 was listed: of it nothing is read again but what tells the model from others.
    assert 0 < found["node1"].bytes_read_again < plan.used[1].cost.stored_bytes * 3 / 4
    words = ("--plan", stopped / "plan.json", "--records", stopped / "capture")
    verified = command(mm2_split, "verify", *words)
    assert verified.exit_code == 0, verified.output


@pytest.mark.slow
def test_single_process_resumes_what_ranks_began(stopped: Path, plain: Path, toy: Path, command: Any) -> None:
    common = [word for word in streamed(toy) if word != "--quiet"]
    result = command(main, "extract-all", *common, "--output-dir", stopped / "capture")
    assert result.exit_code == 0, result.output
    assert "done before" in result.stderr
    assert contents(stopped / "capture") == contents(plain)


@pytest.mark.slow
@pytest.mark.parametrize("spans", [(Span(0, 4),), (Span(0, 1), Span(1, 3), Span(3, 4))])
def test_other_number_of_ranks_resumes_too(
    stopped: Path, plain: Path, toy: Path, spans: tuple[Span, ...]
) -> None:
    before = PartitionPlan.read(stopped / "plan.json")
    plan = write_plan(toy, stopped / "plan.json", *spans)
    ran = start(len(spans), *streamed(toy, *to_capture(stopped)))
    assert ran.returncode == 0, ran.stderr
    assert contents(stopped / "capture") == contents(plain)
    # By this plan not all was read: its record does not claim it.
    num_read = sum(record.bytes_read for record in records(stopped / "capture").values())
    assert num_read < sum(part.cost.stored_bytes for part in (*plan.used, *before.used))


@pytest.mark.slow
def test_run_that_is_told_to_stop_says_so_and_resumes(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", *HALVES)
    arguments = streamed(toy, *to_capture(tmp_path))
    # The launcher is told, as by a user who ends it; it ends the ranks.
    told = dying(0, after="layer_0.safetensors", act="os.kill(os.getppid(), signal.SIGTERM); time.sleep(60)")
    ran = start(2, *arguments, program=told)
    assert ran.returncode != 0
    (line,) = errors(ran)
    assert "was told to stop. Run the same command again" in line
    ran = start(2, *arguments)
    assert ran.returncode == 0, ran.stderr
    assert contents(tmp_path / "capture") == contents(plain)


@pytest.mark.slow
def test_torchrun_starts_the_ranks_anew_when_one_was_killed(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", *HALVES)
    program = dying(1, after="manifest.rank1.json")
    ran = start(2, *streamed(toy, *to_capture(tmp_path)), max_restarts=1, program=program)
    assert ran.returncode == 0, ran.stderr
    assert contents(tmp_path / "capture") == contents(plain)


@pytest.mark.slow
def test_two_machines_make_the_capture_of_one_process(plain: Path, toy: Path, tmp_path: Path) -> None:
    write_plan(toy, tmp_path / "plan.json", *HALVES)
    with socket.socket() as free:
        free.bind(("localhost", 0))
        endpoint = f"localhost:{free.getsockname()[1]}"
    # The first one keeps the store.
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    launcher += ["--rdzv-backend", "c10d", "--rdzv-id", "test", "--rdzv-endpoint", endpoint, "--no-python"]
    words = [*launcher, *PROGRAM, "extract-all", *map(str, streamed(toy, *to_capture(tmp_path)))]
    machines = [spawn(words), spawn(words)]
    assert [wait(machine).returncode for machine in machines] == [0, 0]
    assert contents(tmp_path / "capture") == contents(plain)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ("plan{rank}.json", "rank 1 (node node1) goes by another plan than rank 0: expected"),
        ("one.json", "the plan has 1 slice for 2 ranks"),
    ],
)
def test_plans_that_do_not_fit_the_ranks_are_refused_once(
    toy: Path, tmp_path: Path, plan: str, message: str
) -> None:
    write_plan(toy, tmp_path / "one.json", Span(0, 4))
    write_plan(toy, tmp_path / "plan0.json", *HALVES)
    write_plan(toy, tmp_path / "plan1.json", Span(0, 1), Span(1, 4))
    ran = start(2, *streamed(toy, "--plan", tmp_path / plan, "--output-dir", tmp_path / "capture"))
    assert ran.returncode != 0
    (line,) = errors(ran)
    assert message in line
    assert not (tmp_path / "capture").exists()


@pytest.mark.slow
def test_shards_of_other_slices_may_be_absent_and_folders_differ(tmp_path: Path, command: Any) -> None:
    toy = tmp_path / "toy"
    synthesize(toy, model=SyntheticModel(), dtype=torch.float8_e4m3fn, shard_size_bytes=1_000_000, seed=0)
    command(main, "extract-all", *streamed(toy, "--output-dir", tmp_path / "plain"))
    plan = write_plan(toy, tmp_path / "plan.json", *HALVES)
    for rank, part in enumerate(plan.used):
        folder = tmp_path / f"model{rank}"
        shutil.copytree(toy, folder)
        own = {tensor.file for tensor in part.tensors}
        absent = [path for path in folder.glob("*.safetensors") if path.name not in own]
        assert absent
        for path in absent:
            path.unlink()
    ran = start(2, *streamed(tmp_path / "model{rank}", *to_capture(tmp_path)))
    assert ran.returncode == 0, ran.stderr
    found, expected = contents(tmp_path / "capture"), contents(tmp_path / "plain")
    manifests = [json.loads(files.pop("manifest.json")) for files in (found, expected)]
    # Rank 0's name for the checkpoint stands for all.
    assert manifests[0]["provenance"].pop("model_source") == str(tmp_path / "model0")
    manifests[1]["provenance"].pop("model_source")
    assert manifests[0] == manifests[1]
    assert found == expected
