"""`mm2-gpu check`: this machine, or one that is described: what is wrong with it, and which options make a golden."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from minimax_tools.checkpoint.expected_tensors import expected_tensors
from minimax_tools.command_line.console import Mm2Command, end_command, loading, print_json, print_text
from minimax_tools.command_line.options import (
    captures_option,
    dtype_option,
    optional_model_option,
    output_options,
    parse_lengths,
    parse_size_option,
    true_size_option,
)
from minimax_tools.errors import CannotRunError, UsageError
from minimax_tools.hub.checkpoint_folder import is_in_bucket, is_on_hub, resolve_config
from minimax_tools.machine.finding import Level, render_findings, worst_level
from minimax_tools.machine.progress import format_duration
from minimax_tools.machine.size import format_size, parse_size
from minimax_tools.machine.streams import align_columns
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.variant_names import DEFAULT_NUM_VARIANTS, variant_names
from minimax_tools.synthetic.toy_model import PRESETS
from minimax_tools.text.input_request import InputRequest

if TYPE_CHECKING:
    import torch

    from gpu_reference.readiness.golden_way import GoldenWay, Job, Speeds


# Rates that are not measured: of NVMe disks in the cloud, of a GPU in float32 without TF32, of a CPU of 16 cores.
_DISK_BYTES_PER_S = 10**9
_GPU_FLOPS_PER_S = 1e13
_CPU_FLOPS_PER_S = 5e11
# Times are estimates: what they tell apart by less counts as equal.
_ABOUT_EQUAL = 1.25
# GPUs, and memory of the host, that people have or rent.
_CONFIGURATIONS = (
    *(("8x80GB", "1TB"), ("6x80GB", "480GB"), ("4x80GB", "320GB"), ("8x40GB", "480GB")),
    *(("1x80GB", "128GB"), ("1x24GB", "32GB"), ("0", "1TB"), ("0", "32GB")),
)


@click.command(
    "check",
    cls=Mm2Command,
    epilog="\b\nExample: mm2-gpu check --model MiniMaxAI/MiniMax-M2\n"
    "Before renting: mm2-gpu check --gpus 8x80GB --memory 1TB",
)
@optional_model_option
@true_size_option
@click.option(
    "--gpus", metavar="8x80GB|24GB|0", help="Describe a machine by its GPUs. Default: this machine."
)
@click.option(
    "--memory",
    callback=parse_size_option,
    metavar="1TB",
    help="Memory of the host, with --gpus. Default: 64GB.",
)
@click.option(
    "--disk-speed",
    callback=parse_size_option,
    metavar="2GB",
    help="Bytes that the disk reads in a second, for the times. Default: measured on the checkpoint, else 1GB.",
)
@click.option(
    "--seq-len",
    "seq_lens",
    callback=parse_lengths,
    metavar="96,61",
    help="Lengths of the golden's rows in tokens. Default: the rows that a golden takes by itself.",
)
@dtype_option
@captures_option
@output_options
def check_command(
    model: str | None,
    preset: str,
    gpus: str | None,
    memory: int | None,
    disk_speed: int | None,
    seq_lens: tuple[int, ...],
    dtype: torch.dtype,
    captures: Path,
    as_json: bool,
) -> None:
    """Report what this machine is, and which options make a golden on it, with the memory and about the time of each.

    With --gpus it is about a machine that you describe. Without --model the golden is that of a published
    model. The last table is of usual machines. Exits with 3 if no way works.
    """
    with loading():
        from gpu_reference.readiness.golden_way import GpuMachine, find_ways
        from gpu_reference.readiness.machine_check import check_machine, check_ways
        from minimax_tools.json_codec import encode

    if memory is not None and gpus is None:
        raise UsageError("--memory describes a machine", next_step="Give --gpus too, such as --gpus 8x80GB.")
    machine = GpuMachine.current() if gpus is None else GpuMachine.parse(gpus, memory)
    spec = PRESETS[preset].spec() if model is None else ModelSpec.from_folder(resolve_config(model))
    job = _build_job(spec, seq_lens, dtype, is_fp8=model is None and spec.family.originals_are_fp8)
    folder = None if model is None or is_on_hub(model) or is_in_bucket(model) else Path(model)
    speeds = _find_speeds(folder if machine.is_here else None, disk_speed, is_here=machine.is_here)
    ways = find_ways(machine, job, speeds)
    findings = [check_ways(ways)]
    if machine.is_here:
        findings = [*check_machine(machine, job, folder=folder, captures=captures), *findings]
    table = _configure(job, speeds)
    worst = worst_level(findings)
    chosen = _choose(ways)
    following = () if model is None or chosen is None or worst is Level.FAIL else (_make(model, chosen),)
    if as_json:
        record = {
            "worst": str(worst),
            "findings": [encode(finding) for finding in findings],
            "machine": encode(machine),
            "ways": [encode(way) for way in ways],
            "speeds": encode(speeds),
            "configurations": table,
        }
        print_json(record, next_commands=following)
    else:
        lines = [*render_findings(findings), "", f"Ways on {machine}", *_render_ways(ways), ""]
        lines += [_word_speeds(speeds), "", "Usual machines", *_render_table(table, job.num_layers)]
        print_text("\n".join(lines), next_commands=following)
    if worst is Level.FAIL:
        end_command(CannotRunError.exit_code)


def _build_job(spec: ModelSpec, seq_lens: tuple[int, ...], dtype: torch.dtype, *, is_fp8: bool) -> Job:
    """Build the golden to make: the usual one, of random rows; `is_fp8` for originals in FP8, without a checkpoint."""
    import torch

    from gpu_reference.model.footprint import Footprint
    from gpu_reference.readiness.golden_way import Job
    from minimax_tools.text.prompts import build_inputs

    footprint = Footprint(
        spec=spec,
        num_layers=spec.num_hidden_layers,
        dtype=dtype,
        inputs=build_inputs(InputRequest(seq_lens=seq_lens), folder=Path("/"), spec=spec),
        keeps_logits=True,
        attn_implementation="sdpa",
        experts_implementation="grouped_mm",
        floor_variants=() if dtype is torch.float32 else variant_names(DEFAULT_NUM_VARIANTS),
    )
    stored_bytes = sum(tensor.size_bytes for tensor in expected_tensors(spec))
    # FP8 is half of BF16.
    return Job(footprint=footprint, stored_bytes=stored_bytes // 2 if is_fp8 else stored_bytes)


def _find_speeds(folder: Path | None, disk_speed: int | None, *, is_here: bool) -> Speeds:
    from gpu_reference.readiness.golden_way import Speeds
    from gpu_reference.readiness.machine_check import measure_cpu, measure_disk

    measured = None if folder is None or disk_speed is not None else measure_disk(folder)
    return Speeds(
        disk_bytes_per_s=disk_speed or measured or _DISK_BYTES_PER_S,
        is_disk_known=bool(disk_speed or measured),
        gpu_flops_per_s=_GPU_FLOPS_PER_S,
        cpu_flops_per_s=measure_cpu() if is_here else _CPU_FLOPS_PER_S,
    )


def _choose(ways: Sequence[GoldenWay]) -> GoldenWay | None:
    """Return the first way that is about as fast as the fastest; None if no way works."""
    times_s = [way.time_s for way in ways if way.time_s is not None]
    return next(
        (way for way in ways if way.time_s is not None and way.time_s <= _ABOUT_EQUAL * min(times_s)), None
    )


def _make(model: str, way: GoldenWay) -> str:
    return shlex.join(("mm2-gpu", "extract-all", "--model", model, *way.options))


def _configure(job: Job, speeds: Speeds) -> list[dict[str, Any]]:
    from gpu_reference.readiness.golden_way import GpuMachine, find_ways, layers_on_gpus

    rows = []
    for gpus, memory in _CONFIGURATIONS:
        machine = GpuMachine.parse(gpus, parse_size(memory))
        chosen = _choose(find_ways(machine, job, speeds))
        rows.append(
            {
                "machine": str(machine),
                "layers_on_gpus": layers_on_gpus(machine, job),
                "works": chosen is not None,
                "way": "" if chosen is None else chosen.name,
                "options": [] if chosen is None else list(chosen.options),
            }
        )
    return rows


def _render_ways(ways: Sequence[GoldenWay]) -> list[str]:
    rows = [("way", "fits", "layers", "takes", "of", "on the host", "about", "options")]
    for way in ways:
        rows.append(
            (
                way.name,
                "yes" if way.works else "no",
                str(way.num_layers_held),
                format_size(way.needed_bytes),
                format_size(way.room_bytes),
                format_size(way.needed_host_bytes) if way.needed_host_bytes else "",
                "" if way.time_s is None else format_duration(way.time_s),
                " ".join(way.options),
            )
        )
    return _table(rows)


def _render_table(table: Sequence[Mapping[str, Any]], num_layers: int) -> list[str]:
    rows = [("machine", "layers on GPUs", "the golden is made")]
    rows += [
        (row["machine"], f"{row['layers_on_gpus']} of {num_layers}", row["way"] or "not at all")
        for row in table
    ]
    return _table(rows)


def _table(rows: Sequence[tuple[str, ...]]) -> list[str]:
    numbers = {"layers", "takes", "of", "on the host", "about"}
    return [f"  {line}" for line in align_columns(rows, words=set(rows[0]) - numbers)]


def _word_speeds(speeds: Speeds) -> str:
    known = "" if speeds.is_disk_known else " (assumed: --disk-speed sets it)"
    return (
        f"Times are estimates: the disk reads {format_size(int(speeds.disk_bytes_per_s))}/s{known}, a GPU computes "
        f"{speeds.gpu_flops_per_s / 1e12:.0f} and the CPU {speeds.cpu_flops_per_s / 1e12:.2f} TFLOP/s in float32."
    )
