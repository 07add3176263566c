"""Goldens written as the reference captures of other tools.

- `golden_pair`: a BF16 and a float32 golden of the same tokens, proved to belong together
- `site_modules`: the modules whose first outputs are sites
- `vllm_neuron`: the files that vLLM Neuron's accuracy debugger reads
"""
