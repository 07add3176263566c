"""JoinedCapture: a dump of modules and the caches of the same run, read as one capture.

vLLM Neuron's debugger writes both below a prompt's folder, `tensor_compare/neuron` and `kv_analysis/vllm_kv.pt`. The
dump shows what each layer was fed, so the keys and values can be judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch

from minimax_tools.capture.listing import DumpListing
from minimax_tools.capture.source import CaptureSource
from minimax_tools.dumps.cache_capture import FILE
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers

# Folder of the dump below the folder with the caches.
MODULES_FOLDER = Path("tensor_compare", "neuron")


class JoinedCapture(CaptureSource):
    """A dump, with k_rope and v_proj as the caches hold them; `CaptureSource` describes its methods."""

    may_omit_inputs = True

    def __init__(self, directory: Path, dump: CaptureSource, caches: CaptureSource) -> None:
        self.directory = directory
        self.notes = (*dump.notes, *_notes(dump, caches))
        self.has_checked_tokens = dump.has_checked_tokens
        self._dump = dump
        self._caches = caches

    def laid_out_as(self, other: CaptureSource) -> CaptureSource:
        return JoinedCapture(self.directory, self._dump.laid_out_as(other), self._caches.laid_out_as(other))

    @property
    def layers(self) -> tuple[int, ...]:
        return self._dump.layers

    def sites(self, layer: int) -> tuple[Site, ...]:
        held = {*self._dump.sites(layer), *self._caches.sites(layer)}
        return tuple(site for site in Site if site in held)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        held = self.sites(layer)
        return tuple(site for site in Site if site not in held)

    def model_sites(self) -> tuple[ModelSite, ...]:
        return self._dump.model_sites()

    def read(self, layer: int, site: Site) -> torch.Tensor:
        # A module's values may be right, and written wrongly into the cache: the cache shows either mistake.
        source = self._caches if site in self._caches.sites(layer) else self._dump
        return source.read(layer, site)

    def read_model(self, site: ModelSite) -> torch.Tensor:
        return self._dump.read_model(site)

    def read_attention_mask(self) -> torch.Tensor | None:
        return self._dump.read_attention_mask()

    def read_input_ids(self) -> torch.Tensor | None:
        return self._dump.read_input_ids()

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        return self._dump.held_tokens(site)

    def listing(self) -> DumpListing | None:
        return self._dump.listing()


def _notes(dump: CaptureSource, caches: CaptureSource) -> Iterator[str]:
    yield f"k_rope and v_proj are read from {FILE}, whether modules return them or not"
    others = sorted(set(caches.layers) - set(dump.layers))
    if others:
        yield f"{FILE} holds {word_layers(others)} too, of which no module was captured: they are left out"
