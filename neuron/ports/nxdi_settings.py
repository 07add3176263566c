"""NxdiSettings: how an application of NxDI is built, and the points at which NxDI's tensor replacement can act.

NxDI replaces what a module returns, if that is one tensor. A decoder layer returns a tuple, so a point is a module of
its own, which returns what it is given: `layers.3.stream` for the input of layer 3, `norm.stream` for that of the final
norm. `TensorReplacementConfig(ref_dir=, neuron_dir=, tf_map=, neuron_config=)` reads one file for each module and step
from both folders: `neuron_dir` gives the compiled graph's shape, `ref_dir` the values. Step 1 is the prefill, each
later one a decoding step. A compiled graph takes the tensors of all modules that `tf_map` names in any step, and a
mask for each: so it is compiled once for all points, if a step that never comes names them all.
Read in NxDI 0.9 and NxD 0.18. B prompts, S columns of the pass, C columns of the bucket, H hidden.
"""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from minimax_tools.errors import TargetError
from neuron.devices.ranks import Ranks
from neuron.ports.nxdi_config import ABSENT_KEYS, OPTIONS, read_options
from neuron.ports.target import ModelBatch

_POINT = "stream"
# Usual name of the argument that holds the stream; another name is that of the first tensor.
_STATES = "hidden_states"
# Argument of a layer that holds a summand of its input, where a kernel adds both.
_RESIDUAL = "residual"


def point_module(point: int, *, num_layers: int) -> str:
    """Return the name of the module at a point: a layer's number, or the number of layers."""
    return f"norm.{_POINT}" if point == num_layers else f"layers.{point}.{_POINT}"


def list_point_modules(num_layers: int) -> list[str]:
    """Return the names of the modules at all points, in order."""
    return [point_module(point, num_layers=num_layers) for point in range(num_layers + 1)]


def add_stream_points(model: nn.Module) -> None:
    """Add a point before each of `model.layers`, and before `model.norm`; call it at the end of `init_model`."""
    layers, norm = getattr(model, "layers", None), getattr(model, "norm", None)
    if not isinstance(layers, nn.ModuleList) or not isinstance(norm, nn.Module):
        raise TargetError(
            f"{type(model).__name__} has no stream to replace",
            expected="the submodules `layers` and `norm`, as models of NxDI have them",
            next_step="Call add_stream_points at the end of init_model, behind those.",
        )
    for module in (*layers, norm):
        module.add_module(_POINT, nn.Identity())
        module.register_forward_pre_hook(_pass_point, with_kwargs=True)


def with_stream_points(application_class: Any) -> Any:
    """Return the class of an application whose model has points."""
    model_class = application_class._model_cls

    def init_model(self: nn.Module, config: Any) -> None:
        model_class.init_model(self, config)
        add_stream_points(self)

    pointed = type(model_class.__name__, (model_class,), {"init_model": init_model})
    return type(application_class.__name__, (application_class,), {"_model_cls": pointed})


def _pass_point(
    module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if keywords.get(_RESIDUAL) is not None:
        raise TargetError(
            f"{type(module).__name__} is given its input as two summands, which cannot be replaced together",
            found=f"a tensor as `{_RESIDUAL}`",
            next_step="Leave out qkv_kernel_fuse_residual_add of the port's NeuronConfig.",
        )
    point = module.get_submodule(_POINT)
    if inputs:
        return (point(inputs[0]), *inputs[1:]), keywords
    tensors = [name for name, value in keywords.items() if isinstance(value, torch.Tensor)]
    name = _STATES if _STATES in tensors else tensors[0]
    return inputs, {**keywords, name: point(keywords[name])}


# A step that no run comes to: naming all modules for it puts them in the graph, in this order.
NO_STEP = 0
PREFILL_STEP = 1
# The prefill, and one decoding step, whose shape all decoding steps have.
_STEPS = (PREFILL_STEP, 2)


def file_name(module: str, *, step: int) -> str:
    """Return the name by which NxDI finds a module's output in a step."""
    phase = "cte" if step == PREFILL_STEP else "tkg"
    return f"captured_tensors_{phase}_step_{step}_module_{module}_output.pt"


def map_steps(point: int | None, *, num_layers: int, num_steps: int) -> Mapping[int, list[str]]:
    """Return the `tf_map` that replaces the stream at a point in all steps, nowhere for None."""
    replaced = [] if point is None else [point_module(point, num_layers=num_layers)]
    steps = range(PREFILL_STEP, num_steps + 1)
    return {NO_STEP: list_point_modules(num_layers), **{step: list(replaced) for step in steps}}


def make_config(neuron_config: Any, *, num_layers: int, hidden_size: int) -> Any:
    """Return the TensorReplacementConfig of a graph whose stream can be replaced at all points.

    Its files hold zeros: `replacement_arguments` gives each pass its own values.
    """
    from neuronx_distributed_inference.models.config import TensorReplacementConfig
    from neuronx_distributed_inference.utils.tensor_replacement.registry import TensorReplacementRegister

    batch_size, dtype = neuron_config.batch_size, neuron_config.torch_dtype
    with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as folder:
        reference, shapes = Path(folder, "reference"), Path(folder, "shapes")
        for directory in (reference, shapes):
            directory.mkdir()
        for step in _STEPS:
            num_columns = neuron_config.max_context_length if step == PREFILL_STEP else 1
            zeros = torch.zeros(batch_size, num_columns, hidden_size, dtype=dtype)
            for module in list_point_modules(num_layers):
                torch.save(zeros, shapes / file_name(module, step=step))
                torch.save(zeros.flatten(0, 1), reference / file_name(module, step=step))
        # A process has one register: that of an application before would be taken.
        TensorReplacementRegister.clear()
        return TensorReplacementConfig(
            ref_dir=str(reference),
            neuron_dir=str(shapes),
            tf_map=dict(map_steps(None, num_layers=num_layers, num_steps=len(_STEPS))),
            # NxDI saves the config that gets this one: within itself it would have no end.
            neuron_config=copy.deepcopy(neuron_config),
        )


def replacement_arguments(
    point: int | None,
    states: torch.Tensor | None,
    *,
    num_layers: int,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
) -> list[torch.Tensor]:
    """Return the `tf_args` of a pass: a tensor of `shape` for each point, and then a mask [1] for each.

    `states` [B,S,H] replace the stream at `point`; padding behind them is zero. With None, nothing is replaced.
    """
    nothing = torch.zeros(shape, dtype=dtype)
    tensors = [nothing] * (num_layers + 1)
    masks = [torch.zeros(1, dtype=torch.bool) for _ in tensors]
    if point is not None and states is not None:
        padded = nothing.clone()
        padded[:, : states.shape[1]] = states.to(device="cpu", dtype=dtype)
        tensors[point] = padded
        masks[point] = torch.ones(1, dtype=torch.bool)
    return [*tensors, *masks]


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
        """Build NxDI's config of the model, with that of the device; the port's options override mm2's."""
        config_class = self.application_class.get_config_cls()
        neuron_config = config_class.get_neuron_config_cls()(**self._options())
        self._check(neuron_config)
        own = {name: value for name, value in vars(self.config).items() if name not in _ADDED_KEYS}
        values = {**_CONFIG_KEYS, **own, "_name_or_path": str(folder), **overriding}
        return config_class(neuron_config, **values)

    def build_application(self, folder: Path, config: Any) -> Any:
        """Build the application; if the run replaces the stream, with NxDI's tensor replacement at all points."""
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
