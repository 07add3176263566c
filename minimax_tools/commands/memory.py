"""`mm2-split memory`: the bytes of a checkpoint by dtype, and what it takes in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

import click

from minimax_tools.command_line.console import Mm2Command, loading, print_json, print_text
from minimax_tools.command_line.options import model_option, output_options
from minimax_tools.errors import format_count
from minimax_tools.machine.size import format_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.partition.model_memory import ModelMemory, PartMemory

_STACKED = ("stacking a layer's experts", "held to BF16", "left in float32")


@click.command("memory", cls=Mm2Command, epilog="\b\nExample: mm2-split memory --model MiniMaxAI/MiniMax-M2")
@model_option
@output_options
def memory_command(model: str, as_json: bool) -> None:
    """Print what a checkpoint takes: bytes by dtype, each layer and all of it in BF16 and in float32.

    Only headers and config.json are read. The last lines are about ports that stack the experts of a layer: their
    memory, if the stacked weights are held to BF16, and if they are left in float32.
    """
    with loading():
        from minimax_tools.slices.source import open_source

    source = open_source(model, headers=True)
    memory = ModelMemory.of(source.tensors, source.architecture, source.config)
    has_headers = source.entries is not None
    if as_json:
        print_json(_record(source.model, memory, has_headers=has_headers), next_commands=())
    else:
        print_text(_render(source.model, memory, has_headers=has_headers), next_commands=())


def _record(model: str, memory: ModelMemory, *, has_headers: bool) -> dict[str, Any]:
    from minimax_tools.json_codec import encode

    return {"model": model, "from": "headers" if has_headers else "config.json", **encode(memory)}


def _render(model: str, memory: ModelMemory, *, has_headers: bool) -> str:
    known = "its headers" if has_headers else "config.json: the headers are not known"
    lines = [f"{model}: {format_count(memory.num_layers, 'layer')}, by {known}", ""]
    dtypes = [(one.dtype, str(one.num_tensors), format_size(one.size_bytes)) for one in memory.dtypes]
    lines += [*_table(("stored in", "tensors", "bytes"), dtypes), ""]
    parts = [(name, *_sizes(part)) for name, part in (*_name_groups(memory), ("in all", memory.total))]
    lines += _table(("part", "stored", "in BF16", "in float32"), parts)
    if memory.regrouping is not None:
        regrouping = memory.regrouping
        stacked = {
            "experts of a layer": regrouping.layer_experts,
            "the layer, and its experts once more": regrouping.peak_layer,
            "all layers, if they are kept": regrouping.model,
        }
        lines += ["", *_table(_STACKED, [(name, *_sizes(part)[1:]) for name, part in stacked.items()])]
        lines += [
            "",
            "An FP8 weight times its float32 scale is float32: cast the product to BF16 before stacking.",
        ]
    return "\n".join(lines)


def _name_groups(memory: ModelMemory) -> Iterator[tuple[str, PartMemory]]:
    """Yield the parts; consecutive layers that take the same are one line, with the bytes of each."""
    for part, group in groupby(memory.parts.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        layers = [name.removeprefix("layer_") for name in names if name.startswith("layer_")]
        for name in names:
            if name not in (f"layer_{layer}" for layer in layers):
                yield name, part
        if len(layers) == 1:
            yield f"layer {layers[0]}", part
        elif layers:
            yield f"each of layers {layers[0]} to {layers[-1]}", part


def _sizes(part: PartMemory) -> tuple[str, str, str]:
    return format_size(part.stored_bytes), format_size(part.bfloat16_bytes), format_size(part.float32_bytes)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"  {line}" for line in align_columns([titles, *rows], words=titles[:1])]
