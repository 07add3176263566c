"""NamedSides: the two sides of a comparison as a command's options name them; and the options for its layers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import click

from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import DEVICE_SIDE, GOLDEN_SIDE, newest_capture
from minimax_tools.command_line.options import captures_option, grouped_as, reading_options, stack_options
from minimax_tools.command_line.remote_paths import CapturePath
from minimax_tools.dumps.opening import DumpReading, is_others, open_sides
from minimax_tools.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedSides:
    """The two sides of a comparison, as a user named them."""

    gpu_path: Path | None  # the golden; None for the newest under `captures`
    neuron_path: Path | None  # the device run; None for the newest under `captures`
    captures: Path  # folder of all captures
    reading: DumpReading  # the layout of whichever side mm2 did not write
    gpu_reading: DumpReading  # the golden's layout
    neuron_reading: DumpReading  # the device run's layout

    def open(self) -> tuple[CaptureSource, CaptureSource]:
        """Open the golden and the device run, in that order, whichever tool wrote them.

        Raises:
            CaptureError: A directory is missing, holds no capture, or holds a damaged one.
            IncomparableError: Another tool's dump is of other prompts than the other side.
            UsageError: A --map file is wrong, or it cannot be told which side --map or --format is meant for.
        """
        golden = self.gpu_path or newest_capture(self.captures, GOLDEN_SIDE)
        device = self.neuron_path or newest_capture(self.captures, DEVICE_SIDE)
        golden_reading, device_reading = self._assign_readings(golden, device)
        return open_sides(golden, device, reference_reading=golden_reading, target_reading=device_reading)

    @property
    def reading_arguments(self) -> tuple[str, ...]:
        """The options that name the layout of either side, as a command takes them."""
        readings = {"": self.reading, "gpu-": self.gpu_reading, "neuron-": self.neuron_reading}
        return tuple(
            word
            for side, reading in readings.items()
            for option, value in ((f"--{side}format", reading.format), (f"--{side}map", reading.names.path))
            if value is not None
            for word in (option, str(value))
        )

    def _assign_readings(self, golden: Path, device: Path) -> tuple[DumpReading, DumpReading]:
        """Return the layout of each side; --format and --map go to the one that is not mm2's own."""
        if self.reading.is_default:
            return self.gpu_reading, self.neuron_reading
        # Whether each side is another tool's dump.
        are_foreign = (is_others(golden), is_others(device))
        if are_foreign == (False, False):
            raise UsageError(
                "--format and --map are for a dump of another tool, and mm2 wrote both sides",
                next_step="Leave them out.",
            )
        if are_foreign == (True, False) and self.gpu_reading.is_default:
            return self.reading, self.neuron_reading
        if are_foreign == (False, True) and self.neuron_reading.is_default:
            return self.gpu_reading, self.reading
        raise UsageError(
            "which side --format or --map is meant for cannot be told",
            expected="one side that another tool wrote, and no options of its own for it",
            next_step="Use --gpu-format and --gpu-map, --neuron-format and --neuron-map.",
        )


sides_options = stack_options(
    click.option(
        "--gpu-path",
        type=CapturePath(),
        help="Golden capture. Default: the newest under --captures.",
    ),
    click.option(
        "--neuron-path",
        type=CapturePath(),
        help="Device run. Default: the newest under --captures.",
    ),
    captures_option,
    reading_options(whose="the side that mm2 did not write"),
    reading_options("gpu-", whose="the golden"),
    reading_options("neuron-", whose="the device run"),
    # The command gets the options above as one argument, `sides`.
    grouped_as("sides", NamedSides),
)


def _read_pattern(layer: str | None, layer_pattern: str | None) -> str | None:
    """Return the pattern of the layers' names; None if none was given. `--layer 7` and `--layer 07` mean `layer_7`.

    Raises:
        UsageError: Both options were given.
    """
    if layer is not None and layer_pattern is not None:
        raise UsageError("--layer and --layer-pattern were both given", next_step="Use one of them.")
    if layer is not None and layer.isdecimal():
        return f"layer_{int(layer)}"
    return layer_pattern if layer is None else layer


layers_options = stack_options(
    click.option("--layer", metavar="layer_0", help="Name or number of the only layer to look at."),
    click.option(
        "--layer-pattern",
        metavar="'layer_*'",
        help="Names of the layers to look at. Default: all layers; in mm2-diagnose those that the comparison blames.",
    ),
    grouped_as("layer_pattern", _read_pattern),
)
