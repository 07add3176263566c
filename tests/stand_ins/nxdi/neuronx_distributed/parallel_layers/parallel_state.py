"""Groups of ranks."""

from __future__ import annotations

_state = {"is_up": False, "aot_mode": False}


def model_parallel_is_initialized():
    """Return whether the groups are up."""
    return _state["is_up"]


def initialize_model_parallel(tensor_model_parallel_size=1):
    """Set the groups up."""
    assert tensor_model_parallel_size == 1, "the stand-in has one rank"
    _state["is_up"] = True


def get_tensor_model_parallel_size():
    """Return the number of ranks that share a layer."""
    return 1


def get_tensor_model_parallel_rank():
    """Return this rank's number."""
    return 0


def get_aot_mode():
    """Return whether layers leave their weights' memory unset."""
    return _state["aot_mode"]


def set_aot_mode(mode):
    """Set that mode."""
    _state["aot_mode"] = mode
