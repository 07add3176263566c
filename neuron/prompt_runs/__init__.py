"""Runs of many prompts with their answers through a whole port.

- `prompt_run`: the prefill and the teacher-forced steps of a batch of prompts, on paper; the port's run over all
  batches, and the judgement; what of a golden at hand is trusted; a port's logits of the prompts, kept while a list
  runs; the way from the worst prompt to its golden, and to the layer
"""
