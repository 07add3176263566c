"""The register of the stand-in's tensor replacement: the modules of a graph, and the files that tell their shapes."""

from __future__ import annotations

import re
from pathlib import Path

import torch

_FILE = re.compile(r"captured_tensors_(?:cte|ctx|tkg)_step_(\d+)_module_([\w.]+?)[._]outputs?(?:_\d+)?\.pt")


class TensorReplacementRegister:
    """The only register of a process; `clear` makes room for another."""

    _instance = None

    @classmethod
    def get_instance(cls, ref_dir=None, neuron_dir=None, tr_map=None, config=None, ref_equiv_map=None):
        """Return the register; the first call reads the files."""
        if cls._instance is None:
            if None in (ref_dir, neuron_dir, tr_map, config):
                raise ValueError("the first call names folders, map and config")
            register = object.__new__(cls)
            register._read(Path(ref_dir), Path(neuron_dir), tr_map)
            cls._instance = register
        return cls._instance

    @classmethod
    def clear(cls):
        """Drop the register."""
        cls._instance = None

    def _read(self, reference, shapes, tr_map):
        self.module_superset = list(dict.fromkeys(name for step in sorted(tr_map) for name in tr_map[step]))
        found, values = self._scan(shapes), self._scan(reference)
        for step in sorted({step for _, step in found}):
            for name in self.module_superset:
                if (name, step) not in found or (name, step) not in values:
                    raise ValueError(f"no tensor of {name} in step {step}")
                if values[name, step].dim() != 2:
                    raise ValueError("a reference has two dims")
        for name in self.module_superset:
            decoded = {tuple(found[key].shape) for key in found if key[0] == name and key[1] > 1}
            if len(decoded) > 1:
                raise ValueError(f"the decoding steps of {name} have several shapes")

    def _scan(self, folder):
        matches = [(path, _FILE.fullmatch(path.name)) for path in sorted(folder.iterdir())]
        return {
            (match[2], int(match[1])): torch.load(path)
            for path, match in matches
            if match is not None and match[2] in self.module_superset
        }
