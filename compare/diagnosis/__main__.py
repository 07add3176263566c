"""The console command `mm2-diagnose` and `python -m compare.diagnosis`."""

from __future__ import annotations

from minimax_tools.command_line.group import run_command


def main() -> None:
    """Run `mm2-diagnose`."""
    run_command("mm2-diagnose", "compare.diagnosis.cli")


if __name__ == "__main__":
    main()
