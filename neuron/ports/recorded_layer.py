"""RecordedLayer: a port's layer that returns its sites and further outputs, so that a compiler keeps them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.further import FurtherPlace, FurtherRecorder
from minimax_tools.capture.recorder import Calls, Recorder, copy_on_device
from minimax_tools.capture.taps import Tap
from minimax_tools.model.sites import Site


class RecordedLayer(nn.Module):
    """A port's layer, called with values that replace its own at some sites, and then as the layer itself.

    Its hooks are in place in `with layer.recorder, layer.further:`. torch.compile takes them into the graph: a
    site becomes an output of it, and a value that replaces one an input.
    """

    def __init__(
        self, layer: nn.Module, taps: Mapping[Site, Tap], further: tuple[FurtherPlace, ...] = ()
    ) -> None:
        super().__init__()
        self.layer = layer
        self.recorder: Recorder[Site] = Recorder(layer, taps, keep=copy_on_device)
        self.further = FurtherRecorder(layer, further, keep=copy_on_device)
        # The graph of another layer is taken only if this is equal: torch.compile does not look at hooks.
        self.places = tuple((site, str(tap)) for site, tap in taps.items())
        self.further_places = tuple(map(str, further))

    def forward(
        self, feeds: Mapping[Site, torch.Tensor], *arguments: object, **keywords: object
    ) -> tuple[Any, dict[Site, Calls], dict[str, torch.Tensor]]:
        """Return what the layer returns, copies of the tensors at each site that it reached, and further outputs."""
        self.recorder.start(feeds)
        self.further.start()
        result = self.layer(*arguments, **keywords)
        calls = self.recorder.calls()
        sites = {site: calls[site] for site, _ in self.places if site in calls}
        return result, sites, dict(self.further.tensors)
