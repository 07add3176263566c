"""The judgement: a device run against a golden, from their captures alone; the command `mm2-compare` (`cli`).

- `comparer`: every layer-site pair of a run, a verdict and the blame; `notes`: what to know beside
- `pairing`: whether two captures may be judged at all, and which layers that gives
- `sides`: the two captures, with the `batch` of real tokens that they have in common
- `feed`: what a layer was fed; `incoming`: the error of what another layer handed on
- `layer_judge`, `model_judge`: the sites of a layer and those outside; `judge`: one site, by the `criteria`
- `noise`: ρ, in units of what BF16 costs, from the `norms` of rows
- `routing`: expert sets, and which flips the noise explains; `replay`: the golden with the port's own experts, from
  the `weights`
- `blame`: where the first fault lies
- `bisection`: the search for wrong layers by running parts of them
- `chain_judge`: the end of a chain of layers, judged by its `chain_noise` against `chain_limits`
- `options`: the options of every command that judges
"""
