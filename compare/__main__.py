"""The console command `mm2-compare` and `python -m compare`."""

from __future__ import annotations

from minimax_tools.command_line.group import run_command


def main() -> None:
    """Run `mm2-compare`."""
    run_command("mm2-compare", "compare.cli")


if __name__ == "__main__":
    main()
