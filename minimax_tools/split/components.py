"""SplitModel: bottom, trunk or top of a causal language model, as a module that runs by itself.

B batch, S sequence, H hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from minimax_tools.checkpoint.pickled import PICKLED_SUFFIXES
from minimax_tools.checkpoint.weight_files import SAFETENSORS_SUFFIX
from minimax_tools.errors import UsageError
from minimax_tools.machine.size import format_size
from minimax_tools.split.causal_part import ModelPart
from minimax_tools.split.devices import DeviceName
from minimax_tools.split.part_folder import read_part, write_part
from minimax_tools.split.parts import Part
from minimax_tools.split.seed_file import read_seed_file

# Endings of the names of files that hold weights.
_WEIGHT_SUFFIXES = (*PICKLED_SUFFIXES, SAFETENSORS_SUFFIX)


class SplitModel(nn.Module):
    """A component of a split model. All three, called one after the other, are the whole model.

        hidden_states = bottom(input_ids, attention_mask)
        hidden_states = trunk(hidden_states, attention_mask)
        logits = top(hidden_states, attention_mask)

    The logits are bit for bit those of transformers' whole model with the same dtype and implementations. Each
    component takes the whole mask and all positions, and moves its inputs to its own device. `model` is transformers'
    model, with stand-ins for the modules of other components.
    """

    def __init__(self, loaded: ModelPart) -> None:
        super().__init__()
        self.model = loaded.model
        self.part: Part = loaded.part
        self._loaded = loaded

    def forward(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run the component's layers.

        Args:
            inputs: Token ids [B,S] for bottom, else hidden states [B,S,H] of the component before.
            attention_mask: [B,S], 1 for tokens and 0 for padding. Default: all ones.
            position_ids: [B,S] or [1,S]. Default: counted from 0, padding included.

        Returns:
            Hidden states [B,S,H], or logits [B,S,V] from top, on the component's device.

        Raises:
            ValueError: `inputs` has another dtype or shape than this component takes, or the mask or positions do not
                fit it.
        """
        self._check_inputs(inputs, attention_mask, position_ids)
        given = {
            "input_ids" if self.part.has_embedding else "inputs_embeds": inputs,
            "attention_mask": attention_mask,
            "position_ids": position_ids,
        }
        # `use_cache` is left as the config has it: without a cache, transformers takes gaps in positions for borders of
        # packed sequences.
        arguments = {name: tensor.to(self.device) for name, tensor in given.items() if tensor is not None}
        if self.part.has_head:
            logits: torch.Tensor = self.model(**arguments).logits
            return logits
        states: torch.Tensor = self.model.base_model(**arguments).last_hidden_state
        return states

    @property
    def device(self) -> torch.device:
        """Device of the component."""
        return next(self.model.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the component's hidden states."""
        dtype: torch.dtype = self.model.dtype
        return dtype

    @property
    def size_bytes(self) -> int:
        """Bytes of the parameters and buffers."""
        return sum(tensor.nbytes for tensor in (*self.model.parameters(), *self.model.buffers()))

    def save(self, path: str | Path) -> None:
        """Save the component to the folder `path`: safetensors, config.json and component.json.

        Raises:
            UsageError: The name is that of a file, such as `bottom.pt`, or the folder holds something other than a
                component.
            CheckpointError: The disk is full, or cannot be written to.
        """
        folder = Path(path).expanduser()
        if folder.suffix in _WEIGHT_SUFFIXES:
            raise UsageError(
                f"a component is saved to a folder, and {folder.name} is the name of a file",
                expected="a folder, which holds safetensors and JSON",
                next_step=f"Save it to {str(folder.with_suffix(''))!r}: SplitModel.load({str(path)!r}) finds it there.",
            )
        write_part(folder, self._loaded)

    @classmethod
    def load(cls, path: str | Path, device: DeviceName = "cpu") -> SplitModel:
        """Load a component from the folder that `save` wrote, or from an older `.pt` file.

        No code in a `.pt` file is run. If `bottom.pt` does not exist, the folder `bottom` is loaded.

        Raises:
            CheckpointError: The path is missing, damaged, or not a component.
            MissingExtraError: transformers is missing.
        """
        source = Path(path).expanduser()
        if source.is_file():
            return cls(read_seed_file(source, device=torch.device(device)))
        if not source.exists() and source.suffix == ".pt" and source.with_suffix("").is_dir():
            source = source.with_suffix("")
        return cls(read_part(source, device=torch.device(device)))

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"SplitModel({self.part}, {self.model.config.model_type}, {dtype}, "
            f"{format_size(self.size_bytes)} on {self.device})"
        )

    def _check_inputs(
        self,
        inputs: torch.Tensor,
        attention_mask: torch.Tensor | None,
        position_ids: torch.Tensor | None,
    ) -> None:
        found = f"{inputs.dtype} {list(inputs.shape)}"
        if self.part.has_embedding:
            if inputs.dim() != 2 or inputs.is_floating_point():
                raise ValueError(f"bottom takes token ids [batch, sequence] of integers, not {found}")
        else:
            width = self.model.config.hidden_size
            if inputs.dim() != 3 or inputs.shape[2] != width or inputs.dtype != self.dtype:
                raise ValueError(
                    f"{self.part.role} takes hidden states [batch, sequence, {width}] of {self.dtype}, not {found}"
                )
        for name, tensor in (("attention_mask", attention_mask), ("position_ids", position_ids)):
            batch_size, length = inputs.shape[:2]
            shapes = [(batch_size, length)]
            if name == "position_ids":
                shapes.append((1, length))
            if tensor is not None and tuple(tensor.shape) not in shapes:
                raise ValueError(
                    f"{name} is {list(tensor.shape)}, expected {list(inputs.shape[:2])} as the inputs"
                )
