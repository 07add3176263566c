"""Opening: the two sides of a comparison, as a command's options name them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from minimax_tools.capture.source import CaptureSource
from minimax_tools.command_line.options import read_reading, reading_options, stack_options
from minimax_tools.dumps.opening import DumpReading, is_others, open_sides
from minimax_tools.errors import UsageError

opening_options = stack_options(
    reading_options(whose="the side that is not mm2's own"),
    reading_options("gpu-", whose="the golden"),
    reading_options("neuron-", whose="the device run"),
)


def open_named_sides(
    golden: Path, device: Path, options: dict[str, Any]
) -> tuple[CaptureSource, CaptureSource]:
    """Open a golden and a device run, with the options for other tools' dumps.

    Raises:
        CaptureError: A directory does not exist, holds no capture, or the capture is damaged.
        IncomparableError: Another tool's dump is of other prompts than the other side.
        UsageError: A map is wrong, or the side that it is meant for is not clear.
    """
    golden_reading, device_reading = _read_readings(golden, device, options)
    return open_sides(golden, device, reference_reading=golden_reading, target_reading=device_reading)


def _read_readings(golden: Path, device: Path, options: dict[str, Any]) -> tuple[DumpReading, DumpReading]:
    """Read each side's options; --format and --map are meant for the side that mm2 did not write."""
    common = read_reading(options["format"], options["map"])
    golden_reading = read_reading(options["gpu_format"], options["gpu_map"])
    device_reading = read_reading(options["neuron_format"], options["neuron_map"])
    if common.is_default:
        return golden_reading, device_reading
    meant = (is_others(golden), is_others(device))
    if meant == (True, False) and golden_reading.is_default:
        return common, device_reading
    if meant == (False, True) and device_reading.is_default:
        return golden_reading, common
    raise UsageError(
        "which side --format or --map is meant for cannot be told",
        expected="one side that another tool wrote, and no options of its own for it",
        next_step="Use --gpu-format and --gpu-map, --neuron-format and --neuron-map.",
    )
