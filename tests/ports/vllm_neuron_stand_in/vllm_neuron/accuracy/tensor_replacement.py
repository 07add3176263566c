"""Stand-in for vllm_neuron/accuracy/tensor_replacement.py: tensors of a pass by the positions of its tokens."""

from __future__ import annotations

import torch

_active = {}


class TensorReplacer:
    """Tensors of prompts: of each module a list of steps [1,T,F], the first the prefill."""

    def __init__(self, captures, prompt_token_ids):
        self.prompts = [
            {
                name: torch.cat([steps[0][0], *(step[0, -1:] for step in steps[1:])])
                for name, steps in one.items()
            }
            for one in captures
        ]
        self.token_ids = [list(ids) for ids in prompt_token_ids]
        self.requests = {}

    def register_request(self, req_id, prompt_token_ids):
        """Find the prompt that a request begins with; the longest of several."""
        fitting = [ids for ids in self.token_ids if list(prompt_token_ids[: len(ids)]) == ids]
        if not fitting:
            raise KeyError(req_id)
        self.requests[req_id] = self.token_ids.index(max(fitting, key=len))

    def build_context(self, req_ids, positions, is_prefill):
        """Return [slots,F] of each module; slots behind the first position that comes twice are padding, and zero."""
        assert is_prefill
        prompt = self.prompts[self.requests[req_ids[0]]]
        num_real = next(
            (slot for slot, position in enumerate(positions) if position in positions[:slot]), len(positions)
        )
        context = {}
        for name, values in prompt.items():
            context[name] = values.new_zeros(len(positions), values.shape[-1])
            for slot, position in enumerate(positions[:num_real]):
                if position < len(values):
                    context[name][slot] = values[position]
        return context


def set_active_context(context):
    """Set the tensors of the pass that comes next; None for none."""
    _active.clear()
    _active.update(context or {})


def get_replacement_tensor(tensor_name):
    """Return a tensor of the pass; None if it has none of that name."""
    return _active.get(tensor_name)
