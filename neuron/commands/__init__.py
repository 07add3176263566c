"""Commands of `mm2-test` with a file of their own, registered in `neuron.cli`.

- `bisect_layers`: the wrong layers of a range, found by running parts of it
- `trace`: one layer of a port compiled into a file
"""
