"""Goldens written as the reference captures of other tools.

- `vllm_neuron`: the files that vLLM Neuron's accuracy debugger reads; a BF16 and a float32 golden of the same tokens,
  proved to belong together; the modules whose first outputs are sites
"""
