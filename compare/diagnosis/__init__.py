"""The diagnosis: the known mistake that explains a layer's output, or a site outside the layers.

- `cli`: the command `mm2-diagnose`
- `kept_diagnosis`: a diagnosis that is kept beside its run; whether its port has changed since
- `diagnose`: the library's entry: two captures and a checkpoint to a diagnosis
- `finding`: named mistakes, and what was close; sites of one operation that one named mistake explains
- `view`: a diagnosis in words, for text and pages
- `report`: a diagnosis as text and JSON
- `layer_group`: layers with one finding, told together
- `layer_case`: one layer of two captures
- `score`: fit of a hypothesis to the values of the port; scores that count as an explanation
- `trial`: the layer computed and scored under each hypothesis
- `search`: the causes of one layer, each from all its hypotheses to the best
- `screening`: hypotheses on few tokens first, and the best of them on more; parameters of mistakes
- `outside`: the same outside the layers
- `decoding`: the known mistake that explains a layer's decoded tokens
- `proving`: a named mistake undone in the port, and judged again
- `proof`: what became of that, also in sentences
"""
