"""Commands of `mm2-test`, registered in `neuron.cli`.

- `port`: a port judged in stages, from the golden to the proof of its mistake
- `run`: single-layer, multi-layer, sweep, full and component
- `device_run`: the run, verdict and output behind them
- `model`: a whole port, run and judged
- `prompts`: prompts whose next tokens a whole port predicts otherwise, ranked, and the worst followed to its layer
- `undo`: a proof that a mistake is what is wrong in a layer, by undoing it
- `bisect_layers`: the wrong layers of a range, found by running parts of it
- `bisect_whole`: the last wrong layer of a whole port, found by replacing its stream
- `replacement`: the same by runs that a porter makes by hand, with files for NxDI and vLLM Neuron
- `weights`: the place of every element of a layer's weights in a port
- `trace`: one layer of a port compiled into a file
- `check`: this machine, and whether a layer fits
- `show`: the content of a saved run
"""
