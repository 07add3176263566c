"""The judgement: a device run against a golden, from their captures alone; the command `mm2-compare` (`cli`).

- `comparer`: every layer-site pair of a run, a verdict and the blame; `notes`: what to know beside
- `pairing`: whether two captures may be judged at all, and which layers that gives
- `sides`: the two captures, with the `batch` of real tokens that they have in common
- `proving`: no verdict before all that was read is proved; `proven_floor`: a golden must agree with its own floor
- `opening`: both sides, as a command names them and whichever tool wrote them
- `layer_input`: what a layer was fed; `input_error`: the error of what another layer handed on; `own_input` and
  `own_head`: the golden of a layer, and of what lies behind the last one, on the port's own values
- `layer_judge`, `model_judge`: the sites of a layer and those outside; `judge`: one site, by noise (`noise_judge`) or
  by the five classic `criteria`
- `noise`: ρ, in units of what BF16 costs, from the `norms` of rows and the `layer_floor` that the golden kept;
  `interval`: how far ρ is known
- `limits`: what right ports stay below, by site and figure; `limit`: one of them, by what is averaged and how much is
  judged; `context`: what else they hang on; `limits_file`: read from calibration.yaml or a file of one's own
- `routing`: expert sets, and which flips the noise explains; `replay`: the golden with the port's own experts, from
  the `weights`; `derived_choice`: the experts that a port must have chosen, where it does not show them
- `logits`: next-token distributions, judged by `token_limits`; `router_dtypes`: what the router is held in
- `blame`: where faults lie; `handed_on`: which failures are traces of one before; `refed_judge`: what stands behind a
  fault, judged by what the port itself computed it from (`upstream`, `recomputation`); `groups`: layers that share a blame
- `locate`: where an error lies within a site to blame; `whereabouts`: what its wrong tokens and channels share;
  `place`: some of them, in words
- `coverage`: layers that a pass would not stand on
- `curve`: how the error of a chained run grows, and where by more than noise
- `bisection`: the search for wrong layers by running parts of them
- `chain_judge`: the end of a chain of layers, judged by its `chain_noise` against `chain_limits`
- `undecided`: what cannot be told to be a fault, where a dump does not say what it was computed from
- `options`: the options of every command that judges
"""
