"""Work of the commands of `mm2-gpu`: each file is imported when its command runs.

- `capture`: extract-all, full, single-layer and multi-layer
- `golden_run`: the run of one process behind them
- `planned_run`: the run of one rank of a plan behind extract-all
- `certify`, `check`, `export`, `publish`, `show`: the commands of these names
"""
