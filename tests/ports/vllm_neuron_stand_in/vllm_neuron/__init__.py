"""Stand-in for the vLLM Neuron plugin."""

from __future__ import annotations

import sys

from vllm_neuron import weights

# The plugin's own name for this folder.
sys.modules["vllm_neuron.utils"] = weights
