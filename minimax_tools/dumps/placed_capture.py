"""PlacedCapture: a capture of another tool, whose sites have places in its files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Generic, TypeVar

from minimax_tools.capture.source import CaptureSource
from minimax_tools.model.sites import ModelSite, Site

# A site of a layer, or a site or name outside the layers if the layer is None.
SiteKey = tuple["int | None", "Site | ModelSite | str"]
PlaceT = TypeVar("PlaceT")


class PlacedCapture(CaptureSource, Generic[PlaceT]):
    """A capture without a noise floor that knows the place of each site; `CaptureSource` describes its methods."""

    def __init__(self, directory: Path, places: Mapping[SiteKey, PlaceT]) -> None:
        self.directory = directory
        self._places = places

    @property
    def layers(self) -> tuple[int, ...]:
        return tuple(sorted({layer for layer, _ in self._places if layer is not None}))

    def sites(self, layer: int) -> tuple[Site, ...]:
        return tuple(site for site in Site if self._find(layer, site) is not None)

    def model_sites(self) -> tuple[ModelSite, ...]:
        return tuple(site for site in ModelSite if (None, site) in self._places)

    def _find(self, layer: int | None, site: Site | ModelSite) -> PlaceT | None:
        place = self._places.get((layer, site))
        if place is not None or layer is None or site is not Site.INPUT:
            return place
        # A layer's input is also the output of the layer before, or of the embedding.
        return self._places.get((None, ModelSite.EMBEDDING) if layer == 0 else (layer - 1, Site.OUTPUT))
