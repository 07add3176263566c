"""Models on their way to the compiler."""

from __future__ import annotations


class DecoderModelInstance:
    """A model to compile."""

    def __init__(self, model_cls, config, **options):
        self.model_cls, self.config, self.options = model_cls, config, options
        self.module = None

    def load_module(self):
        """Build the model, and cast it to the device's dtype."""
        self.module = self.model_cls(self.config, **self.options).eval()
        if self.config.neuron_config.cast_type == "config":
            dtype = self.config.neuron_config.torch_dtype
            self.module._apply(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)
