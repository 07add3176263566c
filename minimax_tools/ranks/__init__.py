"""The ranks of a run: processes that a launcher (torchrun, or mm2-test itself) started together.

- `failure`: errors that name a failed rank, and the record of the first failure in the launcher's store
- `rank_group`: the place of a rank, from the launcher's environment; ranks that publish values, pass tensors on and end
  together; messages from the lead to all others
"""
