"""The console commands `mm2-split` and `verify_slice_loading.py`, and `python -m minimax_tools`."""

from __future__ import annotations

from minimax_tools.command_line.group import run_command


def main() -> None:
    """Run `mm2-split`."""
    run_command("mm2-split", "minimax_tools.cli", "mm2_split")


def verify_slice_loading() -> None:
    """Run `verify_slice_loading.py`, the name under which exo's users know `mm2-split verify` with every section."""
    run_command(
        "verify_slice_loading.py", "minimax_tools.commands.verify", "verify_command", further=("--verbose",)
    )


if __name__ == "__main__":
    main()
