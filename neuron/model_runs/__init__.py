"""A run of a whole port, from token ids to logits, as one model.

- `model_request`: a run before it starts; what all ranks recorded of a pass, joined
- `passes`: the prefill, the decoding steps and the chunks of a run, on paper
- `model_executor`: runs passes of a port on all ranks, and records its sites
- `repetition`: the prompts computed once more, and what of their logits is then another
- `cache_record`: keys and values of a port's cache, followed from pass to pass
- `assembly`: values of all passes in the golden's layout; the outcome of one pass; logits of the passes: their
  columns, and the tokens chosen
- `model_runner`: the run, from the first pass to the capture; the prompts in passes of several tokens behind a cache
- `judgement`: a port that shows no layer, judged by its next tokens; the name of what is wrong first
"""
