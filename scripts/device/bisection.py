"""Figures of bisection: the number of runs that find the wrong layers of 62.

The model is synthetic and narrow. The port is mm2's device layer. In the wrong layers its o_proj is zero, as if the
weight was never loaded. Runs are counted, not timed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from bench_logits import Ground
from cpu_golden import NARROW, write_model
from figures import Figure

_LENGTHS = {"full": "96,61", "toy": "24,15"}  # tokens of each prompt
# Wrong layers that are searched for one at a time. The last layer takes the most runs; the others lie in either half of
# the model, and where one chain of a run ends and the next begins.
_SINGLE_CULPRITS = {"full": (0, 17, 31, 37, 60, 61), "toy": (37, 61)}
# Wrong layers that are searched for together.
_THREE_CULPRITS = (9, 37, 55)
_PORT = """
import torch
from neuron.builtin.layer import DeviceLayer

class Port(DeviceLayer):
    def convert_state_dict(self, tensors, config, layer_idx):
        state = super().convert_state_dict(tensors, config, layer_idx)
        if layer_idx in {layers}:
            name = "self_attn.o_proj.weight"
            state = {{**state, name: torch.zeros_like(tensors[name])}}
        return state
"""


def measure(scale: str) -> Iterator[Figure]:
    """Yield the figures of bisections of 62 layers with one culprit, with three, and with none."""
    with tempfile.TemporaryDirectory(prefix="mm2-bisection-") as folder:
        scratch = Path(folder)
        write_model(scratch / "model", NARROW)
        rows = ("--seq-len", _LENGTHS[scale], "--sites", "layer")
        floor = ("--noise-floor", "stats", "--floor-variants", "0")
        ground = Ground.make(scratch / "model", scratch, "extract-all", *rows, *floor, name="narrow")
        singles = {layer: _bisect(ground, {layer}) for layer in _SINGLE_CULPRITS[scale]}
        three = _bisect(ground, _THREE_CULPRITS, "--all")
        clean = _bisect(ground, ())
    yield Figure.at_most("bisect_runs_62", max(record["runs"] for record in singles.values()), 7)
    missed = sum(_blamed(record) != {layer} for layer, record in singles.items())
    yield Figure.exactly("bisect_single_culprits_missed", missed, 0)
    wanted = set(_THREE_CULPRITS)
    yield Figure.exactly("bisect_found_of_three", len(_blamed(three) & wanted), 3)
    yield Figure.exactly("bisect_found_beside_three", len(_blamed(three) - wanted), 0)
    yield Figure.plain("bisect_runs_62_of_three", three["runs"])
    yield Figure.exactly("bisect_false_alarms", len(clean["blame"]), 0)
    yield Figure.at_most("bisect_runs_62_clean", clean["runs"], 7)
    visible = clean["smallest_visible"]
    yield Figure.plain("bisect_sees_in_chains_from_%", 100 * (visible["in_chains"] or 0.0))
    yield Figure.plain("bisect_sees_alone_from_%", 100 * (visible["alone"] or 0.0))


def _bisect(ground: Ground, layers: Collection[int], *words: str) -> Any:
    """Bisect a port that is wrong in these layers; return what `mm2-test bisect` prints."""
    port = ground.scratch / f"without_{'_'.join(map(str, layers)) or 'none'}.py"
    port.write_text(_PORT.format(layers=set(layers) or "()"), encoding="utf-8")
    return ground.run("bisect", f"{port}:Port", *words)


def _blamed(record: Any) -> set[int]:
    return {blame["layer"] for blame in record["blame"]}
