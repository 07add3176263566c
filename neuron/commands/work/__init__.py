"""Work of the commands of `mm2-test`: each file is imported when its command runs.

- `port`: a port judged in stages
- `run`: single-layer, multi-layer, sweep, full and component; `device_run`: the run, verdict and output behind them
- `undo`: a proof that a mistake is what is wrong in a layer, by undoing it
- `model`, `prompts`: a whole port, run on a golden or on many prompts
- `bisect_layers`: the wrong layers of a range, found by running parts of it
- `bisect_whole`: the last wrong layer of a whole port, found by replacing its stream
- `replacement`: the same by runs that a porter makes by hand
- `weights`, `trace`, `check`, `show`: the commands of these names
"""
