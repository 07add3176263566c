"""Proofs: a named mistake is undone in the port, and the port is judged again.

- `undo`: a mistake to undo, as `mm2-test --undo` takes it
- `stage_cut`: the sites at which what the port gives is replaced
- `right_stages`: the right values of a stage, from the port's own inputs of it
- `own_input`: what a stage gave, held against the mistake on the port's own inputs
- `proof`: the outcome of a proof
- `port_process`: a proof by a process that runs the port
- `recomputed`: a proof without a port, from the sites of a dump
- `proving`: proofs of all named mistakes of a diagnosis
- `wording`: a proof as text
"""
