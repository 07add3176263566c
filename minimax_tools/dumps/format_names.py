"""Names of the formats of other tools' dumps, as `--format` and maps take them."""

from __future__ import annotations

NXDI = "nxdi"
VLLM_NEURON = "vllm-neuron"
MSPROBE = "msprobe"
SGLANG = "sglang"
MODEL_DEBUGGER = "transformers"
# In the order in which a folder is held against them.
FORMAT_NAMES = (NXDI, VLLM_NEURON, MSPROBE, SGLANG, MODEL_DEBUGGER)
