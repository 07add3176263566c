"""Make a checkpoint with all 62 layers of MiniMax-M2's true dimensions: 230 GB that take 17.5 GB of disk.

A few distinct layers are synthesized as by `mm2-split synthesize`. Each other layer clones the FP8 codes of one
distinct layer, which XFS and btrfs can do. Its norms, router gate, correction bias and FP8 scales are its own. Readers
see an ordinary checkpoint in the hub's layout, of 187 shards.

If --output lies on a file system without reflinks, root makes an XFS in a sparse file, mounted read-only on --output.
A second call finds the checkpoint; after a restart of the machine it mounts the image again.

The page cache takes clones for separate files: each is cold until it is read, as a shard of a true checkpoint. If the
loop device can (`is_read_directly` tells), the image bypasses the cache of the file system below it. So reading 2 GB of
a clone reads 2 GB from the disk, even right after its source (measured). Only a cache further below, such as that of a
virtual machine's host, can merge clones.

Exit code 3 if it cannot run: not Linux, not root, no xfsprogs, loop mounts forbidden, too little disk.

Example: python scripts/full_size_checkpoint.py --output m2 --json
"""

from __future__ import annotations

import json
import logging
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
from cloned_shards import PlannedShard, plan_shards, write_shards
from reflinks import (
    ReflinkImage,
    backing_file,
    discard_partial,
    has_reflinks,
    is_read_directly,
    new_image,
    refuse_foreign,
    require_image_tools,
    require_room,
    unmount,
)

from minimax_tools.capture.run_commands import make_golden
from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.checkpoint.weight_files import INDEX_FILE
from minimax_tools.command_line.console import Mm2Command, print_json
from minimax_tools.command_line.options import output_options
from minimax_tools.errors import UsageError
from minimax_tools.synthetic.checkpoint import FP8
from minimax_tools.synthetic.random_weights import SyntheticWeights
from minimax_tools.synthetic.toy_model import PRESETS, SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import write_tokenizer

# The file that says what this script wrote.
RECORD_FILE = "full_size_checkpoint.json"
_DISTINCT_LAYERS = 4
_SPARE_BYTES = 256 << 20  # the file system's log, indexes and headers


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A checkpoint that was asked for; `distinct_layers` is the number of layers with FP8 codes of their own.

    Raises:
        UsageError: There are more distinct layers than layers.
    """

    preset: str
    num_hidden_layers: int
    distinct_layers: int
    seed: int

    def __post_init__(self) -> None:
        if self.distinct_layers > self.num_hidden_layers:
            raise UsageError(
                f"{self.distinct_layers} distinct layers were asked for",
                expected=f"at most --num-hidden-layers, {self.num_hidden_layers}",
            )

    @property
    def model(self) -> SyntheticModel:
        """Quantities of the model."""
        return replace(PRESETS[self.preset], num_hidden_layers=self.num_hidden_layers)

    def plan(self) -> tuple[PlannedShard, ...]:
        """Plan the shards."""
        return plan_shards(self.model, num_distinct_layers=self.distinct_layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class FullSizeCheckpoint:
    """A checkpoint on this machine."""

    folder: Path
    image: Path | None  # file of the image that holds it; None if the folder's own file system has reflinks
    is_read_directly: bool  # False if the file system below the image caches it too
    was_there: bool  # True if this call did not build it
    num_hidden_layers: int
    distinct_layers: int
    logical_bytes: int  # size of the tensors
    disk_bytes: int  # disk space that the tensors take
    seconds: float  # time that it took to build


def provide(request: Request, *, output: Path, image: Path | None) -> FullSizeCheckpoint:
    """Find the checkpoint at `output`, mount its image there, or build it.

    `output` is new, empty, or holds the same checkpoint. `image` is the file of the image; None makes an image beside
    `output`, and only if reflinks are missing.

    Raises:
        UsageError: Something else is at `output` or `image`.
        CannotRunError: This machine cannot hold or mount the checkpoint.
    """
    _refuse_occupied(output)
    if (output / RECORD_FILE).exists():
        return _describe(request, output, was_there=True)
    reflink_image = ReflinkImage(file=image or _default_image(output))
    if reflink_image.file.exists():
        refuse_foreign(reflink_image)
        require_image_tools()
        reflink_image.mount(output, is_read_only=True)
        return _describe(request, output, was_there=True)
    output.parent.mkdir(parents=True, exist_ok=True)
    if image is None and has_reflinks(output.parent):
        _build_in_folder(request, output)
    else:
        require_image_tools()
        _build_in_image(request, output, reflink_image)
    return _describe(request, output, was_there=False)


def unmount_checkpoint(output: Path) -> tuple[Path, ...]:
    """Unmount the image at `output`, remove the folder, keep the image; return the folder if it was mounted.

    Raises:
        CannotRunError: The image is in use.
    """
    if backing_file(output) is None or not (output / RECORD_FILE).exists():
        return ()
    unmount(output)
    return (output,)


def remove_checkpoint(output: Path, *, image: Path | None) -> tuple[Path, ...]:
    """Unmount and delete the checkpoint, its image, and what a killed build left; return what was unmounted or deleted.

    Raises:
        UsageError: This script did not make the files.
        CannotRunError: The checkpoint is in use.
    """
    _refuse_occupied(output)
    file = backing_file(output) or image or _default_image(output)
    done = unmount_checkpoint(output)
    discard_partial(file, scratch=_partial(output))
    if file.exists():
        refuse_foreign(ReflinkImage(file=file))
        file.unlink()
        done += (file,)
    if output.exists():
        shutil.rmtree(output)
        done += (output,)
    return done


def _build_in_folder(request: Request, output: Path) -> None:
    plan, partial = request.plan(), _partial(output)
    require_room(output.parent, _disk_bytes(plan))
    discard_partial(_default_image(output), scratch=partial)
    try:
        partial.mkdir()
        _write(request, plan, partial)
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _build_in_image(request: Request, output: Path, image: ReflinkImage) -> None:
    plan = request.plan()
    with new_image(image.file, size_bytes=_disk_bytes(plan), scratch=_partial(output)) as folder:
        _write(request, plan, folder)
    # Mounted anew, so the files that were just written are not in the page cache.
    image.mount(output, is_read_only=True)


def _write(request: Request, plan: tuple[PlannedShard, ...], folder: Path) -> None:
    began = time.monotonic()
    token_ids = write_tokenizer(folder, vocab_size=request.model.vocab_size)
    _write_json(folder / "config.json", request.model.config(dtype=FP8, token_ids=token_ids))
    write_shards(folder, plan, SyntheticWeights(request.model.spec(), seed=request.seed))
    logical_bytes = sum(shard.data_bytes for shard in plan)
    weight_map = {tensor.name: shard.file_name for shard in plan for tensor in shard.tensors}
    _write_json(folder / INDEX_FILE, {"metadata": {"total_size": logical_bytes}, "weight_map": weight_map})
    # This checks each header against the index.
    TensorIndex.from_folder(folder)
    record = {
        "request": asdict(request),
        "logical_bytes": logical_bytes,
        "written_bytes": sum(shard.written_bytes for shard in plan),
        "seconds": round(time.monotonic() - began, 1),
        "clones": {shard.file_name: shard.source.file_name for shard in plan if shard.source is not None},
    }
    _write_json(folder / RECORD_FILE, record)


def _describe(request: Request, output: Path, *, was_there: bool) -> FullSizeCheckpoint:
    """Describe the checkpoint at `output` by its record, and check that it is the requested one."""
    record = json.loads((output / RECORD_FILE).read_text(encoding="utf-8"))
    if record["request"] != asdict(request):
        raise UsageError(
            f"{output} holds another checkpoint",
            expected=str(asdict(request)),
            found=str(record["request"]),
            next_step="Name another --output, or delete this one first: --remove.",
        )
    image = backing_file(output)
    return FullSizeCheckpoint(
        folder=output,
        image=image,
        is_read_directly=image is None or is_read_directly(output),
        was_there=was_there,
        num_hidden_layers=request.num_hidden_layers,
        distinct_layers=request.distinct_layers,
        logical_bytes=record["logical_bytes"],
        # Files in a folder do not tell what they share: so the bytes that were written count.
        disk_bytes=record["written_bytes"] if image is None else image.stat().st_blocks * 512,
        seconds=record["seconds"],
    )


def _refuse_occupied(output: Path) -> None:
    """Check that `output` is new, empty, or written by this script."""
    if output.exists() and not (output / RECORD_FILE).exists():
        if not output.is_dir() or any(output.iterdir()):
            raise UsageError(
                f"{output} exists, and this script did not write it",
                expected="a new or empty folder",
                next_step="Name another --output, or remove it.",
            )
        if output.is_mount():
            raise UsageError(
                f"{output} is where a file system is mounted", expected=f"a folder in it: {output}/m2"
            )


def _disk_bytes(plan: tuple[PlannedShard, ...]) -> int:
    """Return the disk space of the shards, with a fiftieth to spare."""
    written_bytes = sum(shard.written_bytes for shard in plan)
    return written_bytes + written_bytes // 50 + _SPARE_BYTES


def _default_image(output: Path) -> Path:
    return output.with_name(f"{output.name}.img")


def _partial(path: Path) -> Path:
    """Return the hidden folder beside `path` in which it is built, or its image is mounted meanwhile."""
    return path.with_name(f".{path.name}.partial")


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")


def _print_checkpoint(made: FullSizeCheckpoint, *, as_json: bool) -> None:
    if as_json:
        record = {**asdict(made), "folder": str(made.folder), "image": made.image and str(made.image)}
        print_json(record, next_commands=(make_golden(str(made.folder)),))
        return
    state = "was there" if made.was_there else f"built in {made.seconds:.0f} s"
    place = "" if made.image is None else f", mounted from {made.image}"
    click.echo(
        f"{made.folder}: {made.num_hidden_layers} layers, {made.distinct_layers} of them distinct, "
        f"{made.logical_bytes / 1e9:.1f} GB on {made.disk_bytes / 1e9:.1f} GB of disk, {state}{place}"
    )


@click.command(cls=Mm2Command, help=__doc__)
@click.option(
    "--output",
    type=click.Path(path_type=Path, resolve_path=True),
    required=True,
    help="Folder of the checkpoint.",
)
@click.option(
    "--image",
    type=click.Path(path_type=Path, resolve_path=True, dir_okay=False),
    help="File of the image.  [default: OUTPUT.img, if an image is needed]",
)
@click.option(
    "--preset", type=click.Choice(list(PRESETS)), default="m2", show_default=True, help="Sizes of the model."
)
@click.option(
    "--num-hidden-layers", type=click.IntRange(min=1), help="Number of layers.  [default: that of the preset]"
)
@click.option(
    "--distinct-layers",
    type=click.IntRange(min=1),
    help="Number of layers with codes of their own.  [default: 4, or all if there are fewer]",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of every number.")
@click.option("--unmount", "is_unmounted", is_flag=True, help="Unmount the image and keep it.")
@click.option("--remove", "is_removed", is_flag=True, help="Unmount, and delete image and folder.")
@output_options
def main(
    output: Path,
    image: Path | None,
    preset: str,
    num_hidden_layers: int | None,
    distinct_layers: int | None,
    seed: int,
    is_unmounted: bool,
    is_removed: bool,
    as_json: bool,
) -> None:
    """Find, make or remove the checkpoint, and print what is there."""
    # The scripts log as --quiet and --debug have set up mm2's own logger.
    progress = logging.getLogger("minimax_tools")
    logging.basicConfig(level=progress.level, handlers=list(progress.handlers), format="%(message)s")
    if is_unmounted or is_removed:
        done = remove_checkpoint(output, image=image) if is_removed else unmount_checkpoint(output)
        if as_json:
            print_json({"done": [str(path) for path in done]}, next_commands=())
        else:
            click.echo(f"Done with {', '.join(map(str, done))}" if done else "Nothing was there.")
        return
    layers = num_hidden_layers or PRESETS[preset].num_hidden_layers
    request = Request(
        preset=preset,
        num_hidden_layers=layers,
        distinct_layers=distinct_layers or min(_DISTINCT_LAYERS, layers),
        seed=seed,
    )
    _print_checkpoint(provide(request, output=output, image=image), as_json=as_json)


if __name__ == "__main__":
    sys.exit(main())
