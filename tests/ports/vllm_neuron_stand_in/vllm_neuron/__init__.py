"""Stand-in for the vLLM Neuron plugin."""
