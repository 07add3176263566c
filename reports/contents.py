"""Contents: the sites in a capture, layer by layer, with the statistics of every tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import torch

from minimax_tools.capture.digests import dtype_name
from minimax_tools.capture.manifest import Entry
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import CaptureError
from minimax_tools.metrics.tensor_statistics import TensorStatistics, measure_tensor
from minimax_tools.model.sites import ModelSite, Site


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteContents:
    """A site's tensor: its shape, dtype and statistics."""

    site: str
    shape: tuple[int, ...]
    dtype: str
    statistics: TensorStatistics

    @property
    def num_nonfinite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.statistics.num_nan + self.statistics.num_inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContents:
    """Contents of a layer, or of the model outside its layers if `layer` is None."""

    layer: int | None
    sites: tuple[SiteContents, ...]  # its sites, in execution order
    not_exposed: tuple[str, ...] = ()  # sites that the run asked for and the port does not expose
    further: tuple[SiteContents, ...] = ()  # further outputs of the port, named as it was asked for them


def read_contents(source: CaptureSource) -> tuple[LayerContents, ...]:
    """Return the contents of a capture: its layers ascending, then the sites outside them.

    Statistics come from the manifest. Those of further outputs are computed, and without a manifest all, with one
    tensor in memory at a time. Further outputs that cannot be read are left out: the capture's inspection names them.

    Raises:
        CaptureError: A tensor cannot be read.
    """
    layers = [
        LayerContents(
            layer=layer,
            sites=tuple(
                _read_site(site, source.entry(layer, site), partial(source.read, layer, site))
                for site in source.sites(layer)
            ),
            not_exposed=tuple(str(site) for site in source.not_exposed(layer)),
            further=tuple(_read_further(source, layer)),
        )
        for layer in source.layers
    ]
    model = tuple(
        _read_site(site, source.entry(None, site), partial(source.read_model, site))
        for site in source.model_sites()
    )
    return (*layers, LayerContents(layer=None, sites=model)) if model else tuple(layers)


def measure_contents(layers: Mapping[int, Mapping[Site, torch.Tensor]]) -> tuple[LayerContents, ...]:
    """Return the contents of a run that was not saved, from its CPU tensors by layer and site."""
    return tuple(
        LayerContents(
            layer=layer,
            sites=tuple(
                _measure_site(str(site), layers[layer][site])
                for site in sorted(layers[layer], key=lambda site: site.order)
            ),
        )
        for layer in sorted(layers)
    )


def _read_further(source: CaptureSource, layer: int) -> Iterator[SiteContents]:
    for name in source.further(layer):
        with suppress(CaptureError):
            yield _measure_site(name, source.read_further(layer, name))


def _read_site(site: Site | ModelSite, entry: Entry | None, read: Callable[[], torch.Tensor]) -> SiteContents:
    if entry is None:
        return _measure_site(str(site), read())
    # A layer's input may be stored as the output of the layer before, so its entry may have another name.
    return SiteContents(site=str(site), shape=entry.shape, dtype=entry.dtype, statistics=entry.statistics)


def _measure_site(site: str, tensor: torch.Tensor) -> SiteContents:
    return SiteContents(
        site=site,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        statistics=measure_tensor(tensor),
    )
