"""The command `mm2-gpu`: golden captures with transformers, on GPUs or the CPU."""

from __future__ import annotations

import click

from minimax_tools.command_line.group import CommandPlace, Mm2Group


@click.group(
    cls=Mm2Group,
    epilog="\b\nExample: mm2-gpu extract-all --model MiniMaxAI/MiniMax-M2 --max-memory 40GB",
)
def main() -> None:
    """Make golden captures of a MiniMax-M2 with transformers' own model."""


main.add_section(
    "Make a golden",
    CommandPlace(
        "extract-all",
        "gpu_reference.commands.capture:extract_all_command",
        "Capture every layer in one forward pass, by one process or, with --plan, by several ranks.",
    ),
    CommandPlace(
        "full",
        "gpu_reference.commands.capture:full_command",
        "Capture every layer, then generate; token ids and text are saved beside the activations.",
    ),
    CommandPlace(
        "single-layer",
        "gpu_reference.commands.capture:single_layer_command",
        "Capture one layer; the layers before it run too, to compute its input.",
    ),
    CommandPlace(
        "multi-layer",
        "gpu_reference.commands.capture:multi_layer_command",
        "Capture a range of layers; the layers before it run too.",
    ),
)
main.add_section(
    "Use a golden",
    CommandPlace(
        "certify",
        "gpu_reference.commands.certify:certify_command",
        "Check a finished golden before it is trusted; the result becomes a part of it.",
    ),
    CommandPlace(
        "show",
        "gpu_reference.commands.show:show_command",
        "Print what a capture holds: layers, sites, shapes and statistics, what was generated, and any damage.",
    ),
    CommandPlace(
        "export",
        "gpu_reference.commands.export:export_command",
        "Write two goldens, in BF16 and in float32, as the reference captures of another tool.",
    ),
    CommandPlace(
        "publish",
        "gpu_reference.commands.publish:publish_command",
        "Put a certified golden at a remote address, with a card that says what made it.",
    ),
)
main.add_section(
    "Prepare",
    CommandPlace(
        "check",
        "gpu_reference.commands.check:check_command",
        "Report what this machine is, and which options make a golden on it, with the memory and about the "
        "time of each.",
    ),
)
