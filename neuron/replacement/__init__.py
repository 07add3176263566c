"""Replacement of a whole port's stream by the golden's, for a port of which no layer can run alone.

The stream is the hidden states that pass from layer to layer. The logits that follow tell whether what lies behind the
point of replacement is right.

- `stream`: the golden's stream at a point, for passes and for golden logits; judges the logits of a run with a
  replaced stream
- `whole_bisection`: the search for a whole port's last wrong part; a whole port in memory, run with a replaced stream
- `run_folder`: the folder of runs that are made by hand: their plan, and their logits
- `nxdi_run`: a run by hand on NxDI, and its files; `vllm_neuron_run`: the same on vLLM Neuron
"""
