"""The memory that loading takes: anonymous memory of a fresh process, on a checkpoint large enough to measure."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

# Anonymous bytes above those before loading: at most at once, and left at the end.
_MEASURE = """
import json, os, sys
import torch
torch.set_num_threads(1)
from minimax_tools.machine.memory_tracker import MemoryTracker
from minimax_tools.split.factory import ModelFactory

folder, tiny = sys.argv[1:]
# Whatever is imported late is imported now.
ModelFactory.create_split_models("mixtral", tiny, 1, 3)
with MemoryTracker(interval_s=0.001) as tracker:
    before = tracker.get_current_usage()["anonymous_bytes"]
    parts = ModelFactory.create_split_models("mixtral", folder, 2, 4)
    after = tracker.get_current_usage()["anonymous_bytes"]
print(json.dumps({
    "peak": tracker.peak.anonymous_bytes - before,
    "left": after - before,
    "model": sum(part.size_bytes for part in parts),
}))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """300 MB of mixtral, six layers with sixteen experts each, in seven shards."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64,
        hidden_size=512,
        intermediate_size=1024,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=4,
        num_local_experts=16,
    )
    with torch.device("meta"):
        model = MixtralForCausalLM._from_config(config, dtype=torch.bfloat16)
    model.to_empty(device="cpu")
    folder = tmp_path_factory.mktemp("large")
    model.save_pretrained(folder, max_shard_size="50MB")
    return folder


def measure(folder: Path, tiny: Path) -> dict[str, int]:
    command = [sys.executable, "-W", "ignore", "-c", _MEASURE, str(folder), str(tiny)]
    # Freed memory goes back to the system at once: what glibc would keep of it is not counted.
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "100000"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.slow
def test_components_loaded_by_themselves_take_their_own_memory_and_nothing_twice(
    large: Path, make: Callable[..., Any]
) -> None:
    found = measure(large, make("mixtral").folder)
    assert found["model"] > 300e6
    # Matrices of some experts on their way, 1 MB each.
    assert found["peak"] <= 1.05 * found["model"] + 8e6
    # Weights that are not fused stay mapped: attention, 4 % of this model.
    assert found["left"] >= 0.95 * found["model"]
