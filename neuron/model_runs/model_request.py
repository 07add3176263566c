"""ModelRequest: a run of a whole port before it starts; RankJoin: what all ranks recorded of a pass, joined.

B prompts, s columns of a pass, P entries of the cache, K kv heads, D head_dim.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from minimax_tools.capture.passes import CachePair
from minimax_tools.capture.reader import Capture
from minimax_tools.capture.recorder import (
    Recorder,
    join_calls,
    puts_tokens_first,
    shape_to_batch,
    with_signed,
)
from minimax_tools.errors import TargetError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Run
from minimax_tools.model.site_layouts import Replicated, are_equal_bits
from minimax_tools.model.sites import ModelSite, Site, parse_site
from neuron.devices.runtime import Runtime, calls_to_host
from neuron.model_runs.passes import Pass, plan_passes
from neuron.ports.exposure import ModelExposure
from neuron.ports.returned import ModelResult, read_cache
from neuron.runs.executor import RankAssembly
from neuron.runs.port_setup import ModelSetup


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRequest(ModelSetup):
    """A run of a whole port before it starts."""

    run: Run
    inputs: Inputs  # the token rows: prompts and their continuation
    golden: Capture | None = None  # None for a run that is not judged
    max_new_tokens: int = 1  # most tokens to generate freely after each row
    runs_chunks: bool = True  # whether to run the rows in chunks too

    def plan_passes(self, num_decoded: int) -> list[Pass]:
        """Plan the prefill and `num_decoded` steps, each row padded as the port takes it (see `passes.plan_passes`)."""
        return plan_passes(self.inputs, num_decoded, pads_right=self.target.pads_right)


class RankJoin:
    """Joins the tensors of all ranks, which all call it; `recorders` are those of the layers, in their order.

    Attributes:
        num_calls: By layer, how often a pass computed sites whose parts do not add up to it; they are left out.
        tokens_first: Sites with heads that some pass showed as [B,s,heads,D]: so are those of a pass that has as many
            tokens as heads, which its shape does not tell.
    """

    def __init__(
        self,
        setup: ModelSetup,
        *,
        runtime: Runtime,
        exposure: ModelExposure,
        recorders: Sequence[Recorder[Site]],
        model_recorder: Recorder[ModelSite],
    ) -> None:
        self._setup = setup
        self._runtime = runtime
        self._exposure = exposure
        self._recorders = recorders
        self._model_recorder = model_recorder
        self._what = f"port {setup.target.name}"
        self.num_calls: dict[int, dict[Site, int]] = {}
        self.tokens_first: set[Site] = set()

    def join_logits(self, logits: torch.Tensor) -> torch.Tensor | None:
        """Return the lead's logits, on the CPU; None on other ranks, whose own may be a part or nothing."""
        return logits.to("cpu") if self._runtime.ranks.is_lead else None

    def join_sites(
        self, result: ModelResult, batch_shape: tuple[int, int]
    ) -> tuple[dict[int, dict[Site, torch.Tensor]], dict[ModelSite, torch.Tensor]]:
        """Return the recorded and returned sites of all ranks, on the CPU of the lead."""
        layers: dict[int, dict[Site, torch.Tensor]] = {}
        # A port may pad each pass to a bucket of its own, on the right.
        batch_size, num_columns = batch_shape
        padded_shape = (batch_size, self._count_columns(result, batch_shape))
        spec = self._setup.spec
        for index, recorder in enumerate(self._recorders):
            exposure = self._exposure.exposures[index]
            what = f"{self._what}, layer {index}"
            assembly = RankAssembly(
                runtime=self._runtime,
                exposure=exposure,
                batch_shape=padded_shape,
                head_dim=spec.head_dim,
                what=what,
            )
            calls = calls_to_host(recorder.calls())
            pieces = join_calls(calls, padded_shape)
            self._note_forms(pieces, padded_shape)
            for site in self._setup.sites:
                if site in calls and site not in pieces:
                    self.num_calls.setdefault(index, {})[site] = len(calls[site].tensors)
                tensor = assembly.join(site, pieces.get(site))
                if tensor is not None and exposure.accepts(site, tensor, spec, padded_shape):
                    layers.setdefault(index, {})[site] = _first_columns(tensor, num_columns, site)
        model: dict[ModelSite, torch.Tensor] = {}
        for model_site in self._exposure.taps:
            piece = self._model_recorder.tensors.get(model_site)
            of_ranks = self._runtime.messages.gather(None if piece is None else piece.to("cpu"))
            if of_ranks and of_ranks[0] is not None:
                whole = _unflattened(of_ranks[0], batch_size)
                model[model_site] = _first_columns(whole, num_columns, model_site)
        for name, tensor in result.sites.items():
            layer, returned = _parse_returned(name)
            whole = with_signed(tensor.to("cpu"))
            if isinstance(returned, ModelSite):
                model[returned] = _first_columns(_unflattened(whole, batch_size), num_columns, returned)
            elif returned in self._setup.sites:
                self._note_forms({returned: whole}, padded_shape)
                shaped = shape_to_batch(returned, whole, padded_shape, head_dim=spec.head_dim)
                layers.setdefault(layer, {})[returned] = _first_columns(shaped, num_columns, returned)
        return layers, model

    def _note_forms(self, tensors: Mapping[Site, torch.Tensor], batch_shape: tuple[int, int]) -> None:
        self.tokens_first |= {
            site
            for site, tensor in tensors.items()
            if site.has_heads_dim and puts_tokens_first(tensor, batch_shape[1])
        }

    def _count_columns(self, result: ModelResult, batch_shape: tuple[int, int]) -> int:
        """Return the number of columns that the port computes in a pass over [B,s]: s, or those of its bucket."""
        batch_size, num_columns = batch_shape
        hidden_size = self._setup.spec.hidden_size
        recorded = (
            sum(call.numel() for call in recorder.calls()[site].tensors)
            for recorder in self._recorders
            for site in (Site.INPUT, Site.OUTPUT)
            if site in recorder.tensors and recorder.tensors[site].shape[-1] == hidden_size
        )
        returned = (
            tensor.numel()
            for name, tensor in result.sites.items()
            if name.endswith(f".{Site.OUTPUT}") and tensor.shape[-1] == hidden_size
        )
        num_numbers = next(chain(recorded, returned), 0)
        return max(num_numbers // (batch_size * hidden_size), num_columns)

    def join_cache(self, module: nn.Module, past: object) -> list[CachePair] | None:
        """Return keys and values of all kv heads by layer, on the CPU of the lead; None if they cannot be read."""
        cache = read_cache(module, past, num_layers=self._setup.spec.num_hidden_layers)
        own: list[CachePair] | None = None
        if cache is not None:
            own = [(keys.to("cpu", copy=True), values.to("cpu", copy=True)) for keys, values in cache]
        of_ranks = [pairs for pairs in self._runtime.messages.gather(own) if pairs is not None]
        if len(of_ranks) < self._runtime.ranks.degree:
            return None
        return [
            (
                self._join_heads([pairs[layer][0] for pairs in of_ranks], layer=layer),
                self._join_heads([pairs[layer][1] for pairs in of_ranks], layer=layer),
            )
            for layer in range(self._setup.spec.num_hidden_layers)
        ]

    def _join_heads(self, pieces: list[torch.Tensor], *, layer: int) -> torch.Tensor:
        layout = self._exposure.cache_layout
        if layout is None and self._exposure.exposures:
            # Cached keys are divided as the keys are.
            layout = self._exposure.exposures[layer].layouts.get(Site.K_ROPE)
        if len(pieces) == 1:
            return pieces[0]
        if layout is None:
            if all(are_equal_bits(pieces[0], piece) for piece in pieces[1:]):
                return pieces[0]
            raise TargetError(
                f"{self._what}: which kv heads of the cache a rank holds cannot be told",
                expected="a layout, such as sites = {'cache': '@shard(1)'}",
                next_step="Name it in the port's `sites`.",
            )
        return (layout or Replicated()).assemble(pieces, what=f"{self._what}, cache of layer {layer}")


def _first_columns(tensor: torch.Tensor, num_columns: int, site: Site | ModelSite) -> torch.Tensor:
    """Return the first columns of a site's tensor [B,columns,…] or [B,N,columns,D], and of another shape all of it."""
    dim = 2 if site.has_heads_dim else 1
    return tensor.narrow(dim, 0, min(num_columns, tensor.shape[dim])) if tensor.ndim > dim else tensor


def _unflattened(tensor: torch.Tensor, batch_size: int) -> torch.Tensor:
    is_flat = tensor.ndim == 2 and tensor.shape[0] % batch_size == 0
    return tensor.unflatten(0, (batch_size, -1)) if is_flat else tensor


def _parse_returned(name: str) -> tuple[int, Site | ModelSite]:
    """Read the name of a site that a compiled port returned: `layer_3.output`, or `final_norm`, with -1 for a layer."""
    prefix, _, short = name.partition(".")
    number = prefix.removeprefix("layer_")
    if short and number != prefix and number.isdecimal():
        return int(number), parse_site(short)
    try:
        return -1, ModelSite(name)
    except ValueError:
        raise TargetError(
            f"the port returned the site {name!r}, which mm2 does not know",
            expected="layer_N.SITE, embedding or final_norm",
            next_step="Rename it in what the port returns as `sites`.",
        ) from None
