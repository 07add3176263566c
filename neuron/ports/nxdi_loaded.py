"""LoadedApplication: a port's application on NxDI (a NeuronBaseForCausalLM), built, loaded and called.

NxDI pads prompts on the right, gives padding the position 1, and takes the last token's row at the largest position.
A decoding step's mask holds the cached positions, not its own. On the CPU an application is one module (`to_cpu`); on
Neuron it is compiled, and shows tensors by NxDI's tensor capture alone. Read in NxDI 0.9; never run on a device.
B prompts, S columns of the pass, C columns of the bucket, K kv heads, P positions of the cache, D head_dim.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from torch import nn

from minimax_tools.capture.passes import CachePair
from minimax_tools.dumps.format_names import NXDI
from minimax_tools.dumps.found_sites import FoundSite
from minimax_tools.dumps.name_map import NameMap, usual_places
from minimax_tools.dumps.nxdi import read_dump
from minimax_tools.dumps.site_finder import find_sites
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import TargetError
from minimax_tools.model.sites import ModelSite, Site
from neuron.ports.nxdi import CPU_MODE_VARIABLE, is_cpu_mode, log_to_stderr
from neuron.ports.nxdi_config import OPTIONS
from neuron.ports.nxdi_settings import NxdiSettings, replacement_arguments

logger = logging.getLogger(__name__)


_FIRST_LAYER = "layers.0"
# The logits come with the pass itself, and the head's captured ones would be a rank's part.
_LEFT_OUT = (ModelSite.LOGITS,)


def captured_modules(present: Iterable[str], *, num_layers: int) -> list[str]:
    """Return the modules that have sites, of all layers; `present` are those of a model, its first layer at least."""
    names = [name for name in dict.fromkeys(present) if not _is_of_later_layer(name)]
    wanted = {
        module
        for site, sources in usual_places(NXDI, has_fused_residuals=False).items()
        if isinstance(site, (Site, ModelSite)) and site not in _LEFT_OUT
        for source in sources
        for place in source
        for module in place.find_layers(names).values()
    }
    modules = []
    for name in (name for name in names if name in wanted):
        in_layer = name == _FIRST_LAYER or name.startswith(f"{_FIRST_LAYER}.")
        rest = name.removeprefix(_FIRST_LAYER)
        modules += [f"layers.{layer}{rest}" for layer in range(num_layers)] if in_layer else [name]
    return modules


def read_captured(
    directory: Path, *, batch_shape: tuple[int, int], num_ranks: int
) -> dict[str, torch.Tensor]:
    """Read the tensors of one pass as sites: [B,S,…] of `batch_shape`, by `layer_3.output` or `final_norm`.

    NxDI writes those of rank 0: sites that the ranks divide are left out.
    """
    found = find_sites(read_dump(directory), NameMap(num_ranks=num_ranks))
    sites = {}
    for (layer, site), place in found.sites.items():
        if not isinstance(site, (Site, ModelSite)) or site in _LEFT_OUT:
            continue
        tensor = _read(directory, place, batch_shape=batch_shape)
        sites[str(site) if layer is None else f"layer_{layer}.{site}"] = tensor
    return sites


def _read(directory: Path, place: FoundSite, *, batch_shape: tuple[int, int]) -> torch.Tensor:
    batch_size, num_columns = batch_shape
    (term,) = place.terms
    (piece,) = term.pieces.values()
    tensor = read_tensor(directory / piece.file, piece.keys)
    if tensor.ndim == 2:
        # [B·C,…]: a mixture of experts sees the tokens of all prompts one after another.
        tensor = tensor.unflatten(0, (batch_size, -1))
    return tensor[:, :num_columns]


def _is_of_later_layer(name: str) -> bool:
    return name.startswith("layers.") and name.split(".")[1] != "0"


_WORLD_SIZE = "WORLD_SIZE"
# A point of the stream, and states [B,S,H] that replace it there.
ReplacedStream = tuple[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class NxdiOutput:
    """The output of a pass."""

    logits: torch.Tensor  # [B,1,vocab], of each prompt's last token
    tokens: torch.Tensor | None  # tokens that NxDI's sampler chose, [B]; None if it does not sample


def prefill_arguments(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
) -> dict[str, Any]:
    """Return the arguments by which an application prefills prompts [B,S], padded on the right."""
    positions = torch.where(attention_mask.bool(), position_ids, 1)
    return _arguments(input_ids, attention_mask, positions)


def step_arguments(input_ids: torch.Tensor, position_ids: torch.Tensor) -> dict[str, Any]:
    """Return the arguments by which an application computes a token of each prompt, [B,1]."""
    cached = torch.arange(int(position_ids.max())) < position_ids
    return _arguments(input_ids, cached.to(input_ids.dtype), position_ids)


def _arguments(
    input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
) -> dict[str, Any]:
    return {
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "seq_ids": torch.arange(len(input_ids)),
        # Top k, top p and temperature, which a greedy sampler does not read.
        "sampling_params": torch.ones(len(input_ids), 3),
    }


class LoadedApplication:
    """An application with its weights, on the CPU or on Neuron."""

    def __init__(self, application: Any, *, settings: NxdiSettings, folder: Path) -> None:
        self._application = application
        self._settings = settings
        self._folder = folder
        self._neuron_config = application.neuron_config

    @classmethod
    def open(cls, settings: NxdiSettings, folder: Path) -> LoadedApplication:
        """Build the application and load the checkpoint in `folder`, by the port's own conversion."""
        log_to_stderr()
        _refuse_other_device(settings)
        return cls._on_cpu(settings, folder) if settings.is_on_cpu else cls._on_neuron(settings, folder)

    @classmethod
    def _on_cpu(cls, settings: NxdiSettings, folder: Path) -> LoadedApplication:
        config = settings.build_config(folder)
        application = settings.build_application(folder, config)
        with _group_left_open():
            application.to_cpu()
        opened = cls(application, settings=settings, folder=folder)
        if settings.batch.replaces_stream:
            opened._enable_replacement()
        if opened.captures:
            opened._enable_capture()
        return opened

    @classmethod
    def _on_neuron(cls, settings: NxdiSettings, folder: Path) -> LoadedApplication:
        from neuronx_distributed_inference.utils.tensor_capture_utils import (
            list_capturable_modules_in_application,
        )

        config = settings.build_config(folder)
        _close_groups()
        replaces_stream = settings.batch.replaces_stream
        if config.neuron_config.tensor_capture_config is None and not replaces_stream:
            # Names of modules are those of any number of layers; one layer is built fast.
            small = settings.application_class(
                str(folder), settings.build_config(folder, num_hidden_layers=1)
            )
            present = [
                name for names in list_capturable_modules_in_application(small).values() for name in names
            ]
            capture = {
                "modules_to_capture": captured_modules(present, num_layers=config.num_hidden_layers),
                "capture_inputs": True,
            }
            config.neuron_config.tensor_capture_config = _tensor_capture_config(capture)
        application = settings.build_application(folder, config)
        # The compiled program is loaded at once, and not kept: it fits this run's sizes and sites alone.
        with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as compiled:
            application.compile(compiled)
            application.load(compiled)
        return cls(application, settings=settings, folder=folder)

    @property
    def module(self) -> nn.Module | None:
        """The model's module, of which all stages compute; None for a compiled application."""
        if not self._settings.is_on_cpu:
            return None
        module: nn.Module = self._application.models[0].model
        return module

    def build_for_device(self) -> nn.Module | None:
        """Build the model's module, with one layer and no weights, as NxD does for Neuron; None if that fails here."""
        module, settings = self.module, replace(self._settings, is_on_cpu=False)
        assert module is not None, "an application on the CPU has a module"
        try:
            with _compiling():
                built: nn.Module = type(module)(settings.build_config(self._folder, num_hidden_layers=1))
        except Exception as error:  # the port's code, set up for a device that is not here
            logger.info("The module for the device cannot be built here: %s", error)
            return None
        return built

    @property
    def captures(self) -> bool:
        """True if NxDI's tensor capture is set."""
        return self._neuron_config.tensor_capture_config is not None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that the heads are divided among."""
        return int(self._neuron_config.tp_degree)

    def prefill(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        captured: Path,
        replaced: ReplacedStream | None = None,
    ) -> NxdiOutput:
        """Compute prompts [B,S], padded on the right; captured tensors are written into a folder."""
        self._application.reset()
        arguments = prefill_arguments(input_ids, attention_mask, position_ids)
        arguments |= self._replacing(replaced, num_columns=self._neuron_config.max_context_length)
        return self._call(arguments, captured=captured)

    def decode(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        *,
        captured: Path,
        replaced: ReplacedStream | None = None,
    ) -> NxdiOutput:
        """Compute a token of each prompt, [B,1], behind those in the cache at smaller positions."""
        arguments = step_arguments(input_ids, position_ids) | self._replacing(replaced, num_columns=1)
        return self._call(arguments, captured=captured)

    def read_cache(self) -> list[CachePair] | None:
        """Return this rank's keys and values [B,K,P,D] of each layer, entries by position; None on a device."""
        if self.module is None:
            return None
        manager: Any = self.module.kv_mgr
        flat: Sequence[torch.Tensor] = list(manager.past_key_values)
        # Behind the prompts NxDI may keep rows for writes that are to be discarded.
        rows = slice(self._settings.batch.num_prompts)
        is_transposed = bool(self._neuron_config.k_cache_transposed)
        return [
            ((keys.mT if is_transposed else keys)[rows], values[rows])
            for keys, values in zip(flat[::2], flat[1::2], strict=True)
        ]

    def _call(self, arguments: dict[str, Any], *, captured: Path) -> NxdiOutput:
        if self.captures:
            arguments["tensor_capture_hook"] = self._capture_hook(captured)
        result = self._application(**arguments)
        # Without a sampler NxDI returns the logits a second time, as `tokens`. On the CPU its sampler reads the rank's
        # own part of the vocabulary, whatever the port.
        is_of_a_part = self._settings.is_on_cpu and self._settings.ranks.are_several
        is_sampled = self._neuron_config.on_device_sampling_config is not None and not is_of_a_part
        return NxdiOutput(logits=result.logits, tokens=result.tokens if is_sampled else None)

    def _replacing(self, replaced: ReplacedStream | None, *, num_columns: int) -> dict[str, Any]:
        """Return the arguments of a pass by which its stream is replaced; none if the graph takes none."""
        if not self._settings.batch.replaces_stream:
            return {}
        point, states = (None, None) if replaced is None else replaced
        config = self._settings.config
        shape = (self._neuron_config.batch_size, num_columns, config.hidden_size)
        arguments = replacement_arguments(
            point,
            states,
            num_layers=config.num_hidden_layers,
            shape=shape,
            dtype=self._neuron_config.torch_dtype,
        )
        return {"tf_args": arguments}

    def _enable_replacement(self) -> None:
        """Hook the points, as NxDI itself does when it compiles an application, and not in `to_cpu`."""
        from neuronx_distributed.utils.tensor_replacement import modify_model_for_tensor_replacement

        modify_model_for_tensor_replacement(self.module)

    def _capture_hook(self, directory: Path) -> Any:
        from neuronx_distributed_inference.utils.tensor_capture_utils import get_tensor_capture_hook

        if self._settings.is_on_cpu:
            self._configure_registry()
        if not self._settings.ranks.is_lead:
            return None
        return get_tensor_capture_hook(tensor_capture_save_dir=str(directory))

    def _enable_capture(self) -> None:
        """Hook the modules, as NxDI itself does when it compiles an application, and not in `to_cpu`."""
        from neuronx_distributed.utils.tensor_capture import enable_tensor_capture

        config = self._neuron_config.tensor_capture_config
        module = self.module
        assert module is not None, "an application on the CPU has a module"
        enable_tensor_capture(
            module,
            modules_to_capture=config.modules_to_capture,
            max_tensors=config.max_intermediate_tensors,
            capture_inputs=config.capture_inputs,
        )

    def _configure_registry(self) -> None:
        """Name the modules to NxD's registry again: NxDI clears it behind each pass, names included."""
        from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry

        config = self._neuron_config.tensor_capture_config
        registry: Any = TensorRegistry
        registry.get_instance().configure(
            enabled=True,
            modules=config.modules_to_capture,
            max_tensors=config.max_intermediate_tensors,
            capture_inputs=config.capture_inputs,
        )


def _refuse_other_device(settings: NxdiSettings) -> None:
    if settings.is_on_cpu != is_cpu_mode():
        raise TargetError(
            f"{settings.application_class.__name__} runs on {'the CPU' if settings.is_on_cpu else 'Neuron'}, which "
            "NxD was not told",
            expected=f"{CPU_MODE_VARIABLE}={int(settings.is_on_cpu)}",
            found=f"{CPU_MODE_VARIABLE}={int(is_cpu_mode())}",
            next_step=f"Set {CPU_MODE_VARIABLE}=1 for --backend cpu, and only there.",
        )
    if settings.is_on_cpu and settings.ranks.are_several and settings.dtype is not torch.float32:
        raise TargetError(
            f"NxDI runs several ranks on the CPU in float32 alone, and this run is in {settings.dtype}",
            next_step="Add --dtype float32, or leave out --tp-degree.",
        )
    if not settings.is_on_cpu and settings.ranks.are_several:
        raise TargetError(
            "on Neuron NxDI drives all cores from one process",
            found=f"--tp-degree {settings.ranks.degree}",
            next_step=f"Leave out --tp-degree, and set tp_degree in {OPTIONS} of the port's class.",
        )


@contextmanager
def _group_left_open() -> Iterator[None]:
    """Hide for the block that ranks were launched: NxDI would open the process group, which the run has open."""
    hidden = os.environ.pop(_WORLD_SIZE, None)
    try:
        yield
    finally:
        if hidden is not None:
            os.environ[_WORLD_SIZE] = hidden


@contextmanager
def _compiling() -> Iterator[None]:
    """Let NxD build modules for the block as it does when it compiles for a device: without values of weights."""
    from neuronx_distributed.parallel_layers import parallel_state

    before, mode = os.environ[CPU_MODE_VARIABLE], parallel_state.get_aot_mode()
    os.environ[CPU_MODE_VARIABLE] = "0"
    parallel_state.set_aot_mode(True)
    try:
        yield
    finally:
        os.environ[CPU_MODE_VARIABLE] = before
        parallel_state.set_aot_mode(mode)


def _close_groups() -> None:
    """Close the run's groups: NxDI opens its own to compile. A single rank needs none of mm2's."""
    from neuronx_distributed.parallel_layers import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _tensor_capture_config(options: Mapping[str, object]) -> Any:
    from neuronx_distributed_inference.models.config import TensorCaptureConfig

    return TensorCaptureConfig(**options)
