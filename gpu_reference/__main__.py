"""The console command `mm2-gpu`, and `python -m gpu_reference`, as torchrun starts it."""

from __future__ import annotations

from minimax_tools.command_line.group import run_command


def main() -> None:
    """Run `mm2-gpu`."""
    run_command("mm2-gpu", "gpu_reference.cli")


if __name__ == "__main__":
    main()
