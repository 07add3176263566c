"""The diagnosis: the known mistake that explains a layer's output.

- `cli`: the command `mm2-diagnose`
- `kept_diagnosis`: a diagnosis that is kept beside its run; whether its port has changed since
- `diagnose`: the library's entry: two captures and a checkpoint to a diagnosis
- `finding`: named mistakes, and what was close; sites of one operation that one named mistake explains
- `report`: a diagnosis as text and JSON; its parts in words, for text and pages
- `layer_group`: layers with one finding, told together
- `catalogue/`: the mistakes of a layer
- `mistake`: an entry of the catalogue, and a hypothesis: an entry with parameters; a change of a layer's tensors that
  undoes a mistake
- `clues`: what the port's values say by themselves, by which some mistakes find their parameters; what each expert
  added to them
- `evaluation`: the float32 layer, of which a hypothesis replaces stages
- `expert_pass`: the experts of many hypotheses at once; a layer's weights, FP8 codes too
- `layer_case`: one layer of two captures
- `yardstick`: noise at one site, by token and channel
- `score`: fit of a hypothesis to the values of the port
- `trial`: the layer computed and scored under each hypothesis
- `naming`: scores that count as an explanation
- `search`: from all hypotheses of one cause to the best
- `screening`: hypotheses on few tokens first, and the best of them on more; parameters of mistakes
- `layer_search`: the causes of one layer, each explained; factors on a site, which are no mistakes, and compete with
  them
- `proof/`: a named mistake undone in the port, and judged again
- `model/`: the same outside the layers
"""
