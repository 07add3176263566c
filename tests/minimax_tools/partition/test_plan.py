from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.checkpoint.expected_tensors import expected_tensors
from minimax_tools.errors import CannotRunError, CheckpointError, UsageError
from minimax_tools.json_codec import encode
from minimax_tools.model.span import Span
from minimax_tools.model.spec import ModelSpec
from minimax_tools.partition.cost import Workload, measure_costs
from minimax_tools.partition.node import Node
from minimax_tools.partition.plan import PartitionPlan, PlannedTensor, Slice, make_plan
from minimax_tools.slices.source import SliceSource, open_source

WORKLOAD = Workload(context_length=100)
EMBEDDING, NORM, LM_HEAD = "model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"
UNKNOWN = "model.layers.2.new"

Tensors = tuple[PlannedTensor, ...]
Edit = Callable[[Slice], Slice]


@pytest.fixture(scope="module")
def source(toy: Path) -> SliceSource:
    return open_source(str(toy))


def nodes_of(*layers: tuple[int, int]) -> tuple[Node, ...]:
    return tuple(
        Node(name="abcdef"[place], memory_bytes=10**9, tflops=place + 0.5, layers=Span(*span))
        for place, span in enumerate(layers)
    )


THREE = nodes_of((0, 1), (1, 3), (3, 4))


def plan_of(
    source: SliceSource, nodes: tuple[Node, ...] = THREE, *, planner: str = "manual"
) -> PartitionPlan:
    return source.divide(planner=planner, nodes=nodes, workload=WORKLOAD)


def plan_of_config(source: SliceSource, **config: Any) -> PartitionPlan:
    """A plan of what config.json alone tells."""
    sizes = tuple(expected_tensors(ModelSpec.from_config({**source.config, **config})))
    cost = measure_costs(sizes, source.architecture, source.config, WORKLOAD)
    return make_plan(
        model=source.model,
        architecture=source.architecture,
        tensors=sizes,
        folder=None,
        planner="manual",
        cost=cost,
        nodes=THREE,
    )


def tied(source: SliceSource) -> SliceSource:
    assert source.entries is not None
    entries = {name: entry for name, entry in source.entries.items() if name != LM_HEAD}
    return replace(source, entries=entries)


def faults_of(plan: PartitionPlan, source: SliceSource) -> list[str]:
    return plan.find_faults(source.entries, source.architecture, folder=source.folder)


def change(plan: PartitionPlan, position: int, edit: Edit) -> PartitionPlan:
    slices = list(plan.slices)
    slices[position] = edit(slices[position])
    return replace(plan, slices=tuple(slices))


def holding(edit: Callable[[Tensors], Tensors]) -> Edit:
    return lambda slice_: replace(slice_, tensors=edit(slice_.tensors))


def without(name: str) -> Edit:
    return holding(lambda tensors: tuple(tensor for tensor in tensors if tensor.name != name))


def adding(name: str) -> Edit:
    return holding(lambda tensors: (*tensors, PlannedTensor(name=name)))


def placing(**place: Any) -> Edit:
    """Q_PROJ at another place."""
    return holding(
        lambda tensors: tuple(
            PlannedTensor(name=Q_PROJ, **place) if tensor.name == Q_PROJ else tensor for tensor in tensors
        )
    )


def staged(**changes: Any) -> Edit:
    return lambda slice_: replace(slice_, stage=replace(slice_.stage, **changes))


def test_plan_holds_every_tensor_of_the_checkpoint_once(source: SliceSource) -> None:
    plan = plan_of(source)
    assert source.entries is not None
    assert faults_of(plan, source) == []
    plan.validate(source.entries, source.architecture, folder=source.folder)
    names = [name for slice_ in plan.slices for name in slice_.names]
    assert sorted(names) == sorted(source.entries)
    for slice_ in plan.slices:
        assert slice_.cost.stored_bytes == sum(tensor.size_bytes for tensor in slice_.tensors)
        for tensor in slice_.tensors:
            entry = source.entries[tensor.name]
            assert tensor.file == entry.file.name
            assert (tensor.start, tensor.stop) == (entry.offset, entry.offset + entry.size_bytes)


def test_slice_holds_its_layers_and_the_ends_what_stands_there(source: SliceSource) -> None:
    plan = plan_of(source)
    first, middle, last = plan.slices
    assert EMBEDDING in first.names
    assert {NORM, LM_HEAD} <= set(last.names)
    assert {name.split(".")[2] for name in middle.names} == {"1", "2"}
    assert Q_PROJ + "_scale_inv" in middle.names
    assert middle.files == tuple(sorted({tensor.file for tensor in middle.tensors}))
    assert middle.seconds_per_token == pytest.approx(middle.cost.flops_per_token / 1.5e12)
    assert [plan.share(slice_) for slice_ in plan.slices] == [0.25, 0.5, 0.25]
    weights = [plan.memory_weight(slice_) for slice_ in plan.slices]
    assert weights == [(0.0, 1 / 3), (1 / 3, 2 / 3), (2 / 3, 1.0)]


def test_plan_of_config_alone_knows_names_and_costs_and_no_places(source: SliceSource) -> None:
    names_alone = plan_of_config(source)
    for mine, theirs in zip(names_alone.slices, plan_of(source).slices, strict=True):
        assert sorted(mine.names) == sorted(theirs.names)
        assert mine.cost == theirs.cost
        assert mine.files == ()
        assert {tensor.size_bytes for tensor in mine.tensors} == {0}
    assert faults_of(names_alone, source) == []
    assert names_alone.find_faults(None, source.architecture) == []


def test_plan_that_was_written_and_read_is_the_same(source: SliceSource, tmp_path: Path) -> None:
    spare = tuple(Node(name=f"spare{number}", memory_bytes=10**5, tflops=1) for number in range(2))
    by_planner = [plan_of(source, THREE + spare, planner=planner) for planner in ("memory", "balanced")]
    tied_by_name = plan_of_config(source, tie_word_embeddings=True)
    assert tied_by_name.shared
    for plan in (*by_planner, tied_by_name, plan_of(source)):
        plan.write(tmp_path / "plan.json")
        assert PartitionPlan.read(tmp_path / "plan.json") == plan
    assert len(list(tmp_path.iterdir())) == 1
    # The file has a line for each tensor.
    lines = (tmp_path / "plan.json").read_text().splitlines()
    num_tensors = sum(len(slice_.tensors) for slice_ in plan.slices)
    assert sum(line.strip().startswith('["model.layers.') for line in lines) == num_tensors - 3
    assert len(lines) < num_tensors + 150


def test_plan_that_cannot_be_written_leaves_nothing_behind(source: SliceSource, tmp_path: Path) -> None:
    (tmp_path / "taken").mkdir()
    with pytest.raises(CannotRunError, match="cannot write the plan"):
        plan_of(source).write(tmp_path / "taken")
    assert [path.name for path in tmp_path.iterdir()] == ["taken"]


@pytest.mark.parametrize(
    "edit",
    [
        lambda plan: plan.pop("slices"),
        lambda plan: plan.pop("batch_size"),
        lambda plan: plan.update(dtype="nn"),
        lambda plan: plan["slices"][0].update(node="../a"),
        lambda plan: plan["slices"][0].update(layers=[0]),
        lambda plan: plan["slices"][0].update(memory_bytes="much"),
        lambda plan: plan["slices"][0]["cost"].update(speed=3),
        lambda plan: plan["slices"][0]["files"][0].update(file="../model.safetensors"),
        lambda plan: plan["slices"][0]["files"][0].update(file="/etc/passwd"),
        lambda plan: plan["slices"][0]["files"][0]["tensors"].append(["x", 5, 3]),
        lambda plan: plan["slices"][0]["files"][0]["tensors"].append(["x", -1, 3]),
        lambda plan: plan["slices"][0]["files"][0]["tensors"].append(["x", None, 3]),
        lambda plan: plan["slices"][0]["files"][0]["tensors"].append([7, 0, 3]),
        lambda plan: plan["slices"][0]["files"][0]["tensors"].append(["", 0, 3]),
        lambda plan: plan["slices"][0].update(has_head="no"),
        lambda plan: plan["slices"][0].update(memory_bytes=1e9),
        lambda plan: plan["slices"][0]["cost"].update(loaded_bytes=-1),
        lambda plan: plan["slices"].clear(),
        lambda plan: plan.update(num_hidden_layers=0),
        lambda plan: plan.update(context_length=-5),
        lambda plan: plan.update(shared={"x": 7}),
    ],
)
def test_file_that_is_no_plan_is_refused(
    edit: Callable[[dict[str, Any]], None], source: SliceSource, tmp_path: Path
) -> None:
    values = encode(plan_of(source))
    edit(values)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values))
    with pytest.raises(UsageError, match="plan.json is no plan"):
        PartitionPlan.read(path)


def test_plan_of_another_version_or_none_is_refused(source: SliceSource, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({**encode(plan_of(source)), "schema_version": 2}))
    with pytest.raises(UsageError, match="is no plan: .* another mm2 wrote it: version 2; this one reads 1"):
        PartitionPlan.read(path)
    for text in ("", "[]", "null", "{}"):
        path.write_text(text)
        with pytest.raises(UsageError, match="is no plan"):
            PartitionPlan.read(path)
    with pytest.raises(UsageError, match="is no plan: found FileNotFoundError"):
        PartitionPlan.read(tmp_path / "absent.json")


def test_faults_are_found_where_only_some_headers_are_known(source: SliceSource) -> None:
    assert source.entries is not None
    plan, names = plan_of(source), source.entries.keys()
    some = {Q_PROJ: source.entries[Q_PROJ]}

    def faults(of: PartitionPlan) -> list[str]:
        return of.find_faults(some, source.architecture, folder=source.folder, names=names)

    assert faults(plan) == []
    assert faults(change(plan, 2, without(NORM))) == [f"node c lacks {NORM}"]
    assert faults(change(plan, 1, adding(UNKNOWN))) == [f"node b holds {UNKNOWN}, which the checkpoint lacks"]


@pytest.mark.parametrize(
    ("nodes", "holds_embedding"), [(THREE, [True, False, True]), (nodes_of((0, 4)), [True])]
)
def test_tied_embedding_lies_with_the_head_too_and_once_where_one_node_holds_both(
    nodes: tuple[Node, ...], holds_embedding: list[bool], source: SliceSource
) -> None:
    plan = plan_of(tied(source), nodes)
    reason = "the lm_head is tied to the embedding"
    assert plan.shared == ({EMBEDDING: reason} if len(nodes) > 1 else {})
    assert [EMBEDDING in slice_.names for slice_ in plan.slices] == holds_embedding
    assert faults_of(plan, tied(source)) == []
    for slice_ in plan.slices:
        assert slice_.cost.stored_bytes == sum(tensor.size_bytes for tensor in slice_.tensors)


@pytest.mark.parametrize(
    ("position", "edit", "said"),
    [
        (0, staged(layers=range(2)), "node b begins with layer 1, expected layer 2"),
        (1, staged(layers=range(1, 2)), "node c begins with layer 3, expected layer 2"),
        (2, staged(layers=range(3, 3)), "the slices end with layer 2, the model with 3"),
        (2, staged(layers=range(3, 5)), "the slices end with layer 4, the model with 3"),
        (1, staged(layers=range(3, 1)), "node b has layers 3 to 1"),
        (1, staged(layers=range(3, 1)), "node c begins with layer 3, expected layer 1"),
        (0, staged(has_embedding=False), "the embedding is on no node, expected a"),
        (1, staged(has_embedding=True), "the embedding is on a, b, expected a"),
        (2, staged(has_head=False), "the head is on no node, expected c"),
        (1, staged(has_head=True), "the head is on b, c, expected c"),
        (1, staged(node=THREE[0]), "node a is there twice"),
        (1, staged(node=replace(THREE[1], memory_bytes=9)), " bytes of memory, but has 9"),
        (1, without(Q_PROJ), f"node b lacks {Q_PROJ}"),
        (1, without(Q_PROJ + "_scale_inv"), f"node b lacks {Q_PROJ}_scale_inv"),
        (0, without(EMBEDDING), f"node a lacks {EMBEDDING}"),
        (0, adding(Q_PROJ), f"node a holds {Q_PROJ}, which belongs to another node"),
        (1, adding(Q_PROJ), f"node b holds {Q_PROJ} 2 times"),
        (1, adding(UNKNOWN), f"node b holds {UNKNOWN}, which the checkpoint lacks"),
        (
            1,
            placing(file="model-00002-of-00004.safetensors", start=1, stop=2),
            f"{Q_PROJ} does not lie at by",
        ),
        (1, placing(file="other.safetensors"), f"{Q_PROJ} does not lie at other.safetensors"),
    ],
)
def test_each_fault_is_found(position: int, edit: Edit, said: str, source: SliceSource) -> None:
    faults = faults_of(change(plan_of(source), position, edit), source)
    assert any(said in fault for fault in faults), faults


def test_wrong_sharing_is_found(source: SliceSource) -> None:
    source = tied(source)
    plan = plan_of(source)
    assert faults_of(change(plan, 1, adding(EMBEDDING)), source) == [
        f"node b holds {EMBEDDING}, which belongs to another node"
    ]
    assert faults_of(change(plan, 2, without(EMBEDDING)), source) == [f"node c lacks {EMBEDDING}"]
    assert faults_of(replace(plan, shared={}), source) == [f"the plan shares nothing, expected {EMBEDDING}"]
    assert faults_of(replace(plan, shared={**plan.shared, NORM: "why not"}), source) == [
        f"the plan shares {EMBEDDING}, {NORM}, expected {EMBEDDING}"
    ]


def test_all_faults_are_told_at_once_and_no_others(source: SliceSource) -> None:
    plan = change(plan_of(source), 0, staged(has_embedding=False))
    plan = change(change(plan, 1, without(Q_PROJ)), 2, adding(NORM))
    faults = faults_of(plan, source)
    assert faults == [
        "the embedding is on no node, expected a",
        f"node a holds {EMBEDDING}, which belongs to another node",
        f"node b lacks {Q_PROJ}",
        f"node c holds {NORM} 2 times",
    ]
    with pytest.raises(CheckpointError) as raised:
        plan.validate(source.entries, source.architecture, folder=source.folder)
    assert raised.value.what == f"the plan for {source.model} has 4 faults"
    assert [fault for fault in faults if fault not in str(raised.value)] == []
