"""What `bench_faults.py` measures: mistakes planted in a port, found or not.

- `arithmetic`: the layer's arithmetic in `stages`, right in all of them: `attention_stages`, then `moe_stages`, on
  `weights`; `port`: the target made of it
- `plant`: one mistake as a value; `planted`: all of them, from `norms`, `rotary`, `attention`, `router`, `experts`,
  `fp8`, `uncatalogued_attention`, `uncatalogued_moe` and, no mistakes, `equivalents`
- `learned`: a model that was trained; `scene`: a model and its golden
- `effects`: what a mistake changes in float32, against the golden's noise
- `plan`: which ports run on synthetic models; `model_plan`: on learned ones; `right_ports`: those that must pass
- `runs`: one isolated run, from the plan to its `cases`; `dump_runs`: one chained run of a whole model, to its
  `dump_cases`
- `running`: ports through the device runner; `views`: what a port shows of a capture; `foreign`: a run as another
  tool dumps it; `judging`: what mm2 says of a capture
- `naming`: what the diagnosis says of the output alone
- `deaths`: ports that end their process, for `bench_dying_ports.py`
- `rivals`: what other tools' rules say of the same capture
- `journal`: finished cases; `tally`: their figures; `dump_tally`: those of dumps; `pass_tally`: wrong things that
  pass, with those of other benchmarks, `joined`; `curve`: detection against false alarms; `table`: all for people
"""
