"""Dumps: captures of other tools, read as mm2's own are; no code in their files runs.

What reads a file raises CaptureError if it is missing or damaged, or holds something else than its layout says.

The path of the data: files, pieces, places of sites, rows of real tokens, one batch, a capture. A row is in this room
one token of a tensor, and a map is a user's YAML about a dump.

- `opening`: any capture directory, opened by the layout that its files show; dumps refused that cannot be read whole
- `formats`: the layouts of other tools; `format_names`: their names
- `nxdi`: captures of neuronx-distributed-inference
- `vllm_neuron`: dumps of vLLM Neuron
- `msprobe`: dumps of Ascend's msprobe
- `sglang`: dumps of SGLang's dumper
- `model_debugger`: traces of transformers' model debugger
- `tensor_file`: `.pt` and safetensors files, listed and read
- `piece`: the tensor that one rank wrote of one module in one pass, and a dump, which is all pieces; the place of a
  site in a dump, in a map's notation
- `name_map`: a map, read; places of MiniMax-M2's sites
- `site_finder`: the sites found among a dump's pieces
- `stream_proof`: the residual stream, found by what its tensors must satisfy
- `found_sites`: the result of that search; the tokens that the rows of a rank's tensor are of
- `schedule`: the tokens of each request in each pass, and the rows of each prompt's tokens
- `row_finder`: the rows that are real tokens, as the map, the dump or the other capture tells
- `assembly`: real tokens taken out of tensors, put together from ranks and passes, and laid out as a batch
- `placed_capture`: a capture whose sites have places in its files
- `capture`: a dump as a capture, alone or with the caches of the same run; rows computed only for the tokens to sample
  from
- `cache_capture`: keys and values out of vLLM Neuron's cache as a capture
- `legacy`: the `.pt` files of scripts before mm2 as a capture; the tensors in such files
"""
