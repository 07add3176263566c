"""Proofs: a named mistake is undone in the port, and the port is judged again.

- `proof`: the outcome of a proof; a proof as text
- `recomputed`: a proof without a port, from the sites of a dump; what a stage gave, held against the mistake on the
  port's own inputs
- `proving`: proofs of all named mistakes of a diagnosis; a proof by a process that runs the port
"""
