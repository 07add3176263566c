"""Passes of vLLM Neuron, and the other side of a comparison, as far as it tells how a dump is to be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from minimax_tools.model.sites import ModelSite, Site


@dataclass(frozen=True, kw_only=True)
class OtherSide:
    """A capture that holds its mask [B,S] and perhaps the embedding [B,S,H]."""

    mask: torch.Tensor
    embedding: torch.Tensor | None = None
    layers: tuple[int, ...] = ()

    def read_attention_mask(self) -> torch.Tensor:
        return self.mask

    def read_input_ids(self) -> None:
        """Hold no token ids."""

    def model_sites(self) -> tuple[ModelSite, ...]:
        return () if self.embedding is None else (ModelSite.EMBEDDING,)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        assert self.embedding is not None
        return self.embedding

    def entry(self, layer: int | None, site: Site | ModelSite) -> Any:
        return None if self.embedding is None else SimpleNamespace(shape=tuple(self.embedding.shape))


@pytest.fixture
def other_side() -> Callable[..., Any]:
    """Makes the other side."""
    return OtherSide


@pytest.fixture
def write_pass() -> Callable[..., None]:
    """Writes a pass of vLLM Neuron to its folder: each module's tensor, or those of its ranks."""

    def write(
        folder: Path,
        modules: Mapping[str, torch.Tensor | Sequence[torch.Tensor]],
        *,
        positions: Sequence[int],
        requests: Sequence[str] = ("0",),
    ) -> None:
        for module, held in modules.items():
            (folder / module).mkdir(parents=True)
            for rank, tensor in enumerate([held] if isinstance(held, torch.Tensor) else held):
                torch.save(tensor.clone(), folder / module / f"rank{rank}.pt")
        meta = {"req_ids": list(requests), "positions": list(positions)}
        (folder / f"{folder.name}_meta.json").write_text(json.dumps(meta))

    return write
