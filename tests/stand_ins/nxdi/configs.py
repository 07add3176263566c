"""Configs of the stand-in."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

from neuronx_distributed.utils.tensor_replacement.registry import RuntimeRegister
from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister


class TensorCaptureConfig:
    """The modules to capture."""

    def __init__(self, modules_to_capture=(), max_intermediate_tensors=None, capture_inputs=False):
        self.modules_to_capture = list(modules_to_capture)
        self.max_intermediate_tensors = max_intermediate_tensors
        self.capture_inputs = capture_inputs


class TensorReplacementConfig:
    """The folders and modules of a tensor replacement."""

    def __init__(self, *, ref_dir, neuron_dir, tf_map, neuron_config, module_map=None):
        for folder in (ref_dir, neuron_dir):
            if not Path(folder).is_dir():
                raise FileNotFoundError(folder)
        if type(tf_map) is not dict:
            raise FileNotFoundError("the map is no dict")
        self.tr_map, self.config = tf_map, neuron_config
        register = TensorReplacementRegister.get_instance(
            ref_dir=ref_dir,
            neuron_dir=neuron_dir,
            tr_map=tf_map,
            config=neuron_config,
            ref_equiv_map=module_map,
        )
        RuntimeRegister.module_superset = register.module_superset


class NeuronConfig:
    """The config of the device; unknown options are left alone, as NxDI does."""

    def __init__(self, **options):
        self.batch_size = options.get("batch_size", 1)
        self.seq_len = options.get("seq_len", 128)
        self.max_context_length = options.get("max_context_length", self.seq_len)
        self.enable_bucketing = options.get("enable_bucketing", False)
        self.sequence_parallel_enabled = options.get("sequence_parallel_enabled", False)
        self.tensor_replacement_config = None
        self.padding_side = options.get("padding_side", "right")
        self.tp_degree = options.get("tp_degree", 1)
        self.torch_dtype = options["torch_dtype"]
        self.is_continuous_batching = options.get("is_continuous_batching", False)
        self.cast_type = options.get("cast_type", "config")
        self.normalize_top_k_affinities = options.get("normalize_top_k_affinities", True)
        self.k_cache_transposed = options.get("k_cache_transposed", False)
        self.on_cpu = options.get("on_cpu", False)
        self.output_logits = options.get("output_logits", False)
        sampling, capture = options.get("on_device_sampling_config"), options.get("tensor_capture_config")
        self.on_device_sampling_config = sampling and SimpleNamespace(**sampling)
        self.tensor_capture_config = TensorCaptureConfig(**capture) if isinstance(capture, dict) else capture


# Of a mixture of experts; NxDI's own has more options.
MoENeuronConfig = NeuronConfig


class InferenceConfig:
    """The config of the model."""

    def __init__(self, neuron_config, **values):
        self.neuron_config = neuron_config
        vars(self).update(values)

    @classmethod
    def get_neuron_config_cls(cls):
        """Return the class of the device's config."""
        return NeuronConfig


def to_dict(value):
    """Return a config as NxDI saves it beside a compiled graph: all that is in it, however deep."""
    if isinstance(value, dict):
        return {name: to_dict(item) for name, item in value.items()}
    if isinstance(value, list):
        return [to_dict(item) for item in value]
    return (
        {name: to_dict(item) for name, item in vars(value).items()} if hasattr(value, "__dict__") else value
    )
