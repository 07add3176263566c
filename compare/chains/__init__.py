"""Chains: layers that ran one after the other.

- `curve`: growth of a chained run's error
- `bisection`: the search for wrong layers by running parts of them
- `stream_search`: the same over a model that is compiled whole, by replacing its stream
- `chain_judge`: judges the output at a chain's end
- `chain_noise`: the error there, in units of the layers' noise
- `largest_errors`: largest errors of right ports there
- `chain_limits`: limits by the chain's length
"""
