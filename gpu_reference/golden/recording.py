"""Recording: the layers' sites, and the model's own, copied to the CPU as the golden model computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.capture.recorder import copy_to_host, shape_to_batch
from minimax_tools.errors import GoldenRefusedError, install_command
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.modules import recording_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODULES: Mapping[ModelSite, str] = MappingProxyType(
    {
        ModelSite.EMBEDDING: "model.embed_tokens",
        ModelSite.FINAL_NORM: "model.norm",
        ModelSite.LOGITS: "lm_head",
    }
)

# Receives a layer's number, its sites on the CPU, and the device that it ran on.
LayerSink = Callable[[int, Mapping[Site, torch.Tensor], torch.device], None]


@contextmanager
def recording_layers(
    model: PreTrainedModel,
    layers: tuple[int, ...],
    *,
    sites: frozenset[Site],
    inputs: Inputs,
    sink: LayerSink,
) -> Iterator[None]:
    """Hand each of `layers` to `sink` as soon as it has run; a layer's tensors are dropped after that.

    Raises:
        GoldenRefusedError: A layer ran and did not show all of `sites`.
    """
    with ExitStack() as stack:
        for number in layers:
            layer = model.get_submodule(f"model.layers.{number}")
            attn_implementation = str(model.config._attn_implementation)
            tensors = stack.enter_context(
                recording_layer(layer, sites=sites, attn_implementation=attn_implementation)
            )
            # Hooks fire in the order they were made: this one after those that record.
            handle = layer.register_forward_hook(_handing_over(number, tensors, sites, inputs, sink))
            stack.callback(handle.remove)
        yield


@contextmanager
def recording_model(
    model: PreTrainedModel, sites: tuple[ModelSite, ...]
) -> Iterator[Mapping[ModelSite, torch.Tensor]]:
    """Record sites outside the layers while the block lasts; a site appears when it is computed."""
    tensors: dict[ModelSite, torch.Tensor] = {}

    def keep(site: ModelSite) -> Callable[..., None]:
        def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            tensors[site] = copy_to_host(output)

        return hook

    with ExitStack() as stack:
        for site in sites:
            stack.callback(model.get_submodule(_MODULES[site]).register_forward_hook(keep(site)).remove)
        yield tensors


def _handing_over(
    number: int, tensors: dict[Site, torch.Tensor], sites: frozenset[Site], inputs: Inputs, sink: LayerSink
) -> Callable[..., None]:
    def hook(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        missing = [str(site) for site in Site if site in sites and site not in tensors]
        if missing:
            raise GoldenRefusedError(
                f"layer {number} of transformers' model does not show {', '.join(missing)}",
                next_step=f"Install the transformers that mm2 knows: {install_command('golden')}",
            )
        sink(
            number,
            {
                site: shape_to_batch(site, tensors[site], inputs.batch_shape)
                for site in Site
                if site in tensors
            },
            output.device,
        )
        tensors.clear()

    return hook
