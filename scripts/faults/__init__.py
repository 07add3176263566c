"""Mistakes planted in a port for `bench_faults.py`, and what mm2 finds of them.

The port and its mistakes:

- `arithmetic`: the layer's arithmetic in stages, each of them right; the weights that they compute with
- `port`: the target that computes with this arithmetic
- `plant`: one mistake as a value: functions that replace stages, a site's value or weights; two mistakes in one port
- `planted`: all mistakes, and the equivalents
- `attention`, `experts`: mistakes that the diagnosis has a name for
- `uncatalogued`: mistakes that it has no name for
- `reported`: ports of public reports, for `bench_names.py`
- `lookalikes`: mistakes that look like entries of the catalogue and are none, for `bench_names.py`
- `equivalents`: changes that give the same layer
- `model_ports`: all planted whole ports; their code lies in `scripts/whole_ports`

Runs:

- `baseline`: a model, drawn or trained, with prompts and its golden, which ports are judged against
- `plan`: ports that run against each baseline
- `runs`: one port over all layers of a baseline, from the plan to its cases
- `proofs`: a planted mistake, and wrong names for it, undone in the port
- `dump_runs`: one chained run of a whole model, also as another tool dumps it, from the plan to its cases
- `effects`: change by a mistake in float32, against the noise floor of the golden
- `judging`: verdict and diagnosis of mm2
- `rivals`: rules by which other tools call tensors different

Results:

- `cases`: one layer of one run, or one chained run in one view, as it was judged
- `journal`: a file of finished runs
- `tally`: figures of the cases and dumps; wrong things that ended in exit code 0
"""
