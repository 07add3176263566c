"""A run of a whole port, from token ids to logits, as one model.

- `model_request`: a run before it starts
- `passes`: the prefill and the decoding steps of a run, on paper
- `model_executor`: runs passes of a port on all ranks, and records its sites
- `rank_join`: what all ranks recorded of a pass, joined
- `pass_result`: the outcome of one pass
- `logits_record`: logits of the passes: their columns, the tokens chosen, and what a repetition changes
- `cache_record`: keys and values of a port's cache, followed from pass to pass
- `assembly`: values of all passes in the golden's layout
- `model_runner`: the run, from the first pass to the capture
- `naming`: the name of what is wrong first
- `black_box`: a port that shows no layer, judged by its next tokens
"""
