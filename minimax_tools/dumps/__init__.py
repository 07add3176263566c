"""Captures of other tools, read as mm2's own are: nothing in their files is ever called.

- `formats` knows the tools: `nxdi`, `vllm_neuron`, `msprobe`, `sglang` and `model_debugger` (transformers'); each lists
  a directory's tensors as a `piece` from names and headers, which `tensor_file` reads
- `place` says where a site lies in such a dump, `usual_names` are the places of MiniMax-M2's sites, and `name_map` is a
  user's YAML; `finder` looks for them among a dump's pieces, `findings` are what it found, `notes` say what was left
- `schedule` joins passes along the prompts where a tool tells of their tokens; `module_name` words a port's own names
- `assembly` puts ranks' pieces and passes together, `rows` tells real tokens from padding;
  `last_tokens` places rows that were computed for the tokens to sample from alone
- `capture` is all that as a source of a comparison
"""
