from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest

from minimax_tools.capture.read_record import RECORDS_FOLDER, ReadRecord
from minimax_tools.cli import mm2_split
from minimax_tools.partition.plan import PartitionPlan
from minimax_tools.slices.verification_text import render_run

Command = Callable[..., click.testing.Result]

_SCRIPT = Path(__file__).parents[3] / "scripts" / "verify_slice_loading.py"
_NUM_VERDICTS = 11


def split(*words: object) -> None:
    result = click.testing.CliRunner().invoke(mm2_split, [*map(str, words), "--quiet"])
    assert result.exit_code == 0, result.output


@pytest.fixture(scope="module")
def plan_file(toy: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 0 to 2 on a, layer 3 on b."""
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    nodes = ("--node", "a:memory=600MB", "--node", "b:memory=200MB", "--context-length", 64)
    split("plan", "--model", toy, *nodes, "--output", path)
    return path


@pytest.fixture(scope="module")
def plan(plan_file: Path) -> PartitionPlan:
    return PartitionPlan.read(plan_file)


@pytest.fixture(scope="module")
def whole_slices(plan_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("slices")
    split("extract", "--plan", plan_file, "--all-nodes", "--output", folder, "--digests")
    return folder


@pytest.fixture
def slices(whole_slices: Path, tmp_path: Path) -> Path:
    """Slices to be spoilt."""
    return shutil.copytree(whole_slices, tmp_path / "slices")


@pytest.fixture
def records(plan: PartitionPlan, tmp_path: Path) -> Path:
    """Write the records of a run into its capture directory."""
    (tmp_path / "capture").mkdir()
    for slice_ in plan.slices:
        record_of(plan, slice_.node.name).write(tmp_path / "capture" / RECORDS_FOLDER)
    return tmp_path / "capture"


def record_of(plan: PartitionPlan, node: str) -> ReadRecord:
    sizes = {tensor.name: tensor.size_bytes for tensor in plan.slice_of(node).tensors}
    return ReadRecord.begun(node).followed_by(sizes, sizes)


@pytest.fixture
def run(plan_file: Path) -> Command:
    """Runs `mm2-split verify` on the plan, or another command, in an environment and an encoding."""

    def run_it(
        *arguments: object, name: str = "verify", charset: str = "utf-8", **environment: str | None
    ) -> click.testing.Result:
        words = [name, "--plan", str(plan_file), *map(str, arguments)]
        runner = click.testing.CliRunner(charset=charset)
        return runner.invoke(mm2_split, words, env={"DEBUG": None, **environment}, catch_exceptions=False)

    return run_it


def sections(text: str) -> dict[str, str]:
    """The text of each section by its title; of the last node where there are several."""
    found: dict[str, list[str]] = {}
    title = ""
    for line in text.splitlines():
        if "===" in line:
            title = line.split("===")[1].strip()
            found[title] = []
        elif title:
            found[title].append(line)
    return {title: "\n".join(lines).strip() for title, lines in found.items()}


def test_every_section_is_shown_as_far_as_it_is_known(
    run: Any,
    plan_file: Path,
    plan: PartitionPlan,
    slices: Path,
    records: Path,
    toy: Path,
    tmp_path: Path,
    expect_text: Any,
) -> None:
    cut = shutil.copytree(toy, tmp_path / "cut")
    (cut / plan.slice_of("b").files[-1]).unlink()
    absent = shutil.copytree(toy, tmp_path / "absent", ignore=shutil.ignore_patterns("*.safetensors"))
    half = shutil.copytree(slices, tmp_path / "half", ignore=shutil.ignore_patterns("b"))
    of_b = ("--verbose", "--node", "b")
    results = {
        "slice and run": run("--slices", slices, "--records", records, "--node", "b", DEBUG="11"),
        "terminal that is no UTF-8": run(*of_b, "--slices", slices, charset="ascii"),
        "summary": run("--slices", slices),
        "verdict that fails": run("--slices", half),
        "file that is missing": run(*of_b, "--model", cut),
        "files that are not needed": run(*of_b, "--model", absent, "--slices", slices),
    }
    failing = {"verdict that fails", "file that is missing"}
    assert {name for name, result in results.items() if result.exit_code} == failing
    assert results["terminal that is no UTF-8"].stdout.isascii()
    # Random numbers may be others under another torch.
    texts = {
        name: re.sub(r"sha256 \w{64}", "sha256 DIGEST", result.stdout) for name, result in results.items()
    }
    for path in (plan_file, slices, toy, cut, absent, half):
        texts = {name: text.replace(str(path), path.name) for name, text in texts.items()}
    expect_text("verify.txt", texts)


def test_sizes_are_those_of_the_files(run: Any, plan: PartitionPlan, toy: Path) -> None:
    files = [*plan.slice_of("b").files, *sorted(path.name for path in toy.glob("*.json"))]
    sizes = {name: (toy / name).stat().st_size for name in files}
    full, part = sum(path.stat().st_size for path in toy.iterdir()), sum(sizes.values())
    shown = sections(run("--verbose", "--node", "b").stdout)
    download, completed = shown["DOWNLOAD VERIFICATION"], shown["DOWNLOAD COMPLETED VERIFICATION"]
    assert f"💾 Full repo size: {full / 1e6:.2f} MB\n💾 This slice size: {part / 1e6:.2f} MB\n" in download
    assert f"🎯 Size reduction: {1 - part / full:.1%}\n" in download
    for number, (name, size) in enumerate(sizes.items(), start=1):
        assert f"   {number:2}. 📄 {name} ({size / 1e6:.2f} MB)" in download
        assert f"   📄 {name}: {size / 1e6:.2f} MB ✅" in completed


def test_a_nodes_part_in_a_run_is_told_before_and_after_it(plan: PartitionPlan) -> None:
    before = sections(render_run(plan, "b", with_marks=True))
    assert list(before) == ["NODE SLICE ASSIGNMENT VERIFICATION", "RUNTIME SLICE VERIFICATION"]
    assert "Layers to be loaded: 3" in before["RUNTIME SLICE VERIFICATION"]
    after = sections(render_run(plan, "b", record=record_of(plan, "b"), with_marks=True))
    assert after["NODE SLICE ASSIGNMENT VERIFICATION"] == before["NODE SLICE ASSIGNMENT VERIFICATION"]
    assert "Loaded layers: 3" in after["RUNTIME SLICE VERIFICATION"]
    assert "Bytes read over slice: 1.00" in after["RUNTIME SLICE VERIFICATION"]


def test_verbose_shows_the_same_as_debug_and_less_debug_a_summary(run: Any) -> None:
    detailed = run("--verbose").stdout
    assert detailed == run(DEBUG="11").stdout == run(DEBUG="99").stdout
    assert "Nothing loaded yet" in detailed
    for level in ("10", "", "yes"):
        summary = run(DEBUG=level).stdout
        assert "===" not in summary
        assert summary.splitlines()[0].startswith("a: layers 0-2 (3 of 4, 75.0%) and the embedding, ")
        # Two nodes, the two weight files that both fetch, and the verdicts.
        assert len(summary.splitlines()) == 4 + _NUM_VERDICTS


def test_json_holds_what_the_sections_show(
    run: Any, plan: PartitionPlan, slices: Path, records: Path
) -> None:
    values = json.loads(run("--slices", slices, "--records", records, "--json").stdout)
    assert values["holds"] is True
    assert values["total_layers_assigned"] == values["num_hidden_layers"] == 4
    assert [node["layers"] for node in values["partition_map"]] == [[0, 3], [3, 4]]
    assert [node["memory_weight"] for node in values["partition_map"]] == [[0.0, 0.75], [0.75, 1.0]]
    assert len(values["verdicts"]) == _NUM_VERDICTS
    node = values["nodes"][1]
    assert node["reads"]["bytes_read_over_slice"] == 1.0
    assert node["reads"]["num_tensors"] == len(plan.slice_of("b").tensors)
    assert node["runtime"] == {"loaded_layers": [3], "is_seen": True}
    assert node["download"]["is_complete"] is True
    assert set(node["digests"]) == set(plan.slice_of("b").names)
    assert all(len(digest) == 64 for digest in node["digests"].values())
    assert (node["folder"], node["source"]) == (str(slices / "b"), plan.model)
    unread = json.loads(run("--slices", slices, "--json").stdout)["nodes"][1]
    assert unread["runtime"] == {"loaded_layers": None, "is_seen": False}
    assert unread["reads"] is None


def verify_newest(folder: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the seeds' script in a folder."""
    environment = {**os.environ, "PYTHONPATH": str(_SCRIPT.parents[1])}
    command = [sys.executable, str(_SCRIPT), *map(str, arguments)]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_the_seeds_script_takes_the_newest_plan_and_the_slices_that_are_here(
    plan_file: Path, whole_slices: Path, tmp_path: Path
) -> None:
    newest = shutil.copy(plan_file, tmp_path / "newest.json")
    (tmp_path / "old.json").write_text(plan_file.read_text().replace('"memory"', '"old"'))
    os.utime(tmp_path / "old.json", (1, 1))
    (tmp_path / "notes.json").write_text("{}")  # newer, and no plan
    shutil.copytree(whole_slices / "b", tmp_path / "model_shards" / "b")
    done = verify_newest(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Newest plan here: {newest.name}, slices of b in model_shards\n" in done.stderr
    assert "Found in model_shards/b: " in done.stdout
    # The other node's slice is on another machine.
    assert "Node ID: a" not in done.stdout


def test_the_seeds_script_shows_every_section_and_fails_where_a_slice_is_wrong(
    plan_file: Path, whole_slices: Path, tmp_path: Path
) -> None:
    for name in "ab":
        shutil.copytree(whole_slices / "a", tmp_path / "slices" / name)
    done = verify_newest(tmp_path, "--plan", plan_file, "--slices", tmp_path / "slices")
    assert done.returncode == 1
    assert "FALSE: each slice holds the plan's tensors" in done.stdout
    # Five of each of the two nodes, and the verdicts.
    assert len([line for line in done.stdout.splitlines() if "===" in line]) == 11


def test_without_a_plan_here_the_seeds_script_says_how_to_make_one(tmp_path: Path) -> None:
    done = verify_newest(tmp_path)
    assert done.returncode == 2
    assert "there is no plan in this folder" in done.stderr
    assert "mm2-split plan --output plan.json" in done.stderr


def test_files_that_two_nodes_fetch_are_listed_by_name(run: Any, plan: PartitionPlan, toy: Path) -> None:
    first, second = (set(slice_.files) for slice_ in plan.slices)
    sizes = {name: (toy / name).stat().st_size for name in sorted(first & second)}
    assert sizes  # the plan cuts through a shard
    shown = [f"📄 a and b both fetch {name} ({size / 1e6:.2f} MB)" for name, size in sizes.items()]
    for options in ((), ("--verbose",)):
        lines = run(*options).stdout.splitlines()
        assert [line for line in lines if "both fetch" in line] == shown
    assert json.loads(run("--json").stdout)["shared_files"] == [
        {"name": name, "size_bytes": size, "nodes": ["a", "b"]} for name, size in sizes.items()
    ]


def test_nodes_with_slices_of_their_own_fetch_no_file_together(run: Any, whole_slices: Path) -> None:
    assert json.loads(run("--slices", whole_slices, "--json").stdout)["shared_files"] == []
    assert "fetch" not in run("--slices", whole_slices).stdout


def test_fetch_says_where_the_files_are(toy: Path, run: Any) -> None:
    result = run("--node", "b", name="fetch")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith(f"b: {toy}, ")
    assert "===" not in result.output
    unknown = run("--node", "c", "--model", toy, name="fetch")
    assert unknown.exit_code == 2
    assert "the plan has no node 'c'" in unknown.output


def test_fetch_shows_on_debug_11_what_came_in_the_words_of_verify(run: Any) -> None:
    fetched = run("--node", "b", "--json", name="fetch", DEBUG="11")
    assert fetched.exit_code == 0, fetched.output
    assert json.loads(fetched.stdout)["node"] == "b"
    assert list(sections(fetched.stderr)) == [
        "NODE SLICE ASSIGNMENT VERIFICATION",
        "SLICE LOADING VERIFICATION",
        "DOWNLOAD VERIFICATION",
        "DOWNLOAD COMPLETED VERIFICATION",
    ]
    verified = run("--node", "b", DEBUG="11").stdout
    for block in fetched.stderr.split("\n\n"):
        assert block.strip() in verified
    assert "Status:   ✅ Complete" in fetched.stderr
    assert "===" not in run("--node", "b", name="fetch", DEBUG="10").output
