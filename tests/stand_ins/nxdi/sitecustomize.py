"""A stand-in for NxD 0.18 and NxDI 0.9: what mm2's adapters of layers and applications call, behaving as those do.

Python imports this file first if its folder is the first on PYTHONPATH. The files beside it then are the packages'
modules.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from pathlib import Path

_FOLDER = Path(__file__).parent
# File of each module; None for a package that holds modules only.
_FILES = {
    "neuronx_distributed": None,
    "neuronx_distributed.parallel_layers": None,
    "neuronx_distributed.parallel_layers.parallel_state": "parallel_state.py",
    "neuronx_distributed.trace": None,
    "neuronx_distributed.trace.trace": "weights.py",
    "neuronx_distributed.utils": "computing.py",
    "neuronx_distributed.utils.tensor_capture": "tensor_capture.py",
    "neuronx_distributed.utils.tensor_capture.registry": "tensor_registry.py",
    "neuronx_distributed.utils.tensor_replacement": "replacement_hooks.py",
    "neuronx_distributed.utils.tensor_replacement.registry": "replacement_runtime.py",
    "neuronx_distributed_inference": None,
    "neuronx_distributed_inference.models": None,
    "neuronx_distributed_inference.models.config": "configs.py",
    "neuronx_distributed_inference.models.model_base": "application.py",
    "neuronx_distributed_inference.models.model_wrapper": "weights.py",
    "neuronx_distributed_inference.utils": None,
    "neuronx_distributed_inference.utils.tensor_replacement": None,
    "neuronx_distributed_inference.utils.tensor_replacement.registry": "replacement_register.py",
    "neuronx_distributed_inference.utils.tensor_capture_utils": "captured_files.py",
}


class Finder(importlib.abc.MetaPathFinder):
    """A finder of the stand-in's modules."""

    def find_spec(self, name, path=None, target=None):
        """Return the place of a module; None for all others."""
        if name not in _FILES:
            return None
        if _FILES[name] is None:
            return importlib.machinery.ModuleSpec(name, None, is_package=True)
        return importlib.util.spec_from_file_location(
            name, _FOLDER / _FILES[name], submodule_search_locations=[]
        )


sys.meta_path.insert(0, Finder())
