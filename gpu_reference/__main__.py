"""`python -m gpu_reference`: the command `mm2-gpu`, as torchrun starts it."""

from __future__ import annotations

from gpu_reference.cli import main

if __name__ == "__main__":
    main(prog_name="mm2-gpu")
