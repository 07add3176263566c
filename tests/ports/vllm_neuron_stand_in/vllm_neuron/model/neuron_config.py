"""Stand-in for vllm_neuron/model/neuron_config.py: the options of a model on Neuron."""

from __future__ import annotations

from dataclasses import dataclass, fields
from types import SimpleNamespace


@dataclass
class NeuronConfig:
    """The options that the test's port reads; the plugin samples on the device unless it is told not to."""

    on_device_sampling_config: SimpleNamespace | None = None
    max_logprobs: int = 0

    @classmethod
    def from_dict(cls, config_dict):
        """Read `additional_config["neuron_config"]`."""
        known = {field.name for field in fields(cls)}
        values = {name: value for name, value in config_dict.items() if name in known}
        sampling = values.pop("on_device_sampling_config", {})
        return cls(
            on_device_sampling_config=None if sampling is None else SimpleNamespace(**sampling), **values
        )
