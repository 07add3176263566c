"""Commands of `mm2-gpu`: options, help and what each does.

- `capture`: extract-all, full, single-layer and multi-layer
- `certify`: the check of a finished golden
- `check`: a machine, and the ways to make a golden on it
- `export`: goldens written as another tool's reference captures
- `publish`: a golden put at a remote address
- `show`: the content of a capture
- `golden_run`: the run that makes a golden, of one process or of one rank of a plan
"""
