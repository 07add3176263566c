"""Stand-in for vllm_neuron/envs.py, which reads a variable when it is asked for."""

from __future__ import annotations

import os


def __getattr__(name):
    if name == "VLLM_NEURON_CPU_MODE":
        return os.environ.get(name, "0") == "1"
    raise AttributeError(name)


def get_compile_backend_name():
    """Return the backend of torch.compile."""
    return "eager"
