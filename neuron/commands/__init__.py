"""Commands of `mm2-test`, registered in `neuron.cli`: options and help.

- `port`: a port judged in stages, from the golden to the proof of its mistake
- `run`: single-layer, multi-layer, sweep, full and component
- `model`: a whole port, run and judged
- `prompts`: prompts whose next tokens a whole port predicts otherwise, ranked, and the worst followed to its layer
- `bisect_layers`: wrong layers, found by running parts of a range or replacing a stream
- `replacement`: a stream replaced in runs that a porter makes by hand, with files for NxDI and vLLM Neuron
- `weights`: the place of every element of a layer's weights in a port
- `trace`: one layer of a port compiled into a file
- `check`: this machine, and whether a layer fits
- `show`: the content of a saved run
- `work`: what they do, imported when they run
- `launch`: the ranks of a run, started as processes of the command; a command shared among ranks
"""
