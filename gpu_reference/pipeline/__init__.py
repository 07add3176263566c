"""A golden capture made by several ranks, each with one slice of a plan.

- `pipeline`: one rank's run of its slice, from the input of its first layer to the capture
- `shared_capture`: the one capture directory that all ranks open together
"""
