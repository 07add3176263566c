"""What `bench_faults.py` measures: mistakes planted in a port, found or not.

- `arithmetic`: the layer's arithmetic in `stages`, right in all of them: `attention_stages`, then `moe_stages`, on
  `weights`; `port`: the target made of it
- `plant`: one mistake as a value; `planted`: all of them, from `norms`, `rotary`, `attention`, `router`, `experts`,
  `fp8`, `uncatalogued_attention`, `uncatalogued_moe` and, no mistakes, `equivalents`
- `scene`: a model and its golden; `effects`: what a mistake changes in float32, against the golden's noise
- `plan`: which ports run where; `runs`: one of them, from the plan to its cases
- `running`: ports through the device runner; `judging`: what mm2 says of a capture, sites shown or not
- `naming`: what the diagnosis says of the output alone
- `deaths`: ports that end their process, for `bench_dying_ports.py`
- `rivals`: what other tools' rules say of the same capture
- `cases`: one case's record and the journal of finished ones; `tally`: the figures; `table`: them for people
"""
