"""Chains: layers that ran one after the other.

- `curve`: growth of a chained run's error
- `stream_search`: the same over a model that is compiled whole, by replacing its stream; the search for wrong layers
  by running parts of them
- `chain_judge`: judges the output at a chain's end; the error there, in units of the layers' noise; limits by the
  chain's length
"""
