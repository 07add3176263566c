"""Commands of `mm2-test` with a file of their own, registered in `neuron.cli`.

- `trace`: one layer of a port compiled into a file
"""
