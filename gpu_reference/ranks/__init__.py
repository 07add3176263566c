"""The ranks of a run that torchrun started: how they meet, talk, and notice that one of them died.

| module | the question it answers |
|---|---|
| `rank_place`, `process` | which rank this is, and which process of which machine the others are |
| `handshake` | who is there, in this attempt and not in the one before |
| `watch`, `stopper` | whether all live, and how the main thread learns that one does not |
| `links`, `errand` | how tensors go from rank to rank, and how a wait for them ends |
| `ranks`, `local_store` | all of it together; the only rank's own store |
"""
