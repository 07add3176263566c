"""The judgement of a device run against a golden, from their captures alone.

- `sides/`: the two captures, the layers' inputs, and the golden's weights
- `noise/`: ρ, squared errors, and the error of a layer's input
- `limits/`: figures that right ports stay below
- `judging/`: one site's values to a result
- `blame/`: the sites at fault, and where in them
- `chains/`: runs of several layers, and the search for wrong ones
- `diagnosis/`: the known mistake that explains a wrong layer (`mm2-diagnose`)
- `cli`: the command `mm2-compare`
- `options`: options of every command that judges
- `comparer`: a whole run to a comparison, with its evidence
- `parts`: one layer, the embedding or the head, with its blame
- `notes`: facts to know beside a verdict
"""
