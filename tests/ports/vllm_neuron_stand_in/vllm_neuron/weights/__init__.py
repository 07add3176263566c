"""Stand-in for vllm_neuron/utils: the plugin's loading of weights."""
