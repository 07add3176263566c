"""NxdiSettings: the settings that decide how an application of NxDI is built, its config, and the application.

The port's own options override mm2's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.model_batch import ModelBatch
from neuron.ports.nxdi_config import ABSENT_KEYS, OPTIONS, read_options
from neuron.ports.nxdi_points import with_stream_points
from neuron.ports.nxdi_replacement import make_config

# The cache's length is a multiple of this: NxDI's kernels take no other.
_LENGTH_MULTIPLE = 128
# Keys that NxDI's application reads in its config, which transformers' configs have.
_CONFIG_KEYS: Mapping[str, object] = {
    **ABSENT_KEYS,
    "is_encoder_decoder": False,
    "output_attentions": False,
    "output_hidden_states": False,
    "use_return_dict": True,
}
# mm2's additions to config.json.
_ADDED_KEYS = ("batch", "ranks")
# On the CPU the stages share a module of the largest bucket, because NxDI's mask fits no other; and no kernel runs.
_CPU_OPTIONS: Mapping[str, object] = {
    "on_cpu": True,
    "enable_bucketing": False,
    "context_encoding_buckets": None,
    "token_generation_buckets": None,
    # Else NxDI takes it for prompts of some lengths.
    "attn_kernel_enabled": False,
}
_OPTIONS_STEP = f"Correct {OPTIONS} of the port's class or module."


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdiSettings:
    """The settings that decide how an application is built."""

    application_class: Any  # a subclass of NeuronBaseForCausalLM
    module: ModuleType  # the module that defines it
    config: Any  # the keys of config.json as attributes, with the run's `batch` and `ranks`
    dtype: torch.dtype
    is_on_cpu: bool

    @property
    def batch(self) -> ModelBatch:
        """The sizes of the run's batch."""
        batch: ModelBatch = self.config.batch
        return batch

    @property
    def ranks(self) -> Ranks:
        """The ranks that share the model."""
        ranks: Ranks = self.config.ranks
        return ranks

    def build_config(self, folder: Path, **overriding: object) -> Any:
        """Build NxDI's config of the model, with that of the device; the port's options override mm2's.

        Raises:
            TargetError: The options contradict the run.
        """
        config_class = self.application_class.get_config_cls()
        neuron_config = config_class.get_neuron_config_cls()(**self._options())
        self._check(neuron_config)
        own = {name: value for name, value in vars(self.config).items() if name not in _ADDED_KEYS}
        values = {**_CONFIG_KEYS, **own, "_name_or_path": str(folder), **overriding}
        return config_class(neuron_config, **values)

    def build_application(self, folder: Path, config: Any) -> Any:
        """Build the application; if the run replaces the stream, with NxDI's tensor replacement at all points.

        Raises:
            TargetError: The ranks divide the stream.
        """
        if not self.batch.replaces_stream:
            return self.application_class(str(folder), config)
        neuron_config = config.neuron_config
        if getattr(neuron_config, "sequence_parallel_enabled", False):
            raise TargetError(
                f"{self.application_class.__name__} divides its stream among the ranks",
                found="sequence_parallel_enabled",
                next_step=f"Set it to False: NxDI's tensor replacement takes whole tensors. {_OPTIONS_STEP}",
            )
        neuron_config.tensor_replacement_config = make_config(
            neuron_config, num_layers=self.config.num_hidden_layers, hidden_size=self.config.hidden_size
        )
        return with_stream_points(self.application_class)(str(folder), config)

    def _options(self) -> dict[str, object]:
        length = -(-self.batch.num_tokens // _LENGTH_MULTIPLE) * _LENGTH_MULTIPLE
        own = read_options(self.application_class, self.module)
        options: dict[str, object] = {
            "tp_degree": self.ranks.degree,
            "batch_size": self.batch.num_prompts,
            "seq_len": length,
            "torch_dtype": self.dtype,
            "router_config": {"act_fn": self.config.scoring_func, "dtype": torch.float32},
            "output_logits": True,
            # The likeliest token: what mm2 can judge.
            "on_device_sampling_config": {"do_sample": False, "top_k": 1},
            **own,
        }
        options.setdefault("moe_tp_degree", options["tp_degree"])
        if self.is_on_cpu:
            # In the context pass NxDI pads the mask to `max_context_length`, and in its module to `seq_len`.
            options |= {**_CPU_OPTIONS, "max_context_length": options["seq_len"]}
        if self.batch.replaces_stream:
            # NxDI's tensor replacement takes a prefill of one size.
            options |= {"enable_bucketing": False, "max_context_length": options["seq_len"]}
        if options["on_device_sampling_config"] is None:
            # On the CPU NxDI would take the second tensor for keys of the cache.
            options["output_logits"] = False
        return options

    def _check(self, neuron_config: Any) -> None:
        """Refuse options that this run cannot have, all at once."""
        batch = self.batch
        faults = []
        if neuron_config.batch_size != batch.num_prompts:
            faults.append(f"batch_size {neuron_config.batch_size} for {batch.num_prompts} prompts")
        if neuron_config.seq_len < batch.num_tokens:
            faults.append(f"seq_len {neuron_config.seq_len} for {batch.num_tokens} tokens")
        if neuron_config.padding_side != "right":
            faults.append(f"padding_side {neuron_config.padding_side!r}, where mm2 pads on the right")
        if self.is_on_cpu and neuron_config.is_continuous_batching:
            faults.append("is_continuous_batching, for which NxDI builds each stage apart on the CPU")
        if self.is_on_cpu and neuron_config.tp_degree != self.ranks.degree:
            faults.append(f"tp_degree {neuron_config.tp_degree} for --tp-degree {self.ranks.degree}")
        if faults:
            raise TargetError(
                f"{self.application_class.__name__} cannot be set up for this run",
                found="; ".join(faults),
                next_step=_OPTIONS_STEP,
            )
