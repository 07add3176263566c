"""`mm2-split synthesize` at work: a checkpoint of random numbers written."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path

import torch

from minimax_tools.capture.run_commands import make_golden
from minimax_tools.command_line.console import print_json, print_text
from minimax_tools.errors import format_count
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import PRESETS


def synthesize_model(
    output: Path,
    preset_name: str,
    dtype: torch.dtype,
    shard_size_bytes: int | None,
    seed: int,
    as_json: bool,
    **sizes: int | None,
) -> None:
    """Write a checkpoint of random numbers, and print its size."""
    chosen = {name: size for name, size in sizes.items() if size is not None}
    model = replace(PRESETS[preset_name], **chosen)
    made = synthesize(output, model=model, dtype=dtype, shard_size_bytes=shard_size_bytes, seed=seed)
    following = (make_golden(str(made.folder)),)
    if as_json:
        print_json({**asdict(made), "folder": str(made.folder)}, next_commands=following)
    else:
        text = (
            f"{made.folder}: {format_count(made.num_tensors, 'tensor')} in "
            f"{format_count(made.num_shards, 'shard')}, {format_count(made.size_bytes, 'byte')} of tensors"
        )
        print_text(text, next_commands=following)
