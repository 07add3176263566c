"""The ranks of a run: processes that a launcher (torchrun, or mm2-test itself) started together.

- `rank_place`: rank and number of ranks, from the launcher's environment
- `failure`: errors that name a failed rank, and the record of the first failure in the store; the key-value store
  that the launcher serves; a stand-in for a single rank
- `rank_group`: ranks that publish values, pass tensors on and end together; the choice of the one rank that reports a
  failure
- `handshake`: the meeting of the ranks of one attempt
- `watch`: signs of life, and the ranks that give none; a rank's process, as other ranks see it; calls in a thread
- `links`: the process group through which tensors go; values from rank 0 to all others, and gathered from them
"""
