"""Goldens written as reference captures of other tools.

- `vllm_neuron`: the files that vLLM Neuron's accuracy debugger reads
"""
