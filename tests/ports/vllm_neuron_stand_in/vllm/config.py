"""Stand-in for vllm/config: the current config, which models of the plugin ask for while they are built and run."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace

_current = []


@dataclass
class VllmConfig:
    """The parts of vLLM's config that the plugin's models read."""

    cache_config: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(cache_dtype="auto"))


@contextmanager
def set_current_vllm_config(vllm_config):
    """Make a config the current one for the block."""
    _current.append(vllm_config)
    try:
        yield
    finally:
        _current.pop()


def get_current_vllm_config():
    """Return the current config; vLLM refuses the call outside of a block."""
    assert _current, "Current vLLM config is not set."
    return _current[-1]
