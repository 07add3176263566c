"""The Python code that pages show, run in the order of each page."""

from __future__ import annotations

import ast
import asyncio
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import mm2
from minimax_tools.capture.taps import Tap
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.cli import main as mm2_test
from neuron.ports.exposure import find_exposure
from neuron.ports.target import target_config

REPOSITORY = Path(__file__).parents[1]
PROJECT = REPOSITORY / "scripts" / "examples" / "pytest_project"
LEARNED = REPOSITORY / "tests" / "models" / "learned"
_BLOCK = re.compile(r"^```python\n(?P<text>.*?)^```", re.MULTILINE | re.DOTALL)
# Models of the page `splitting`, and what is at hand in their place.
AT_HAND = {
    'model_type="qwen2"': 'model_type="minimax_m2"',
    '"Qwen/Qwen2-7B"': repr(str(LEARNED)),
    "split_point_1=8": "split_point_1=1",
    "split_point_2=24": "split_point_2=3",
    '"./models_cache/gpt2"': repr(str(LEARNED)),
    "transformer.h.0.attn.c_attn.weight": "model.layers.0.self_attn.q_proj.weight",
}


def blocks(page: str) -> Iterator[str]:
    text = (REPOSITORY / "docs" / f"{page}.md").read_text()
    yield from (block["text"] for block in _BLOCK.finditer(text))


def run(code: str, names: dict[str, Any]) -> None:
    """Run code that may await, as a notebook does."""
    compiled = compile(code, "page", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    pending = eval(compiled, names)
    if inspect.iscoroutine(pending):
        asyncio.run(pending)


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, from which the port of the example project can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(PROJECT)
    return tmp_path


def test_page_python_does_what_it_shows(
    reader: Path, golden: Path, toy: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    captures = reader / "mm2-captures"
    (captures / "gpu_reference").mkdir(parents=True)
    (captures / "gpu_reference" / "full_model").symlink_to(golden)
    options = ("--model", toy, "--golden", golden, "--captures", captures, "--backend", "cpu", "--quiet")
    command(mm2_test, "sweep", *options)
    capsys.readouterr()
    compare, one_tensor, suite, others = blocks("python")
    names: dict[str, Any] = {}
    run(compare, names)
    assert capsys.readouterr().out == "pass 10 17\n"
    run(one_tensor, names)
    run(others, names | {"trusted": names["port"]})
    # pytest runs the suite with the plugin: see tests/mm2/test_pytest_plugin.py.
    run(suite, names)
    names["test_layer"](names["layer"])
    names["golden"].close()


def test_page_python_lists_the_public_names() -> None:
    text = (REPOSITORY / "docs" / "python.md").read_text()
    table = text.partition("| name | is |")[2].partition("\n\n")[0]
    assert [name for name in mm2.__all__ if not re.search(rf"\b{name}\b", table)] == []


def test_page_splitting_does_what_it_shows(reader: Path, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {"input_ids": torch.arange(12)[None]}
    for block in blocks("splitting"):
        for shown, here in AT_HAND.items():
            block = block.replace(shown, here)
        run(block, names)
    assert sorted(path.name for path in (reader / "qwen2-parts").iterdir()) == ["bottom", "top", "trunk"]
    printed = capsys.readouterr().out
    assert "Memory: start\n" in printed
    assert "=== Memory Usage Summary ===\n" in printed
    last = printed.splitlines()[-1]
    assert last in (REPOSITORY / "docs" / "splitting.md").read_text().splitlines()


def test_page_sites_cuts_a_fused_projection(toy: Path, load_module: Any) -> None:
    fused, _ = blocks("sites")
    names: dict[str, Any] = {}
    names["DecoderLayer"] = load_module(REPOSITORY / "scripts" / "examples" / "port.py").DecoderLayer
    run(fused, names)
    config = target_config(ModelSpec.from_folder(toy))
    taps = find_exposure(names["FusedLayer"](config, 0), what="the page's port").taps
    queries = config.num_attention_heads * config.head_dim
    assert taps[Site.Q_PROJ] == Tap(path="self_attn.qkv_proj", part=(0, queries))
    assert len(taps) == 12


def test_code_that_fails_is_told() -> None:
    with pytest.raises(ZeroDivisionError):
        run("import asyncio\nawait asyncio.sleep(0)\n1 / 0", {})
