"""Whole ports on neuronx-distributed-inference: `--target nxdi:package.module:CLASS` of `mm2-test model`.

CLASS is a port's application, a subclass of NxDI's NeuronBaseForCausalLM. NxDI pads prompts on the right, and takes the
last token's row at the largest position. On the CPU, with NXD_CPU_MODE=1, an application is one module (`to_cpu`),
whose sites are recorded by hooks. On Neuron it is compiled. There, and where the port's options set a
`tensor_capture_config`, sites are read from NxDI's own tensor capture. Read in NxDI 0.9; never run on a device.
B prompts, S columns of the pass, C columns of the bucket, K kv heads, P positions of the cache, D head_dim.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed
from torch import nn

from minimax_tools.capture.passes import CachePair
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.dumps.format_names import NXDI
from minimax_tools.dumps.found_sites import FoundSite
from minimax_tools.dumps.name_map import NameMap, usual_places
from minimax_tools.dumps.nxdi import read_dump
from minimax_tools.dumps.site_finder import find_sites as find_captured
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import TargetError
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.cpu_mode import NXD_CPU_MODE, ModelClasses, for_the_device, refuse_other_mode
from neuron.ports.exposure import CACHE, LAYERS
from neuron.ports.nxdi import PREFIX, aot_mode, find_sites, is_cpu_mode, require_nxdi
from neuron.ports.nxdi_config import NxdiSettings
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.nxdi_stream import ReplacedStream, pass_arguments, replacement_arguments
from neuron.ports.returned import REPLACE_STREAM, ModelResult
from neuron.ports.sources import OPTIONS, ImportedPort
from neuron.ports.target import ModelBatch, ModelTarget, port_errors

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)

_LOAD_STEP = "NxDI loads it by the class's own conversion; see --debug for the traceback."
# Tokens of the shortest prompt in a prefill.
_LEAST_PREFILLED = 2
# Variable of a launcher, by which NxDI opens the process group.
_WORLD_SIZE = "WORLD_SIZE"
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


def _read_captured(directory: Path, batch_shape: Sequence[int], *, num_ranks: int) -> dict[str, torch.Tensor]:
    """Read the tensors of one pass as sites: [B,S,…] of `batch_shape`, by `layer_3.output` or `final_norm`.

    NxDI writes those of rank 0: sites that the ranks divide are left out.
    """
    found = find_captured(read_dump(directory), NameMap(num_ranks=num_ranks))
    sites = {}
    for (layer, site), place in found.sites.items():
        if not isinstance(site, (Site, ModelSite)) or site in _LEFT_OUT:
            continue
        tensor = _read(directory, place, batch_shape)
        sites[str(site) if layer is None else f"layer_{layer}.{site}"] = tensor
    return sites


def _read(directory: Path, place: FoundSite, batch_shape: Sequence[int]) -> torch.Tensor:
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


class NxdiModel(nn.Module):
    """An application behind the protocol of a whole port; `open` builds and loads it."""

    keeps_cache = True
    # NxDI has a graph for prefills from position 0, and one for single tokens.
    takes_chunks = False

    def __init__(self, settings: NxdiSettings) -> None:
        super().__init__()
        self._settings = settings
        # At most one, in a tuple: as a submodule it would hide the names of the model's own.
        self._applications: tuple[Any, ...] = ()
        self._is_on_cpu = True
        self.sites: dict[str, str] = {}
        self.classes: ModelClasses | None = None  # None if the module tree cannot be seen
        self._replaced: ReplacedStream | None = None
        if settings.batch.replaces_stream:
            # Only then does the graph take another stream.
            setattr(self, REPLACE_STREAM, self._replace_stream)

    def open(self, folder: Path, spec: ModelSpec, *, is_on_cpu: bool) -> None:
        """Build the application, and load the checkpoint in `folder` by the port's own conversion."""
        _refuse_other_device(self._settings, is_on_cpu=is_on_cpu)
        self._is_on_cpu = is_on_cpu
        if not is_on_cpu:
            self._applications = (_compile(self._settings, folder),)
            return
        config = self._settings.build_config(folder, is_on_cpu=True)
        application = self._settings.build_application(folder, config)
        with _group_left_open():
            application.to_cpu()
        self._applications = (application,)
        module: nn.Module = application.models[0].model  # all stages compute on it
        self._enable_tools(module)
        self.classes = ModelClasses.compare(module, self._build_for_device(type(module), folder))
        if not self._captures:
            # With a capture, it alone shows the sites, as on a device.
            self._show_sites(module, spec)

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> ModelResult:
        """Run a pass of token ids [B,S]; the mask [B,P+S] of 0/1 has the columns of earlier passes first.

        A pass without earlier columns is a prefill. The logits are [B,1,vocab], of each prompt's last token.
        """
        is_prefill = attention_mask.shape[1] == input_ids.shape[1]
        arguments = pass_arguments(input_ids, attention_mask, position_ids, is_prefill=is_prefill)
        if self._settings.batch.replaces_stream:
            config = self._application.config
            arguments["tf_args"] = replacement_arguments(config, self._replaced, is_prefill=is_prefill)
        if is_prefill:
            self._application.reset()
        sites: dict[str, torch.Tensor] = {}
        with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as folder:
            if self._captures:
                arguments["tensor_capture_hook"] = self._capture_hook(folder)
            result = self._application(**arguments)
            if self._captures and self._settings.ranks.is_lead:
                sites = _read_captured(
                    Path(folder), input_ids.shape, num_ranks=int(self._neuron_config.tp_degree)
                )
        # Without a sampler NxDI returns the logits a second time, as `tokens`. On the CPU its sampler reads the rank's
        # own part of the vocabulary, whatever the port.
        is_of_a_part = self._is_on_cpu and self._settings.ranks.are_several
        is_sampled = self._neuron_config.on_device_sampling_config is not None and not is_of_a_part
        return ModelResult(
            logits=self._as_computed(result.logits),
            tokens=result.tokens if is_sampled else None,
            sites=sites,
        )

    def read_cache(self, _: object) -> list[CachePair] | None:
        """Return this rank's keys and values [B,K,P,D] of each layer, entries by position; None on a device."""
        if not self._is_on_cpu:
            return None
        manager: Any = self._application.models[0].model.kv_mgr
        flat: Sequence[torch.Tensor] = list(manager.past_key_values)
        # Behind the prompts NxDI may keep rows for writes that are to be discarded.
        rows = slice(self._settings.batch.num_prompts)
        is_transposed = bool(self._neuron_config.k_cache_transposed)
        return [
            ((keys.mT if is_transposed else keys)[rows], values[rows])
            for keys, values in zip(flat[::2], flat[1::2], strict=True)
        ]

    @property
    def _application(self) -> Any:
        (application,) = self._applications
        return application

    @property
    def _neuron_config(self) -> Any:
        return self._application.neuron_config

    @property
    def _captures(self) -> bool:
        return self._neuron_config.tensor_capture_config is not None

    def _replace_stream(self, point: int | None, states: torch.Tensor | None) -> None:
        self._replaced = None if point is None or states is None else (point, states)

    def _enable_tools(self, module: nn.Module) -> None:
        """Hook the module for replacement and capture, as NxDI does when it compiles, and not in `to_cpu`."""
        # An older NxD has neither.
        if self._settings.batch.replaces_stream:
            from neuronx_distributed.utils.tensor_replacement import modify_model_for_tensor_replacement

            modify_model_for_tensor_replacement(module)
        if self._captures:
            from neuronx_distributed.utils.tensor_capture import enable_tensor_capture

            config = self._neuron_config.tensor_capture_config
            enable_tensor_capture(
                module,
                modules_to_capture=config.modules_to_capture,
                max_tensors=config.max_intermediate_tensors,
                capture_inputs=config.capture_inputs,
            )

    def _build_for_device(self, module_class: type[nn.Module], folder: Path) -> nn.Module | None:
        """Build the module with one layer and no weights, as NxD does for Neuron; None if that fails here."""
        try:
            with for_the_device(), aot_mode():
                return module_class(self._settings.build_config(folder, is_on_cpu=False, num_hidden_layers=1))
        except Exception as error:  # the port's code, set up for a device that is not here
            logger.info("The module for the device cannot be built here: %s", error)
            return None

    def _show_sites(self, module: nn.Module, spec: ModelSpec) -> None:
        ranks = self._settings.ranks
        layout = NxdiLayout(spec=spec, tp_degree=ranks.degree, rank=ranks.rank)
        of_layers = [find_sites(layer, layout) for layer in module.get_submodule("layers").children()]
        self.model = module
        self.sites = {
            LAYERS: "model.layers",
            str(ModelSite.EMBEDDING): "model.embed_tokens",
            str(ModelSite.FINAL_NORM): "model.norm",
            **of_layers[-1],
        }
        if ranks.are_several:
            self.sites[CACHE] = str(Sharded(dim=1, blocks=layout.heads.all_kv_heads()))

    def _capture_hook(self, folder: str) -> Any:
        from neuronx_distributed.utils.tensor_capture.registry import TensorRegistry
        from neuronx_distributed_inference.utils.tensor_capture_utils import get_tensor_capture_hook

        if self._is_on_cpu:
            # NxDI clears the registry behind each pass, names of modules included.
            config = self._neuron_config.tensor_capture_config
            registry: Any = TensorRegistry
            registry.get_instance().configure(
                enabled=True,
                modules=config.modules_to_capture,
                max_tensors=config.max_intermediate_tensors,
                capture_inputs=config.capture_inputs,
            )
        if not self._settings.ranks.is_lead:
            return None
        return get_tensor_capture_hook(tensor_capture_save_dir=folder)

    def _as_computed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits in the run's dtype if it holds them: NxDI widens what the head computed to float32."""
        narrow = logits.to(self._settings.dtype)
        vocabulary = slice(self._settings.config.vocab_size)
        is_exact = torch.equal(narrow[..., vocabulary].to(logits.dtype), logits[..., vocabulary])
        return narrow if is_exact else logits


def _compile(settings: NxdiSettings, folder: Path) -> Any:
    """Compile the application for Neuron and load it, with NxDI's tensor capture at all modules that have sites."""
    from neuronx_distributed_inference.models.config import TensorCaptureConfig
    from neuronx_distributed_inference.utils.tensor_capture_utils import (
        list_capturable_modules_in_application,
    )

    config = settings.build_config(folder, is_on_cpu=False)
    _close_groups()
    if config.neuron_config.tensor_capture_config is None and not settings.batch.replaces_stream:
        # Names of modules are those of any number of layers; one layer is built fast.
        small = settings.application_class(
            str(folder), settings.build_config(folder, is_on_cpu=False, num_hidden_layers=1)
        )
        present = [name for names in list_capturable_modules_in_application(small).values() for name in names]
        config.neuron_config.tensor_capture_config = TensorCaptureConfig(
            modules_to_capture=captured_modules(present, num_layers=config.num_hidden_layers),
            capture_inputs=True,
        )
    application = settings.build_application(folder, config)
    # The compiled program is loaded at once, and not kept: it fits this run's sizes and sites alone.
    with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as compiled:
        application.compile(compiled)
        application.load(compiled)
    return application


def _refuse_other_device(settings: NxdiSettings, *, is_on_cpu: bool) -> None:
    refuse_other_mode(
        NXD_CPU_MODE,
        f"{settings.application_class.__name__} runs on {'the CPU' if is_on_cpu else 'Neuron'}",
        is_on_cpu=is_on_cpu,
        is_cpu_mode=is_cpu_mode(),
    )
    if is_on_cpu and settings.ranks.are_several and settings.dtype is not torch.float32:
        raise TargetError(
            f"NxDI runs several ranks on the CPU in float32 alone, and this run is in {settings.dtype}",
            next_step="Add --dtype float32, or leave out --tp-degree.",
        )
    if not is_on_cpu and settings.ranks.are_several:
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


def _close_groups() -> None:
    """Close the run's groups: NxDI opens its own to compile. A single rank needs none of mm2's."""
    from neuronx_distributed.parallel_layers import parallel_state

    if parallel_state.model_parallel_is_initialized():
        parallel_state.destroy_model_parallel()
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


@dataclass(frozen=True, kw_only=True)
class NxdiModelTarget(ImportedPort, ModelTarget):
    """An application on neuronx-distributed-inference."""

    prefix = PREFIX
    forms = f"{PREFIX}PATH.py:CLASS or {PREFIX}package.module:CLASS"
    pads_right = True

    @classmethod
    def find(cls, name: str) -> Self | None:
        """Import the class behind `nxdi:`, if NxDI is installed."""
        found = super().find(name)
        if found is not None:
            _refuse_other_class(name, found.factory)
        return found

    @classmethod
    def require_library(cls) -> None:
        """Raise TargetError unless NxDI can be imported."""
        require_nxdi()

    def make(self, config: Any) -> NxdiModel:
        """Prepare the application, which is built when it is loaded: only then its folder is known."""
        if config.batch is None:
            raise TargetError(
                f"port {self.name} runs batches of one size alone, for which NxDI builds it",
                next_step="Run it with mm2-test model.",
            )
        _refuse_batch(config.batch)
        return NxdiModel(
            NxdiSettings(
                application_class=self.factory,
                options=self.port_config,
                config=config,
                dtype=torch.get_default_dtype(),  # `build` sets it to the run's dtype
            )
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
        """Load the weights by the application's own loader: the class's conversion, NxDI's cast, NxD's sharding.

        Raises:
            TargetError: NxDI or the port raised, or the settings do not fit the run.
        """
        assert isinstance(module, NxdiModel), "this target made it"
        failed, activity = f"port {self.name} cannot be loaded", f"loading port {self.name}"
        with port_errors(failed, activity=activity, next_step=_LOAD_STEP), output_set_aside():
            module.open(reader.folder, spec, is_on_cpu=loader.device.type == "cpu")


def _refuse_other_class(name: str, application_class: Any) -> None:
    from neuronx_distributed_inference.models.model_base import NeuronBaseForCausalLM

    if not isinstance(application_class, type) or not issubclass(application_class, NeuronBaseForCausalLM):
        raise TargetError(
            f"port {name} is no application of NxDI",
            expected="a subclass of NeuronBaseForCausalLM",
            found=getattr(application_class, "__name__", repr(application_class)),
            next_step="Name the class that a deployment compiles, such as NeuronMiniMaxM2ForCausalLM; a decoder layer "
            "runs with mm2-test sweep.",
        )


def _refuse_batch(batch: ModelBatch) -> None:
    """Refuse prompts that NxDI computes wrongly whatever the port."""
    if batch.first_position:
        raise TargetError(
            "NxDI takes a pass for a prefill by its position 0",
            found=f"positions from {batch.first_position} on",
            next_step="Give a golden whose prompts begin at position 0.",
        )
    if batch.num_prefilled < _LEAST_PREFILLED:
        raise TargetError(
            "NxDI finds a prompt's last token by the largest position, and gives padding the position 1",
            expected=f"at least {_LEAST_PREFILLED} tokens of each prompt in the prefill",
            found=str(batch.num_prefilled),
            next_step="Give --decode fewer tokens, or longer prompts.",
        )
