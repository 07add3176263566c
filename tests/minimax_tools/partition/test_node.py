from __future__ import annotations

import json
from pathlib import Path

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.model.span import Span
from minimax_tools.partition.node import Node, check_nodes, read_nodes


def test_node_is_read_as_it_is_written_on_the_command_line() -> None:
    assert Node.parse("a100:memory=40GB,tflops=312") == Node(
        name="a100", memory_bytes=40_000_000_000, tflops=312.0
    )
    assert Node.parse("trn1.32xl-0: memory = 1GiB, layers=3:9") == Node(
        name="trn1.32xl-0", memory_bytes=2**30, layers=Span(3, 9)
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a", "no memory"),
        ("a:memory=40GB,flops=3", "flops of '3'"),
        ("a:memory=40", "'40' is not a size"),
        ("a:memory=0GB", "memory is 0 bytes"),
        ("a:memory=40GB,tflops=fast", "could not convert"),
        ("a:memory=40GB,tflops=nan", "tflops is nan"),
        ("a:memory=40GB,layers=3", "'3' is no span"),
        ("a:memory=40GB,memory=80GB", "gives a value twice"),
        (":memory=40GB", "the name is ''"),
        ("../a:memory=40GB", "the name is '../a'"),
    ],
)
def test_what_is_no_node_is_refused_and_says_why(text: str, said: str) -> None:
    with pytest.raises(UsageError) as raised:
        Node.parse(text)
    assert said in str(raised.value)


def test_all_that_is_wrong_with_a_node_is_said_at_once() -> None:
    with pytest.raises(UsageError, match="the name is '/'; memory is -1 bytes; tflops is -2"):
        Node(name="/", memory_bytes=-1, tflops=-2)
    with pytest.raises(UsageError, match="memory is 1.5 bytes"):
        Node(name="a", memory_bytes=1.5)  # type: ignore[arg-type]


def test_nodes_of_a_file_may_give_bytes_or_sizes(tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    listed = [
        {"name": "a", "memory": "40GB", "tflops": 312},
        {"name": "b", "memory": 1000, "layers": "0:2"},
    ]
    path.write_text(json.dumps(listed))
    assert read_nodes(path) == (
        Node(name="a", memory_bytes=40_000_000_000, tflops=312.0),
        Node(name="b", memory_bytes=1000, layers=Span(0, 2)),
    )


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "{}",
        "[1]",
        '[{"name": "a"}]',
        '[{"name": "a", "memory": true}]',
        '[{"name": "a", "memory": 4e9}]',
        '[{"name": "a", "memory": null}]',
        '[{"name": "a", "memory": "1GB", "tflops": [1]}]',
    ],
)
def test_file_that_lists_no_nodes_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "nodes.json"
    path.write_text(text)
    with pytest.raises(UsageError):
        read_nodes(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_nodes(tmp_path / "absent.json")


@pytest.mark.parametrize("count", [0, 65])
def test_there_are_1_to_64_nodes(count: int) -> None:
    nodes = [Node(name=f"n{number}", memory_bytes=1) for number in range(count)]
    with pytest.raises(UsageError, match=f"{count} nodes cannot share a model: expected 1 to 64"):
        check_nodes(nodes)
    assert len(check_nodes([Node(name=f"n{number}", memory_bytes=1) for number in range(64)])) == 64


def test_names_that_nodes_share_are_named() -> None:
    nodes = [Node(name=name, memory_bytes=1) for name in "abacb"]
    with pytest.raises(UsageError, match="nodes share a name: found a; b"):
        check_nodes(nodes)
