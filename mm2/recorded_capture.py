"""RecordedCapture: a layer that ran in this process, as a capture that the judges of mm2 read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.proof import name_place
from minimax_tools.capture.recorder import shape_to_batch
from minimax_tools.capture.source import CaptureSource
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.errors import CaptureError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.run import Mode, Run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import Span
from mm2.golden_layer import GoldenLayer
from mm2.recording import Recording, backend_name


class RecordedCapture(CaptureSource):
    """A layer in memory; `CaptureSource` describes the methods.

    Args:
        tensors: The layer's values by site, on the CPU.
        name: Name of what ran; messages show it in the place of a folder.
        layer: Number of the layer.
        declared: Sites that the run is to be judged at; those without a tensor count as not exposed.
        golden: The layer of the golden that the run is to be compared with; None if there is no golden.
        backend: Backend that computed.
        num_parts: How often the module computed sites without a tensor, if in parts that do not add up.
    """

    digest_note = ""  # nothing was stored, so nothing can have changed since

    def __init__(
        self,
        tensors: Mapping[Site, torch.Tensor],
        *,
        name: str,
        layer: int,
        declared: tuple[Site, ...],
        golden: GoldenLayer | None,
        backend: str,
        num_parts: Mapping[Site, int] | None = None,
    ) -> None:
        self.directory = Path(name)
        self._tensors = dict(tensors)
        self._num_parts = dict(num_parts or {})
        self._layer = layer
        self._declared = declared
        self._golden = golden
        self._backend = backend

    @classmethod
    def of_tensor(cls, tensor: torch.Tensor, site: Site, *, golden: GoldenLayer) -> RecordedCapture:
        """Return one value of a run on a golden's input."""
        kept = shape_to_batch(site, tensor.detach().to("cpu"), golden.golden.inputs.batch_shape)
        return cls(
            {Site.INPUT: golden.input, site: kept},
            name="the tensor",
            layer=golden.number,
            declared=(Site.INPUT, site),
            golden=golden,
            backend=backend_name(tensor.device),
        )

    @classmethod
    def alone(cls, recording: Recording, *, name: str) -> RecordedCapture:
        """Return a recording that no golden belongs to, as the layer 0 of a run."""
        states = recording.tensors.get(Site.INPUT)
        tensors = dict(recording.tensors)
        if states is not None and states.ndim == 3:
            batch_shape = (states.shape[0], states.shape[1])
            tensors = {site: shape_to_batch(site, kept, batch_shape) for site, kept in tensors.items()}
        return cls(
            tensors,
            name=f"{name} ({recording.name})",
            layer=0,
            declared=recording.sites,
            golden=None,
            backend=recording.backend,
        )

    @classmethod
    def of(cls, recording: Recording, *, golden: GoldenLayer) -> RecordedCapture:
        """Return a recording as a run on a golden's input; sites of unlikely shapes count as not exposed."""
        tensors = {}
        for site in recording.sites:
            tensor = shape_to_batch(site, recording.tensors[site], golden.golden.inputs.batch_shape)
            # Another shape at a declared site is the port's fault. At a site found by name, the name misled.
            entry = golden.golden.capture.entry(golden.number, site)
            is_likely = entry is None or tuple(tensor.shape) == entry.shape
            if site in recording.exposure.declared or site is Site.INPUT or is_likely:
                tensors[site] = tensor
        return cls(
            tensors,
            name=recording.name,
            layer=golden.number,
            declared=tuple(site for site in Site if site in golden.sites or site in tensors),
            golden=golden,
            backend=recording.backend,
            num_parts=recording.num_parts,
        )

    @property
    def layers(self) -> tuple[int, ...]:
        """The layer that ran."""
        return (self._layer,)

    def sites(self, layer: int) -> tuple[Site, ...]:
        """Return the sites that hold a tensor."""
        return tuple(site for site in Site if site in self._tensors) if layer == self._layer else ()

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        """Return the declared sites without a tensor."""
        return tuple(site for site in self._declared if site not in self._tensors)

    def num_calls(self, layer: int) -> Mapping[Site, int]:
        """Return how often the module computed those of them that it computed in parts."""
        return self._num_parts

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Return a site's tensor."""
        if layer != self._layer or not isinstance(site, Site) or site not in self._tensors:
            raise CaptureError(f"{self.directory} holds no {name_place(site, layer)}")
        return self._tensors[site]

    def read_attention_mask(self) -> torch.Tensor | None:
        """Return the golden's mask, by which real tokens are told; None without a golden."""
        return None if self._golden is None else self._golden.attention_mask

    def read_kept_mask(self) -> torch.Tensor | None:
        """Return which tokens the golden keeps; None without a golden."""
        return None if self._golden is None else self._golden.golden.inputs.is_kept

    def read_inputs(self) -> Inputs:
        """Return the golden's batch."""
        if self._golden is None:
            raise self._undescribed()
        return self._golden.golden.inputs

    @property
    def known_description(self) -> Description | None:
        """The golden's description, as the run of one layer on its input; None without a golden."""
        if self._golden is None:
            return None
        golden = self._golden.golden.capture.description
        name, span = f"single_layer_{self._layer}", Span.single(self._layer)
        made = golden.provenance
        return replace(
            golden,
            side=DEVICE_SIDE,
            run=Run(name=name, span=span, mode=Mode.ISOLATED, sites=self._declared),
            # The golden's dtype stands for the port's: tensors in another dtype are told from it as they are judged.
            provenance=replace(made, backend=self._backend, target=str(self.directory), target_digest=""),
            input_source=f"hidden states that {self.directory} was called with",
        )

    @property
    def description(self) -> Description:
        """The golden's description, as the run of one layer on its input."""
        description = self.known_description
        if description is None:
            raise self._undescribed()
        return description
