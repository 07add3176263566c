"""Mistakes planted in a port for `bench_faults.py`, and what mm2 finds of them.

The port and its mistakes:

- `stages`: weights of the layer, and what its stages share
- `attention_stages`: the layer's arithmetic from its input to the residual
- `moe_stages`: the layer's arithmetic from the residual to its output
- `arithmetic`: all stages in order, each of them right
- `port`: the target that computes with this arithmetic
- `plant`: one mistake as a value
- `planted`: all mistakes, and the equivalents
- `norms`, `rotary`, `attention`, `router`, `experts`, `fp8`: mistakes that the diagnosis has a name for
- `uncatalogued_attention`, `uncatalogued_moe`: mistakes that it has no name for
- `replaced`: mistakes as functions that replace stages, a site's value or weights
- `reported`: ports of public reports, for `bench_names.py`
- `lookalikes`, `lookalikes_moe`: mistakes that look like entries of the catalogue and are none, for `bench_names.py`
- `equivalents`: changes that give the same layer
- `pairs`: two mistakes in one port
- `deaths`: ports that end their process, for `bench_dying_ports.py`
- `model_plant`: a whole port, right or with one mistake, as a value
- `model_judging`: a planted whole port run and judged
- `model_ports`: all planted whole ports; their code lies in `scripts/whole_ports`

Runs:

- `baseline`: a model with prompts and its golden, which ports are judged against
- `trained_model`: a folder that `train_models.py` wrote
- `plan`: ports that run against each baseline
- `runs`: one port over all layers of a baseline, from the plan to its cases
- `proofs`: a planted mistake, and wrong names for it, undone in the port
- `dump_runs`: one chained run of a whole model, from the plan to its cases
- `foreign`: a run as another tool dumps it
- `effects`: change by a mistake in float32, against the noise floor of the golden
- `judging`: verdict and diagnosis of mm2
- `rivals`: rules by which other tools call tensors different

Results:

- `cases`: one layer of one run, or one chained run in one view, as it was judged
- `journal`: a file of finished runs
- `tally`: figures of the cases
- `dump_tally`: figures of the dumps
- `pass_tally`: wrong things that ended in exit code 0, those of other benchmarks included
"""
