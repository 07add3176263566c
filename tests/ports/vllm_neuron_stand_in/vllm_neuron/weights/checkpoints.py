"""Stand-in for vllm_neuron/utils/checkpoints.py: the reader of a folder of safetensors."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

from vllm_neuron.utils.weight_loader import get_weight_loader


class CheckpointLoadResult(NamedTuple):
    """The values by parameter, and the parameters whose tensors the folder lacks."""

    state_dict: dict
    missing_keys: list
    unexpected_keys: list


class SafetensorsCheckpoint:
    """The tensors of a folder."""

    def __init__(self, model_name_or_path, cache_dir=None):
        self.files = [
            safe_open(path, framework="pt") for path in sorted(Path(model_name_or_path).glob("*.safetensors"))
        ]
        assert self.files, f"No .safetensors files found for {model_name_or_path}"
        self.file_of = {name: file for file in self.files for name in file.keys()}  # noqa: SIM118 - no mapping

    def load_sharded(self, rank, world_size, model, mappings, device, strict=True):
        """Load every parameter of a model from the tensors that `mappings` names, or from that of its own name."""
        state, missing = {}, []
        for name, param in model.named_parameters():
            sources = mappings.get(name, name)
            sources = sources if isinstance(sources, list) else [sources]
            if any(source not in self.file_of for source in sources):
                missing.append(name)
                continue
            slices = [self.file_of[source].get_slice(source) for source in sources]
            state[name] = get_weight_loader(param).load(slices, rank).to(device)
        if missing and strict:
            raise RuntimeError(f"Checkpoint key(s) not found for: {missing}. Use strict=False to skip them.")
        return CheckpointLoadResult(state, missing, [])
