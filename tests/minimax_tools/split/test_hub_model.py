"""A hub's id, split in a process of its own: huggingface_hub reads its variables when it is imported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOP = ("model.layers.3.", "model.norm.", "lm_head.")
_SPLIT = """
import sys
import torch
from minimax_tools.split.factory import ModelFactory

parts = ModelFactory.create_split_models("minimax_m2", "owner/tiny", 1, 3, verbose=True)
states = torch.load(sys.argv[1] + "/ids.pt")
with torch.no_grad():
    for part in parts:
        states = part(states)
torch.save(states, sys.argv[1] + "/logits.pt")
"""


def test_shards_are_fetched_component_by_component_each_once(
    hub: Any, make: Callable[..., Any], input_ids: torch.Tensor, tmp_path: Path, forked_python: Any
) -> None:
    made = make("minimax_m2")
    hub.add("owner/tiny", made.folder)
    torch.save(input_ids, tmp_path / "ids.pt")
    done = forked_python(
        _SPLIT, tmp_path, HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0"
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), made.logits(input_ids, None))
    shards = sorted(path.name for path in made.folder.glob("*.safetensors"))
    asked = [one.file for one in hub.asked("GET") if one.file in shards]
    assert sorted(asked) == shards
    assert done.stderr.index("Loading component: bottom") < done.stderr.index("Memory: Bottom loaded")
    only_top = {
        shard for shard in shards if all(name.startswith(TOP) for name in load_file(made.folder / shard))
    }
    assert only_top
    assert set(asked[-len(only_top) :]) == only_top
    assert f"Shards: {len(shards)} of" not in done.stderr
