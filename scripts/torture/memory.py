"""Captures of many tokens and layers, folders of many captures, an index of many tensors: memory and time."""

from __future__ import annotations

import json
import os
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch
from cpu_golden import WIDE, capture_cpu_golden, write_model
from peaks import watch_package

from minimax_tools.capture.manifest import Entry, Manifest
from minimax_tools.capture.store import MANIFEST_NAME, list_captures
from minimax_tools.machine.json_file import read_json
from minimax_tools.model.span import Span
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.input_request import InputRequest
from torture.tally import Tally

_NUM_LAYERS, _NUM_TOKENS = 62, 4096
_MOST_COMPARED_BYTES = 2e9
_NUM_CAPTURES, _MOST_LISTED_S = 2000, 2.0
_NUM_TENSORS, _MOST_INDEXED_BYTES = 1_000_000, 2e9


def run_memory(scratch: Path, _: int) -> Tally:
    """Compare a capture of true width, list many captures, and plan a model of many tensors."""
    tally = Tally(promise="memory and time are bounded, whatever a capture, a folder or an index holds")
    _compare_wide(tally, scratch)
    _list_many(tally, scratch)
    _index_many(tally, scratch)
    return tally


def _compare_wide(tally: Tally, scratch: Path) -> None:
    model, golden = scratch / "model", scratch / "golden"
    write_model(model, WIDE, dtype=torch.bfloat16)
    words = ("--model", str(model), "--output-dir", str(golden), "--seq-len", str(_NUM_TOKENS))
    watch_package("gpu_reference", "extract-all", *words, "--sites", "component", "--quiet")
    tally.check(True, "the golden of one wide layer is made")
    num_bytes = _repeat_layer(golden)
    watched = watch_package(
        "compare", "--golden", str(golden), "--run", str(golden), "--quiet", expected=range(4)
    )
    tally.check(watched.exit_code == 0, f"{_NUM_LAYERS} layers against themselves: {watched.exit_code}")
    peak = watched.peak_anonymous_bytes
    tally.check(peak <= _MOST_COMPARED_BYTES, f"comparing {num_bytes / 1e9:.0f} GB took {peak / 1e9:.2f} GB")
    tally.figures |= {"compared_gb": num_bytes / 1e9, "compared_peak_gb": peak / 1e9}
    shutil.rmtree(golden)


def _repeat_layer(golden: Path) -> int:
    """Make the files of the golden's only layer those of every layer, as links; return the bytes of all layers."""
    manifest = Manifest.read(golden)
    entries, digests, num_bytes = list(manifest.entries), dict(manifest.digests), 0
    of_layer = list(golden.glob("layer_0*.safetensors"))
    for layer in range(_NUM_LAYERS):
        for path in of_layer:
            num_bytes += path.stat().st_size
            if layer:
                os.link(path, golden / _renamed(path.name, layer))
        if layer:
            entries += [
                replace(entry, layer=layer, file=_renamed(entry.file, layer))
                for entry in manifest.entries
                if entry.layer == 0
            ]
            digests |= {
                _renamed(file, layer): tensors
                for file, tensors in manifest.digests.items()
                if file.startswith("layer_0")
            }
    run = replace(manifest.description.run, span=Span(0, _NUM_LAYERS))
    whole = manifest.with_digests(
        digests,
        description=replace(manifest.description, run=run),
        entries=tuple(sorted(entries, key=_place)),
        complete_layers=tuple(range(_NUM_LAYERS)),
    )
    (golden / MANIFEST_NAME).write_text(whole.as_text(), encoding="utf-8")
    return num_bytes


def _list_many(tally: Tally, scratch: Path) -> None:
    """Fill a folder with captures, and list it as the commands do that take the newest."""
    model, captures = scratch / "small", scratch / "captures"
    write_model(model, SyntheticModel(num_hidden_layers=1), dtype=torch.bfloat16)
    first = captures / "capture_0"
    capture_cpu_golden(model, first, rows=InputRequest(seq_lens=(8,)), noise_floor="off")
    for number in range(1, _NUM_CAPTURES):
        shutil.copytree(first, captures / f"capture_{number}", copy_function=os.link)
    began_s = time.perf_counter()
    listed = list_captures(captures)
    took_s = time.perf_counter() - began_s
    tally.check(len(listed) == _NUM_CAPTURES, f"{len(listed)} of {_NUM_CAPTURES} captures were listed")
    tally.check(took_s <= _MOST_LISTED_S, f"listing {_NUM_CAPTURES} captures took {took_s:.1f} s")
    tally.figures["listed_s"] = took_s
    shutil.rmtree(captures)


def _index_many(tally: Tally, scratch: Path) -> None:
    """Give a checkpoint an index of many further tensors, which lie in shards that are not there."""
    model = scratch / "small"
    index_path = model / "model.safetensors.index.json"
    index = read_json(index_path)
    index["weight_map"] |= {
        f"further.layers.{number // 1000}.mlp.experts.{number % 1000}.weight": f"model-{number // 10_000}.safetensors"
        for number in range(_NUM_TENSORS)
    }
    index_path.write_text(json.dumps(index), encoding="utf-8")
    watched = watch_package("minimax_tools", "memory", "--model", str(model), "--quiet", expected=range(4))
    tally.check(watched.exit_code in (0, 3), f"an index of {_NUM_TENSORS} tensors: {watched.exit_code}")
    peak = watched.peak_anonymous_bytes
    tally.check(peak <= _MOST_INDEXED_BYTES, f"an index of {_NUM_TENSORS} tensors took {peak / 1e9:.2f} GB")
    tally.figures |= {"indexed_s": watched.wall_s, "indexed_peak_gb": peak / 1e9}


def _renamed(file: str, layer: int) -> str:
    return file.replace("layer_0", f"layer_{layer}", 1)


def _place(entry: Entry) -> tuple[bool, int]:
    return entry.layer is None, entry.layer or 0
