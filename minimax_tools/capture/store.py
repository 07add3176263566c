"""Store: the folders of captures, `<captures>/<side>/<run>`, and the captures that lie there, newest first."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import click

from minimax_tools.errors import CaptureError

MANIFEST_NAME = "manifest.json"  # a folder that holds it is a capture
GOLDEN_SIDE = "gpu_reference"  # goldens
DEVICE_SIDE = "neuron"  # runs of a port on a device
# The folder of all captures, and the variable that names another.
DEFAULT_CAPTURES = Path("mm2-captures")
CAPTURES_VARIABLE = "MM2_CAPTURES"
_COMMANDS = {
    GOLDEN_SIDE: "mm2-gpu extract-all --model DIR",
    DEVICE_SIDE: "mm2-test sweep --model DIR --golden DIR",
}
_OPTIONS = {GOLDEN_SIDE: "--golden", DEVICE_SIDE: "--run"}


def captures_folder(context: click.Context | None = None) -> Path:
    """Return the folder of all captures, as the running command was given it; else the usual one.

    `context` is the running command's, if it is not the current one.
    """
    context = context or click.get_current_context(silent=True)
    given = None if context is None else context.params.get("captures")
    return Path(given or os.environ.get(CAPTURES_VARIABLE) or DEFAULT_CAPTURES)


def capture_directory(captures: Path, side: str, run_name: str) -> Path:
    """Return the directory of a run under the captures folder."""
    return captures / side / run_name


def list_captures(*folders: Path) -> list[Path]:
    """Return the captures that lie in some folders, by the time of their manifests, newest first; none is opened."""
    manifests = {path for folder in folders for path in folder.glob(f"*/{MANIFEST_NAME}")}
    # Of two manifests of one time the names decide.
    newest_first = sorted(manifests, key=lambda path: (path.stat().st_mtime_ns, path), reverse=True)
    return [path.parent for path in newest_first]


def group_name(layer: int | None) -> str:
    """Return the first part of the names of a layer's files; None stands for the sites outside the layers."""
    return "model" if layer is None else f"layer_{layer}"


def sites_file(layer: int | None) -> str:
    """Return the name of the file with a layer's sites."""
    return f"{group_name(layer)}.safetensors"


def twins_file(layer: int | None) -> str:
    """Return the name of the file with the float32 twins of a layer's sites."""
    return f"{group_name(layer)}.fp32.safetensors"


def floor_file(layer: int | None) -> str:
    """Return the name of the file with a layer's noise floor."""
    return f"{group_name(layer)}.floor.safetensors"


def layer_files(directory: Path, layer: int) -> tuple[Path, ...]:
    """Return the files that a capture may hold of a layer: its sites, their float32 twins and the noise floor."""
    return tuple(directory / name for name in (sites_file(layer), twins_file(layer), floor_file(layer)))


def stored_layers(directory: Path) -> tuple[int, ...]:
    """Return the layers of which a capture holds a file, ascending, by their names alone; () if there is no capture."""
    numbers = (path.stem.removeprefix("layer_") for path in directory.glob("layer_*.safetensors"))
    return tuple(sorted(int(number) for number in numbers if number.isdecimal()))


def files_of_layers(directory: Path, layers: Iterable[int], *, most_bytes: int) -> tuple[Path, ...]:
    """Return the files that a capture holds of some layers, in their order, as long as they have `most_bytes`."""
    files: list[Path] = []
    for layer in layers:
        files += (path for path in layer_files(directory, layer) if path.is_file())
        if sum(path.stat().st_size for path in files) > most_bytes:
            break
    return tuple(files)


def newest_capture(captures: Path, side: str) -> Path:
    """Return the capture of a side whose manifest was written last."""
    stored = list_captures(captures / side)
    if not stored:
        raise CaptureError(
            f"no capture under {captures / side}",
            next_step=f"Make one first: {_COMMANDS[side]}; or name one with {_OPTIONS[side]}.",
        )
    return stored[0]
