"""Whole ports for the vLLM Neuron plugin: `--target vllm-neuron:package.module:NAME`, built, fed and read by mm2.

mm2 takes the place of the plugin's model runner, and calls a model as that does:

| call | when |
|---|---|
| `NAME.from_configs(hf_config, neuron_config)`, under the meta device | once |
| `load_weights(folder, device, cache_dir)`, then `to(device)` | once |
| `get_kv_spec()`, `bind_kv_cache({layer: [keys, values]})` | before the first pass, and when the cache has grown |
| `forward(input_ids, positions, attn_metadata=…, sampling_positions=…, …)` | in every pass |

Layers in vLLM's own style pass the residual stream on as two summands, which the next norm adds: hooks put their sum in
the first place and zeros in the second. A port that reads the files itself gets a folder without FP8.
B requests, S columns of a prompt, T tokens of a pass, H hidden, V vocabulary.
"""

from __future__ import annotations

import importlib
import inspect
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from minimax_tools.capture.passes import CachePair
from minimax_tools.checkpoint.layer_tensors import ModelTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CheckpointError, TargetError, list_names
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.machine.size import format_size
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_of
from minimax_tools.stored_dtype import FLOAT8_E4M3FN
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.cpu_mode import VLLM_NEURON_CPU_MODE, refuse_other_mode
from neuron.ports.exposure import CACHE, find_exposure, find_model_exposure
from neuron.ports.packed_request import (
    BlockCache,
    DividedTokens,
    PackedRequest,
    new_host_group,
    pack_prompt,
    pack_step,
    refuse_uneven,
)
from neuron.ports.returned import MODEL_PAST
from neuron.ports.sources import OPTIONS, ImportedPort
from neuron.ports.target import ModelTarget, port_errors

_STATES, _RESIDUAL = "hidden_states", "residual"


def passes_summands(layer: nn.Module) -> bool:
    """Decide whether a layer takes the residual stream as two summands."""
    return _RESIDUAL in inspect.signature(layer.forward).parameters


def show_stream(layer: nn.Module) -> None:
    """Hook a layer: its first argument and its first output become the residual stream, [T,H]."""
    signature = inspect.signature(layer.forward)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
        given = dict(signature.bind(*args, **kwargs).arguments)
        states, residual = _summed(given.pop(_STATES), given.pop(_RESIDUAL, None))
        # The states first: a site's tap counts keyword arguments too.
        return (), {_STATES: states, _RESIDUAL: residual, **given}

    def after(_: nn.Module, __: Any, output: Any) -> Any:
        is_pair = isinstance(output, (tuple, list)) and len(output) == 2
        return _summed(*output) if is_pair else output

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after)


def find_stream_sites(layer: nn.Module) -> dict[str, str]:
    """Return the sites that a hooked layer shows by usual names, as a port declares them.

    The norm behind the attention adds the summands: its second output is the stream there, its first one is normed.
    """
    taps = find_exposure(layer, what=type(layer).__name__).taps
    sites = {str(site): str(tap) for site, tap in taps.items() if tap.path}
    if Site.POST_NORM in taps:
        sites[str(Site.ATTN_RESIDUAL)] = f"{taps[Site.POST_NORM].path}:output[1]"
    return sites


def _summed(states: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    if residual is None:
        return states, None
    return states + residual, torch.zeros_like(residual)


_CONFIG = "config.json"
_INDEX = "model.safetensors.index.json"


@contextmanager
def plain_checkpoint(reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype) -> Iterator[Path]:
    """Open a folder of the model's tensors without FP8: the checkpoint itself, or a copy for the time of the block.

    The copy holds the hub's names, values in `dtype`, router gates and correction biases in float32. Its config.json
    names no quantisation.
    """
    if not any(reader.index[name].dtype == FLOAT8_E4M3FN for name in reader.index.names):
        yield reader.folder
        return
    with tempfile.TemporaryDirectory(prefix="mm2-plain-") as folder:
        _write(ModelTensors.open(reader, spec, dtype), Path(folder), config=dict(spec.raw))
        yield Path(folder)


def _write(tensors: ModelTensors, folder: Path, *, config: dict[str, object]) -> None:
    # The router's few tensors in float32 do not count.
    needed = sum(math.prod(tensors.given_shape(name)) for name in tensors) * tensors.dtype.itemsize
    free = shutil.disk_usage(folder).free
    if needed > free:
        raise CheckpointError(
            f"{folder.parent} is too small for a copy of the checkpoint without FP8, which the port reads",
            expected=format_size(needed),
            found=f"{format_size(free)} free",
            next_step="Set TMPDIR to a larger disk, or give --model a copy of the checkpoint in BF16.",
        )
    names_of: dict[str, list[str]] = {}
    for name in tensors:
        layer = layer_of(name)
        file = "model.safetensors" if layer is None else f"model-layer-{layer:03}.safetensors"
        names_of.setdefault(file, []).append(name)
    stored = tensors.reader.index.stored_names.stored
    for file, names in names_of.items():
        save_file({stored(name): tensors[name] for name in names}, folder / file)
    weight_map = {stored(name): file for file, names in names_of.items() for name in names}
    (folder / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    config.pop("quantization_config", None)
    (folder / _CONFIG).write_text(json.dumps(config))


PREFIX = "vllm-neuron:"
# Attribute of the port's class: whether its load_weights reads FP8.
TAKES_FP8 = "takes_fp8"
_MODULES = ("vllm.config", "vllm_neuron.model.neuron_config", "vllm_neuron.parallel.neuron_parallel_state")
_FACTORY = "from_configs"
_METHODS = ("get_kv_spec", "bind_kv_cache", "load_weights")
_NUM_NAMES_SHOWN = 8
_INSTALL_STEP = (
    "Run in the Neuron SDK's environment for vLLM Neuron (2.31 or later), or install the plugin from its repository: "
    "pip install --extra-index-url https://pip.repos.neuron.amazonaws.com -e vllm-neuron. The package of this name on "
    "PyPI is empty."
)
_INTERFACE_STEP = "AWS's page on onboarding a model to vLLM Neuron describes what its runner calls."
_LOAD_STEP = "Its load_weights(folder, device, cache_dir) is called; see --debug for the traceback."


class VllmNeuronModel(nn.Module):
    """A model for vLLM Neuron behind the protocol of a whole port. Its submodules have the model's own names."""

    # A prefill takes one prompt, so the rows of a batch come one after the other, each with what the last one returned.
    prefills_by_row = True
    # A request here is a whole prompt, or a token of each prompt.
    takes_chunks = False

    def __init__(
        self, model: nn.Module, *, spec: ModelSpec, ranks: Ranks, vllm_config: Any, is_cpu_mode: bool
    ) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        # In a tuple, because a second path to the same submodules would hide their own names.
        self._models = (model.eval(),)
        self.sites = getattr(model, "sites", None)
        self._show_streams(spec.num_hidden_layers)
        self._tokens = DividedTokens(ranks)
        if ranks.are_several:
            self.sites = {CACHE: _cache_layout(model, spec, ranks), **(self.sites or {})}
        self._run: Callable[..., Any] = model
        self._vllm_config = vllm_config
        self._is_cpu_mode = is_cpu_mode
        self._cache: BlockCache | None = None
        self._bound: Mapping[str, list[torch.Tensor]] | None = None

    def load_folder(self, folder: Path, device: torch.device) -> None:
        """Let the model load its weights from a checkpoint folder, and prepare it to run on the device."""
        from vllm.config import set_current_vllm_config

        refuse_other_mode(
            VLLM_NEURON_CPU_MODE,
            f"the port computes on {device}",
            is_on_cpu=device.type == "cpu",
            is_cpu_mode=self._is_cpu_mode,
        )
        (model,) = self._models
        with set_current_vllm_config(self._vllm_config):
            model.load_weights(str(folder), device, None)  # type: ignore[operator]
        empty = [name for name, tensor in model.state_dict(keep_vars=True).items() if tensor.is_meta]
        if empty:
            raise TargetError(
                f"load_weights of {type(model).__name__} left weights without values",
                found=list_names(empty, most=_NUM_NAMES_SHOWN),
                next_step="Add them to its mappings: the plugin does not refuse a weight that the checkpoint lacks.",
            )
        model.to(device)
        if not self._is_cpu_mode:
            from vllm_neuron.envs import get_compile_backend_name

            self._run = torch.compile(model, backend=get_compile_backend_name())

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        past_key_values: BlockCache | None = None,
    ) -> dict[str, Any]:
        """Prefill one prompt [1,S], or decode one token of each request [B,1]; return logits, tokens and the cache.

        The mask is [1,S] or [B,P+1]. Without a past, a new batch begins.
        """
        cache = self._begin(input_ids.device) if past_key_values is None else past_key_values
        if attention_mask.shape[1] == input_ids.shape[1]:
            request = pack_prompt(cache, input_ids, attention_mask, position_ids)
        else:
            request = pack_step(cache, input_ids, position_ids)
        self._tokens.begin(request)
        returned = self._call(cache, request, device=input_ids.device)
        logits, tokens = _parse_returned(returned, what=type(self._models[0]).__name__)
        if tokens is not None:
            tokens = tokens.long()[request.last_tokens.to(tokens.device)]
        return {"logits": logits.unflatten(0, tuple(input_ids.shape)), MODEL_PAST: cache, "tokens": tokens}

    def join_tokens(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a site's tensor of all tokens of the pass, if each rank has some of them; any other as it is."""
        return self._tokens.join(tensor)

    def cut_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Return this rank's tokens of a layer's input [1,S,H] in a prefill."""
        return self._tokens.cut(states)

    def read_cache(self, past: BlockCache) -> list[CachePair]:
        """Return keys and values [B,K,P,D] of each layer; an entry is a token's position."""
        return past.read()

    def _show_streams(self, num_layers: int) -> None:
        """Show the residual stream of layers that pass it on as two summands."""
        layers = find_model_exposure(self, num_layers=num_layers, what=type(self._models[0]).__name__).layers
        summing = [layer for layer in layers if passes_summands(layer)]
        for layer in summing:
            show_stream(layer)
        if summing and self.sites is None:
            self.sites = find_stream_sites(summing[0])

    def _begin(self, device: torch.device) -> BlockCache:
        if self._cache is None:
            spec = self._models[0].get_kv_spec()  # type: ignore[operator]
            self._cache = BlockCache(spec.layers, device=device)
        self._cache.begin()
        return self._cache

    def _call(self, cache: BlockCache, request: PackedRequest, *, device: torch.device) -> object:
        from vllm.config import set_current_vllm_config

        if self._bound is not cache.tensors:
            self._models[0].bind_kv_cache(dict(cache.tensors))  # type: ignore[operator]
            self._bound = cache.tensors
        metadata = request.metadata(device)
        with set_current_vllm_config(self._vllm_config):
            return self._run(
                input_ids=request.input_ids.to(device),
                positions=request.positions.to(device),
                attn_metadata={name: dict(metadata) for name in cache.tensors},
                sampling_positions=request.sampled.to(device),
                sampling_params=None,
                spec_decode_metadata=None,
                logit_mask=None,
                rank=torch.tensor(self._tokens.ranks.rank, dtype=torch.int32, device=device),
            )


@dataclass(frozen=True, kw_only=True)
class VllmNeuronModelTarget(ImportedPort, ModelTarget):
    """A class with the class method `from_configs`; all ranks are one tensor-parallel group."""

    prefix = PREFIX
    forms = f"{PREFIX}PATH.py:NAME or {PREFIX}package.module:NAME"
    pads_right = True

    @classmethod
    def require_library(cls) -> None:
        """Raise TargetError unless vLLM and its Neuron plugin can be imported."""
        require_plugin()

    def make(self, config: Any) -> VllmNeuronModel:
        """Build the model as the plugin's runner does: from two configs, without memory for its weights."""
        refuse_uneven(config.ranks)
        build = getattr(self.factory, _FACTORY, None)
        if build is None:
            raise self._lacks([f"{_FACTORY}(hf_config, neuron_config)"])
        from vllm.config import VllmConfig, set_current_vllm_config
        from vllm_neuron import envs
        from vllm_neuron.model.neuron_config import NeuronConfig

        _open_parallel_state(config.ranks)
        # The logits are what mm2 judges: by default they are returned, and no token is sampled on the device.
        options = {"on_device_sampling_config": None, **self.port_config}
        vllm_config = VllmConfig()
        with set_current_vllm_config(vllm_config), torch.device("meta"):
            model = build(_hub_config(config), NeuronConfig.from_dict(options))
        missing = [f"{name}()" for name in _METHODS if not callable(getattr(model, name, None))]
        if missing:
            raise self._lacks(missing)
        return VllmNeuronModel(
            model,
            spec=ModelSpec.from_config(vars(config)),
            ranks=config.ranks,
            vllm_config=vllm_config,
            is_cpu_mode=bool(envs.VLLM_NEURON_CPU_MODE),
        )

    def load(
        self,
        module: nn.Module,
        reader: CheckpointReader,
        spec: ModelSpec,
        *,
        dtype: torch.dtype,
        loader: WeightLoader,
        ranks: Ranks | None = None,
    ) -> None:
        """Let the model load its weights itself: from the checkpoint, or from a copy without FP8.

        Raises:
            CheckpointError: A tensor cannot be read, or the disk is too small for the copy.
            TargetError: The model's loading raised, or left weights without values.
        """
        assert isinstance(module, VllmNeuronModel), "it was built by `make`"
        what, activity = f"port {self.name} cannot be loaded", f"loading port {self.name}"
        if getattr(self.factory, TAKES_FP8, False):
            with port_errors(what, activity=activity, next_step=_LOAD_STEP):
                module.load_folder(reader.folder, loader.device)
            return
        with (
            _shared_folder(reader, spec, dtype=dtype, ranks=ranks or Ranks()) as folder,
            port_errors(what, activity=activity, next_step=_LOAD_STEP),
        ):
            module.load_folder(folder, loader.device)

    def _lacks(self, missing: list[str]) -> TargetError:
        return TargetError(
            f"port {self.name} is no model for vLLM Neuron",
            expected=f"a class with the class method {_FACTORY}, and with {', '.join(_METHODS)}",
            found=f"no {', no '.join(missing)}",
            next_step=_INTERFACE_STEP,
        )


def require_plugin() -> None:
    """Raise TargetError unless vLLM and its Neuron plugin can be imported."""
    try:
        # At the import vLLM's loggers take standard output for theirs, where results belong.
        with output_set_aside():
            for module in _MODULES:
                importlib.import_module(module)
    except Exception as error:  # the plugin's own imports may raise others
        raise TargetError(
            f"--target {PREFIX}… needs the packages vllm and vllm_neuron, which cannot be imported here",
            found=f"{type(error).__name__}: {error}",
            next_step=_INSTALL_STEP,
        ) from error


@contextmanager
def _shared_folder(
    reader: CheckpointReader, spec: ModelSpec, *, dtype: torch.dtype, ranks: Ranks
) -> Iterator[Path]:
    """Open the folder of `plain_checkpoint` on all ranks; the lead makes it, and ends it when all have read."""
    if not ranks.are_several:
        with plain_checkpoint(reader, spec, dtype=dtype) as folder:
            yield folder
        return
    group = new_host_group()
    with ExitStack() as stack:
        folders = [
            stack.enter_context(plain_checkpoint(reader, spec, dtype=dtype)) if ranks.is_lead else None
        ]
        torch.distributed.broadcast_object_list(folders, src=0, group=group)
        (shared,) = folders
        assert shared is not None, "the lead has sent it"
        yield shared
        torch.distributed.barrier(group=group)


def _cache_layout(model: nn.Module, spec: ModelSpec, ranks: Ranks) -> str:
    """Return the layout of the cache over ranks: a kv head is on several of them if there are more ranks than heads."""
    held = model.get_kv_spec().layers[0].num_kv_heads * ranks.degree  # type: ignore[operator]
    if held <= spec.num_key_value_heads:
        return "@shard(1)"
    heads = [rank * spec.num_key_value_heads // ranks.degree for rank in range(ranks.degree)]
    return f"@shard(1; {','.join(map(str, heads))})"


def _open_parallel_state(ranks: Ranks) -> None:
    """Open vLLM's and the plugin's groups on the run's process group, as the plugin's own tests do."""
    from vllm_neuron.parallel.neuron_parallel_state import initialize_neuron_parallel_state, is_initialized

    if not is_initialized():
        initialize_neuron_parallel_state(tp_global_ranks=list(range(ranks.degree)), local_rank=ranks.rank)


def _hub_config(config: SimpleNamespace) -> SimpleNamespace:
    """Return the model's config as vLLM would hand it over, as far as models of the plugin read it."""
    # `ranks` is mm2's addition to config.json. `ModelTarget.build` sets the default dtype to the run's.
    values = {name: value for name, value in vars(config).items() if name != "ranks"}
    values["dtype"] = values["torch_dtype"] = torch.get_default_dtype()
    hub_config = SimpleNamespace(**values)
    hub_config.to_dict = lambda: dict(values)
    hub_config.get_text_config = lambda: hub_config
    return hub_config


def _parse_returned(returned: object, *, what: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits [sampled,V], and the tokens [sampled] that a model chose which samples on the device.

    Such a model returns the tokens first, and last the logits of all ranks, if its config asks for them.
    """
    values = returned if isinstance(returned, (tuple, list)) else (returned,)
    tensors = [value for value in values if isinstance(value, torch.Tensor)]
    if tensors and tensors[0].is_floating_point():
        return tensors[0], None
    if len(tensors) > 1 and tensors[-1].is_floating_point():
        return tensors[-1], tensors[0].flatten()
    raise TargetError(
        f"{what} returned no logits",
        expected="logits [tokens,V], or the chosen tokens and the logits",
        found=", ".join(type(value).__name__ for value in values) or "nothing",
        next_step=f"A model that samples on the device returns them with {OPTIONS} = {{'max_logprobs': -1, …}}.",
    )
