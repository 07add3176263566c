"""The application of the stand-in: a prefill padded to its bucket, decoding from a cache by position."""

from __future__ import annotations

import os
from types import SimpleNamespace

import torch
import torch.distributed
from neuronx_distributed.parallel_layers import parallel_state
from neuronx_distributed.utils import cpu_mode
from neuronx_distributed.utils.tensor_capture import enable_tensor_capture
from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry
from neuronx_distributed.utils.tensor_replacement import modify_model_for_tensor_replacement
from neuronx_distributed_inference.models.config import to_dict
from torch import nn


class NeuronBaseModel(nn.Module):
    """A model's module, with `embed_tokens`, `layers`, `norm` and `lm_head`, and its cache."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        options = config.neuron_config
        shape = (options.batch_size, config.num_key_value_heads, options.seq_len, config.head_dim)
        self.init_model(config)
        self.kv_mgr = nn.Module()
        self.kv_mgr.past_key_values = nn.ParameterList(
            nn.Parameter(torch.zeros(shape, dtype=options.torch_dtype), requires_grad=False)
            for _ in range(2 * config.num_hidden_layers)
        )

    def forward(self, input_ids, attention_mask, position_ids):
        """Return the logits [B,1,vocab] of each prompt's last token."""
        is_prefill = input_ids.shape[1] > 1
        if is_prefill and attention_mask.shape[1] != self.config.neuron_config.seq_len:
            raise RuntimeError("the mask of a bucket of another size")
        states, cache = self.embed_tokens(input_ids), self.kv_mgr.past_key_values
        for index, layer in enumerate(self.layers):
            keys, values = cache[2 * index], cache[2 * index + 1]
            if is_prefill:
                # As NxDI: causal, and padding on the right is seen by padding alone.
                states, new = layer(states, torch.ones_like(attention_mask), position_ids)
                keys.data, values.data = new
                continue
            mask = torch.cat((attention_mask, torch.ones_like(input_ids)), dim=1)
            states, new = layer(states, mask, position_ids, past_key_value=(keys.data, values.data))
            rows = torch.arange(len(input_ids))
            for kept, written in zip((keys, values), new, strict=True):
                kept.data[rows, :, position_ids[:, 0]] = written[:, :, -1]
        states = self.norm(states)
        if is_prefill:
            states = states[torch.arange(len(states)), position_ids.max(dim=1).indices][:, None]
        return self.lm_head(states).float()


class NeuronBaseForCausalLM(nn.Module):
    """An application."""

    _model_cls = None

    def __init__(self, model_path, config):
        super().__init__()
        self.config, self.neuron_config = config, config.neuron_config
        self.models, self.step, self.is_compiled = [SimpleNamespace(model=None)] * 2, 0, False

    @classmethod
    def get_state_dict(cls, model_path, config):
        """Read a checkpoint."""
        raise FileNotFoundError("a folder of the author's machine")

    @staticmethod
    def convert_hf_to_neuron_state_dict(state_dict, config):
        """Return the state dict as it is; a port converts it here."""
        return state_dict

    def checkpoint_loader_fn(self):
        """Return the checkpoint, cast to the device's dtype."""
        tensors, dtype = self.get_state_dict(self.model_path, self.config), self.neuron_config.torch_dtype
        if dtype != torch.float32 and self.neuron_config.cast_type == "config":
            for name, tensor in tensors.items():
                if tensor.is_floating_point():
                    tensors[name] = tensor.to(dtype)
        return tensors

    def to_cpu(self):
        """Build the module, and load it by the class's own conversion."""
        assert cpu_mode()
        assert "WORLD_SIZE" not in os.environ, "NxDI would open the process group a second time"
        assert torch.distributed.is_initialized()
        parallel_state.initialize_model_parallel()
        self._build()

    def compile(self, path):
        """Take note that the application was compiled, in a process without open groups."""
        assert not cpu_mode()
        assert not torch.distributed.is_initialized()
        assert not parallel_state.model_parallel_is_initialized()
        to_dict(self.config)
        self.is_compiled = True

    def load(self, path):
        """Load what was compiled; the module is out of sight then."""
        assert self.is_compiled
        self._build()
        if self.neuron_config.tensor_replacement_config is not None:
            modify_model_for_tensor_replacement(self.models[0].model)
        capture = self.neuron_config.tensor_capture_config
        if capture is not None:
            enable_tensor_capture(self.models[0].model, modules_to_capture=capture.modules_to_capture)
        module = self.models[0].model
        self.models = [SimpleNamespace(model=lambda *inputs: module(*inputs))] * 2

    def _build(self):
        # Parameters keep their declared dtypes, as with NxDI's cast_type "as-declared".
        default = torch.get_default_dtype()
        torch.set_default_dtype(self.neuron_config.torch_dtype)
        module = self._model_cls(self.config)
        torch.set_default_dtype(default)
        weights = self.get_state_dict(self.config._name_or_path, self.config)
        module.load_state_dict(weights, strict=False)
        self.models = [SimpleNamespace(model=module.eval())] * 2

    def reset(self):
        """Begin with new prompts."""

    def forward(
        self,
        input_ids,
        attention_mask,
        position_ids,
        seq_ids,
        sampling_params,
        tensor_capture_hook=None,
        tf_args=(),
    ):
        """Pad a prefill to the bucket, and run it; a step's mask is padded alone."""
        bucket = self.neuron_config.seq_len
        is_prefill = not position_ids.min().item()
        stage = self.models[0 if is_prefill else 1]
        if is_prefill:
            num_padded = self.neuron_config.max_context_length - input_ids.shape[1]
            input_ids = nn.functional.pad(input_ids, (0, num_padded), value=self.config.pad_token_id)
            position_ids = nn.functional.pad(position_ids, (0, num_padded), value=1)
        attention_mask = nn.functional.pad(attention_mask, (0, bucket - attention_mask.shape[1]))
        capture = self.neuron_config.tensor_capture_config
        if capture is not None and self.is_compiled:
            # A compiled graph returns the same tensors in every pass.
            TensorRegistry.get_instance().configure(modules=capture.modules_to_capture)
        logits = stage.model(input_ids, attention_mask, position_ids, *tf_args)
        sampler = self.neuron_config.on_device_sampling_config
        if capture is not None and tensor_capture_hook is not None:
            tensor_capture_hook(self, TensorRegistry.get_instance().take(capture.modules_to_capture))
        tokens = logits if sampler is None else logits[:, -1].argmax(-1).int()
        return SimpleNamespace(logits=logits, tokens=tokens)
