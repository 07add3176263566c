"""Whole ports on neuronx-distributed-inference: `--target nxdi:package.module:CLASS` of `mm2-test model`.

CLASS is a subclass of NxDI's NeuronBaseForCausalLM. On the CPU its sites are recorded by hooks, with NXD_CPU_MODE=1. On
Neuron, and where the port's options set a `tensor_capture_config`, they are read from NxDI's own tensor capture.
Ports choose modules by the device that they are built for: `ModelClasses` tells what a run on the CPU says nothing of.
B prompts, S columns of the pass.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.passes import CachePair
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.machine.native_output import output_set_aside
from minimax_tools.model.site_layouts import Sharded
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from neuron.devices.ranks import Ranks
from neuron.devices.weights import WeightLoader
from neuron.ports.exposure import CACHE, LAYERS
from neuron.ports.nxdi import LAYER, PREFIX, find_sites, require_nxdi
from neuron.ports.nxdi_config import read_options
from neuron.ports.nxdi_layout import NxdiLayout
from neuron.ports.nxdi_loaded import LoadedApplication, ReplacedStream, read_captured
from neuron.ports.nxdi_settings import NxdiSettings
from neuron.ports.returned import REPLACE_STREAM, ModelResult
from neuron.ports.sources import import_behind
from neuron.ports.target import ModelBatch, ModelTarget, port_errors

# Attribute of a port that holds its `ModelClasses`.
CLASSES = "classes"
# Variables by which the CPU stands for the device, in NxD and in the vLLM Neuron plugin.
_CPU_MODES = ("NXD_CPU_MODE", "VLLM_NEURON_CPU_MODE")
# The number of a layer in the path of a submodule.
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)(?:\.|$)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelClasses:
    """Classes of the submodules of the first layer and around the layers, by path; a missing submodule has none, ''."""

    here: Mapping[str, str]
    # Class here and on the other device, where they differ; None if the module tree cannot be built for it here
    other: Mapping[str, tuple[str, str]] | None

    @classmethod
    def compare(cls, here: nn.Module, there: nn.Module | None) -> ModelClasses:
        """Compare a model's module with the same built for the other device; None if it cannot be built."""
        own = _read(here)
        if there is None:
            return cls(here=own, other=None)
        others = _read(there)
        return cls(
            here=own,
            other={
                path: (own.get(path, ""), others.get(path, ""))
                for path in dict.fromkeys((*own, *others))
                if own.get(path) != others.get(path)
            },
        )


def is_cpu_mode() -> bool:
    """Decide whether the environment says that the CPU stands for the device."""
    return any(os.environ.get(name) == "1" for name in _CPU_MODES)


@contextmanager
def for_the_device() -> Iterator[None]:
    """Let what is built in the block be built as for the device, without memory."""
    before = {name: value for name in _CPU_MODES if (value := os.environ.get(name)) is not None}
    os.environ.update(dict.fromkeys(before, "0"))
    try:
        with torch.device("meta"):
            yield
    finally:
        os.environ.update(before)


def _read(module: nn.Module) -> dict[str, str]:
    return {
        path: type(submodule).__name__
        for path, submodule in module.named_modules()
        if path and ((found := _LAYER.search(path)) is None or found[1] == "0")
    }


_LOAD_STEP = "NxDI loads it by the class's own conversion; see --debug for the traceback."
# Tokens of the shortest prompt in a prefill.
_LEAST_PREFILLED = 2


class NxdiModel(nn.Module):
    """An application of NxDI behind the protocol of a whole port; `open` loads it."""

    keeps_cache = True
    # NxDI has a graph for prefills from position 0, and one for single tokens.
    takes_chunks = False

    def __init__(self, settings: NxdiSettings) -> None:
        super().__init__()
        self._settings = settings
        self._application: LoadedApplication | None = None
        self.sites: dict[str, str] = {}
        self.classes: ModelClasses | None = None  # None if the module tree cannot be seen
        self._replaced: ReplacedStream | None = None
        if settings.batch.replaces_stream:
            # Only then does the graph take another stream.
            setattr(self, REPLACE_STREAM, self._replace_stream)

    def open(self, folder: Path, spec: ModelSpec, *, is_on_cpu: bool) -> None:
        """Build the application and load the checkpoint in `folder`."""
        settings = replace(self._settings, is_on_cpu=is_on_cpu)
        self._application = LoadedApplication.open(settings, folder)
        module = self._application.module
        if module is None:
            return
        self.classes = ModelClasses.compare(module, self._application.build_for_device())
        if self._application.captures:
            # As on a device: the capture alone shows the sites.
            return
        self.model = module
        ranks = settings.ranks
        layout = NxdiLayout(spec=spec, tp_degree=ranks.degree, rank=ranks.rank)
        self.sites = {
            LAYERS: "model.layers",
            str(ModelSite.EMBEDDING): "model.embed_tokens",
            str(ModelSite.FINAL_NORM): "model.norm",
            **_show_sites(module.get_submodule("layers"), layout),
        }
        if ranks.are_several:
            self.sites[CACHE] = str(Sharded(dim=1, blocks=layout.heads.all_kv_heads()))

    def forward(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor, position_ids: torch.Tensor
    ) -> ModelResult:
        """Run a pass of token ids [B,S]; the mask [B,P+S] of 0/1 has the columns of earlier passes first.

        A pass without earlier columns is a prefill.
        """
        application = self._opened
        with tempfile.TemporaryDirectory(prefix="mm2_nxdi_") as folder:
            captured = Path(folder)
            if attention_mask.shape[1] == input_ids.shape[1]:
                output = application.prefill(
                    input_ids, attention_mask, position_ids, captured=captured, replaced=self._replaced
                )
            else:
                output = application.decode(
                    input_ids, position_ids, captured=captured, replaced=self._replaced
                )
            sites = {}
            if application.captures and self._settings.ranks.is_lead:
                batch_size, num_columns = input_ids.shape
                sites = read_captured(
                    captured, batch_shape=(batch_size, num_columns), num_ranks=application.num_ranks
                )
        return ModelResult(logits=self._as_computed(output.logits), tokens=output.tokens, sites=sites)

    def _as_computed(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits in the run's dtype if it holds them: NxDI widens what the head computed to float32."""
        narrow = logits.to(self._settings.dtype)
        vocabulary = slice(self._settings.config.vocab_size)
        is_exact = torch.equal(narrow[..., vocabulary].to(logits.dtype), logits[..., vocabulary])
        return narrow if is_exact else logits

    def _replace_stream(self, point: int | None, states: torch.Tensor | None) -> None:
        self._replaced = None if point is None or states is None else (point, states)

    def read_cache(self, _: object) -> list[CachePair] | None:
        """Return this rank's keys and values by layer; None on a device, where NxDI keeps them."""
        return self._opened.read_cache()

    @property
    def _opened(self) -> LoadedApplication:
        assert self._application is not None, "the port is loaded before it runs"
        return self._application


@dataclass(frozen=True, kw_only=True)
class NxdiModelTarget(ModelTarget):
    """An application on neuronx-distributed-inference."""

    forms = f"{PREFIX}PATH.py:CLASS or {PREFIX}package.module:CLASS"
    pads_right = True

    application_class: Any
    module: ModuleType  # the module that defines it

    @classmethod
    def find(cls, name: str) -> NxdiModelTarget | None:
        """Import the class behind `nxdi:`, if NxDI is installed."""
        if not name.startswith(PREFIX):
            return None
        require_nxdi()
        source, application_class = import_behind(PREFIX, name, forms=cls.forms)
        _refuse_other_class(name, application_class)
        return cls(
            name=name,
            application_class=application_class,
            module=source.module,
            source_digest=source.digest(),
        )

    @property
    def port_config(self) -> Mapping[str, Any]:
        """The options of module and class, of which those of the class come last."""
        return read_options(self.application_class, self.module)

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
                application_class=self.application_class,
                module=self.module,
                config=config,
                dtype=torch.get_default_dtype(),  # `build` sets it to the run's dtype
                is_on_cpu=True,
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


def _show_sites(layers: nn.Module, layout: NxdiLayout) -> dict[str, str]:
    """Return the sites of a layer, relative to it; each layer gets the modules that show what NxD holds otherwise."""
    sites: dict[str, str] = {}
    for layer in layers.children():
        holder = nn.Module()
        holder.add_module(LAYER, layer)
        found = find_sites(holder, layout)
        for name, shown in holder.named_children():
            if shown is not layer:
                layer.add_module(name, shown)
        sites = {site: path.removeprefix(f"{LAYER}.") for site, path in found.items()}
    return sites


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
