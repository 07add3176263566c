"""`python -m neuron`: the command `mm2-test`, as torchrun starts it."""

from __future__ import annotations

from neuron.cli import main

if __name__ == "__main__":
    main(prog_name="mm2-test")
