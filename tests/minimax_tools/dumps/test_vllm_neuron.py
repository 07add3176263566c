"""Folders of vLLM Neuron's dumps: layers, replicas and models in the names of their passes and modules."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import torch

from minimax_tools.dumps.vllm_neuron import read_dump, recognises

T = 4


def write(folder: Path, modules: Iterable[str], *, request: str = "0") -> None:
    """Write one pass of a request's T tokens."""
    name = f"prefill_s{T}_0"
    for module in modules:
        (folder / name / module).mkdir(parents=True)
        torch.save(torch.zeros(T, 2), folder / name / module / "rank0.pt")
    meta = {"req_ids": [request], "positions": list(range(T))}
    (folder / name / f"{name}_meta.json").write_text(json.dumps(meta))


def test_calls_are_counted_from_the_first_layer_that_is_held(tmp_path: Path) -> None:
    write(tmp_path / "dp0", ["model.layers.5.mlp", "model.layers.6.mlp", "manual.q_rope", "manual.q_rope_1"])
    dump = read_dump(tmp_path)
    names = {piece.module for piece in dump.pieces if piece.module.startswith("manual")}
    assert names == {"manual.layers.5.q_rope", "manual.layers.6.q_rope"}
    files = {piece.module: piece.file for piece in dump.pieces}
    assert "manual.q_rope_1/" in files["manual.layers.6.q_rope"]


def test_requests_of_one_name_in_two_replicas_are_two(tmp_path: Path) -> None:
    for replica in (0, 1):
        write(tmp_path / f"dp{replica}", ["model.layers.0.mlp"])
    assert [record.requests for record in read_dump(tmp_path).records] == [("dp0/0",), ("dp1/0",)]


def test_requests_of_other_names_keep_them(tmp_path: Path) -> None:
    for replica in (0, 1):
        write(tmp_path / f"dp{replica}", ["model.layers.0.mlp"], request=f"r{replica}")
    assert [record.requests for record in read_dump(tmp_path).records] == [("r0",), ("r1",)]


def test_passes_beside_the_target_models_folder_are_named(tmp_path: Path) -> None:
    for folder in ("target/dp0", "dp0"):
        write(tmp_path / folder, ["model.layers.0.mlp"])
    assert recognises(tmp_path)
    dump = read_dump(tmp_path)
    assert [piece.file.split("/")[0] for piece in dump.pieces] == ["target"]
    assert dump.notes == ("target/ is read", "not read: passes beside target/, 1")
