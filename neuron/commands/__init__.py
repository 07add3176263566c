"""Commands of `mm2-test`, registered in `neuron.cli`: options, help and what each does.

- `port`: a port judged in stages, from the golden to the proof of its mistake
- `port_stages`: its stages, commands run one after the other, and a log to go on from
- `run`: single-layer, multi-layer, sweep, full and component; `device_run`: the run, verdict and output of each
- `undo`: a proof that a mistake is what is wrong in a layer, by undoing it
- `model`: a whole port, run and judged; `model_run`: the run itself
- `prompts`: prompts whose next tokens a whole port predicts otherwise, ranked, and the worst followed to its
  layer; `prompts_run`: the run itself
- `bisect_layers`: wrong layers, found by running parts of a range
- `bisect_whole`: the last wrong layer of a whole port, found by replacing its stream
- `replacement`: a stream replaced in runs that a porter makes by hand, with files for NxDI and vLLM Neuron
- `weights`: the place of every element of a layer's weights in a port
- `trace`: one layer of a port compiled into a file
- `check`: this machine, and whether a layer fits
- `show`: the content of a saved run
- `launch`: the ranks of a run, started as processes of the command; a command shared among ranks
"""
