"""The judgement of a device run against a golden, from their captures alone. Words: docs/sites.md.

Whatever reads a side raises CaptureError if it is damaged; what reads weights, IncomparableError if they are another
model's and CheckpointError if they cannot be read. Docstrings name further errors.

- `sides/`: the two captures, the layers' inputs, and the golden's weights
- `noise/`: ρ, squared errors, and the error of a layer's input
- `limits/`: figures that right ports stay below
- `judging/`: a result for one site, from its values
- `blame/`: the sites at fault, and where in them
- `chains/`: runs of several layers, and the search for wrong ones
- `prompts/`: next-token distributions of prompts, judged token by token
- `evidence/`: what the captures show beside the figures, for reports
- `catalogue/`: the known porting mistakes
- `diagnosis/`: the known mistake that explains a wrong layer (`mm2-diagnose`)
- `cli`: the command `mm2-compare`
- `options`: options of every command that judges; both sides as a command's options name them
- `comparer`: the comparison of a whole run, with its evidence; all that is wrong in such a run, what came first at
  the front; modules that another device gets in another class; no verdict before all that was read is checked
- `parts`: one layer, the embedding or the head, judged
- `model_runs/`: a whole port's run: passes, order of layers, chosen tokens
- `notes`: sentences beside the verdict; `untested`: what was not looked at
- `run_report`: the files of `--report-path`
- `next_commands`: commands to run after a result
"""
