"""The sites of the layers and of the model, copied to the CPU as the golden model computes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch

from gpu_reference.golden.expert_tokens import setting_expert_tokens
from minimax_tools.capture.recorder import copy_to_host, shape_to_batch
from minimax_tools.errors import GoldenRefusedError, install_command
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.reference.modules import recording_layer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_MODULES: Mapping[ModelSite, str] = MappingProxyType(
    {
        ModelSite.FINAL_NORM: "model.norm",
        ModelSite.LOGITS: "lm_head",
    }
)

# Called with a layer's number, its sites on the CPU ([B, S, …]; with heads [B, heads, S, D]), and the device that it
# ran on.
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
    """During the block, give the sites of each of `layers` to `sink` as soon as the layer has run, then drop them.

    The states of expert tokens are set at the input of each of these layers.

    Raises:
        GoldenRefusedError: A layer ran and did not show all of `sites`.
    """
    attn_implementation = str(model.config._attn_implementation)

    def record(number: int, stack: ExitStack) -> None:
        layer = model.get_submodule(f"model.layers.{number}")
        if inputs.expert_tokens is not None:
            stack.enter_context(setting_expert_tokens(layer, inputs))
        tensors = stack.enter_context(
            recording_layer(layer, sites=sites, attn_implementation=attn_implementation)
        )

        def hand_over(_: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
            _require_sites(number, sites, tensors)
            recorded = {
                site: shape_to_batch(site, tensors[site], inputs.batch_shape)
                for site in Site
                if site in tensors
            }
            sink(number, recorded, output.device)
            tensors.clear()

        # Hooks fire in the order in which they were registered: this one after those that record.
        stack.callback(layer.register_forward_hook(hand_over).remove)

    with ExitStack() as stack:
        for number in layers:
            record(number, stack)
        yield


@contextmanager
def recording_model(
    model: PreTrainedModel, sites: tuple[ModelSite, ...]
) -> Iterator[Mapping[ModelSite, torch.Tensor]]:
    """Record sites outside the layers during the block. A site is in the mapping once it has been computed."""
    tensors: dict[ModelSite, torch.Tensor] = {}

    def keep(site: ModelSite, _: torch.nn.Module, __: Any, output: torch.Tensor) -> None:
        tensors[site] = copy_to_host(output)

    with ExitStack() as stack:
        for site in sites:
            # The embedding is not recorded: it is the first layer's input.
            if site not in _MODULES:
                continue
            module = model.get_submodule(_MODULES[site])
            stack.callback(module.register_forward_hook(partial(keep, site)).remove)
        yield tensors


def _require_sites(number: int, sites: frozenset[Site], tensors: Mapping[Site, torch.Tensor]) -> None:
    missing = [str(site) for site in Site if site in sites and site not in tensors]
    if missing:
        raise GoldenRefusedError(
            f"layer {number} of transformers' model does not show {', '.join(missing)}",
            next_step=f"Install the transformers that mm2 knows: {install_command('golden')}",
        )
