"""Unreadable parts of another tool's dump are named, and no comparison passes over them.

A file of a dump is cut off, replaced by text, by a pickle without a tensor, by a folder, or by a link that leads
nowhere; its folder too; and read by a user who may not. Each is compared with the golden.
"""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from compare.cli import main as mm2_compare
from neuron.cli import main as mm2_test
from torture.hostile_world import HostileWorld, run_command
from torture.tally import Tally

_PROMISE = "what cannot be read of a dump is named, and nothing passes over it"
_LEGACY, _TRANSFORMERS = "legacy", "transformers"


def run_unreadable_dumps(scratch: Path, seed: int) -> Tally:
    """Damage each format's dump in each way, and count the commands that do not refuse it by name."""
    tally = Tally(promise=_PROMISE)
    world = HostileWorld.make(scratch / "world")
    _make_legacy(world.dump(_LEGACY))
    _make_transformers(world.dump(_TRANSFORMERS))
    draw = random.Random(seed)
    for dump in sorted(world.dump("nxdi").parent.iterdir()):
        for way, damage in DAMAGES.items():
            if way == "folder without access" and os.geteuid() == 0:
                continue  # nothing is denied to root
            copy = Path(shutil.copytree(dump, scratch / f"{dump.name} {way}"))
            file = draw.choice(sorted((*copy.rglob("*.pt"), *copy.rglob("*.safetensors"))))
            named = damage(file, copy)
            for command, words in (
                (mm2_test, ("show", copy, "--quiet")),
                (mm2_compare, ("--golden", world.golden, "--run", copy, "--quiet")),
            ):
                outcome = run_command(command, *words)
                is_refused = outcome.exit_code == 3 and not outcome.is_traceback
                holds = is_refused and named.name in outcome.one_line
                tally.check(holds, f"{dump.name}: {way}: exit code {outcome.exit_code}: {outcome.one_line}")
    return tally


def _cut(file: Path, _: Path) -> Path:
    file.write_bytes(file.read_bytes()[:100])
    return file


def _empty(file: Path, _: Path) -> Path:
    file.write_bytes(b"")
    return file


def _as_text(file: Path, _: Path) -> Path:
    file.write_text("no tensor\n")
    return file


def _without_tensor(file: Path, _: Path) -> Path:
    torch.save({"meta": 1}, file)
    return file


def _as_folder(file: Path, _: Path) -> Path:
    file.unlink()
    file.mkdir()
    return file


def _as_dangling_link(file: Path, _: Path) -> Path:
    file.unlink()
    file.symlink_to("nowhere")
    return file


def _as_circle(file: Path, _: Path) -> Path:
    file.unlink()
    file.symlink_to(file.name)
    return file


def _extra_dangling_link(file: Path, directory: Path) -> Path:
    extra = file.with_name("another_module")
    extra.symlink_to("nowhere")
    return extra


def _without_access(file: Path, directory: Path) -> Path:
    inner = directory / "denied"
    inner.mkdir(mode=0)
    return inner


# Ways to damage a dump: each takes one of its files and its folder, and returns what must be named.
DAMAGES: Mapping[str, Callable[[Path, Path], Path]] = {
    "cut": _cut,
    "empty": _empty,
    "text": _as_text,
    "a pickle without a tensor": _without_tensor,
    "a folder": _as_folder,
    "a dangling link": _as_dangling_link,
    "a link to itself": _as_circle,
    "a further dangling link": _extra_dangling_link,
    "folder without access": _without_access,
}


def _make_legacy(folder: Path) -> None:
    folder.mkdir()
    rows = torch.zeros(2, 9, 64)
    for name in ("embedding_output.pt", "layer_0_output.pt", "layer_1_output.pt"):
        torch.save(rows, folder / name)
    mask = (torch.arange(9) < torch.tensor([[9], [5]])).to(torch.int64)
    torch.save({"attention_mask": mask}, folder / "metadata.pt")


def _make_transformers(folder: Path) -> None:
    folder.mkdir()
    name = "MiniMaxM2ForCausalLM"
    (folder / f"{name}_debug_tree_FULL_TENSORS.json").write_text("{}")
    save_file({"data": torch.zeros(2, 9, 64)}, folder / f"{name}.model.norm_outputs.safetensors")
