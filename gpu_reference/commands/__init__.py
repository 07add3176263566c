"""Commands of `mm2-gpu`.

- `capture`: extract-all, full, single-layer and multi-layer
- `golden_run`: the run of one process behind them
- `planned_run`: the run of one rank of a plan behind extract-all
- `certify`: the check of a finished golden
- `check`: a machine, and the ways to make a golden on it
- `export`: goldens written as another tool's reference captures
- `publish`: a golden put at a remote address
- `show`: the content of a capture
"""
