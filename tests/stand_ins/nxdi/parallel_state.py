"""Model-parallel groups of the stand-in: one rank."""

from __future__ import annotations

_state = {"is_open": False, "aot": False}


def model_parallel_is_initialized():
    """Decide whether groups are open."""
    return _state["is_open"]


def initialize_model_parallel(tensor_model_parallel_size=1):
    """Open the groups."""
    assert tensor_model_parallel_size == 1, "the stand-in has one rank"
    _state["is_open"] = True


def destroy_model_parallel():
    """Close the groups."""
    _state["is_open"] = False


def get_aot_mode():
    """Return whether modules are built without values of weights."""
    return _state["aot"]


def set_aot_mode(mode):
    """Set whether modules are built without values of weights."""
    _state["aot"] = mode


def get_tensor_model_parallel_size():
    """Return the number of ranks that share a layer."""
    return 1


def get_tensor_model_parallel_rank():
    """Return this rank's number."""
    return 0
