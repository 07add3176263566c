"""RankAssembly: what the ranks recorded of a layer, put together on the lead; alone, what was recorded."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from minimax_tools.errors import TargetError
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from neuron.builtin.layer import KeyValues
from neuron.devices.runtime import Runtime
from neuron.ports.exposure import Exposure
from neuron.runs.layer_input import LayerInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssembly:
    """One pass of a layer, as its ranks share it; all of them make the same calls in the same order.

    Args:
        runtime: The ranks.
        exposure: What the port shows, and how its pieces make it up.
        spec: The model.
        batch_shape: B and S.
        what: Target and layer, for errors.
    """

    runtime: Runtime
    exposure: Exposure
    spec: ModelSpec
    batch_shape: tuple[int, int]
    what: str

    def own(self, given: LayerInput) -> LayerInput:
        """The pass as this rank is fed it: of the past, the heads that it holds.

        Raises:
            TargetError: Which these are cannot be told.
        """
        if given.past is None:
            return given
        keys, values = (self.cut(Site.K_ROPE, tensor) for tensor in given.past)
        return replace(given, past=(keys, values))

    def cut(self, site: Site, tensor: torch.Tensor) -> torch.Tensor:
        """What this rank holds of a site's logical tensor.

        Raises:
            TargetError: It cannot be told.
        """
        return self.exposure.cut(site, tensor, ranks=self.runtime.ranks, what=f"{self.what}, {site}")

    def join(self, site: Site, piece: torch.Tensor | None, *, name: str = "") -> torch.Tensor | None:
        """A site's logical tensor; None where no rank shows it, where it cannot be told, and on others than the lead.

        Args:
            site: The site.
            piece: What this rank recorded; None where nothing passed there.
            name: What it is, where that is not the site.

        Raises:
            TargetError: The ranks' pieces do not make up a tensor.
        """
        pieces = self.runtime.messages.gather(piece)
        missing = [rank for rank, found in enumerate(pieces) if found is None]
        if len(missing) == len(pieces):
            return None
        what = f"{self.what}, {name or site}"
        if missing:
            raise TargetError(
                f"{what} shows on some ranks and not on others",
                expected="a tensor on every rank",
                found=f"none on {', '.join(f'rank {rank}' for rank in missing)}",
                next_step="Every rank must call the same submodules.",
            )
        return self.exposure.assemble(site, pieces, self.spec, self.batch_shape, what=what)

    def join_past(self, key_values: KeyValues) -> KeyValues | None:
        """Keys and values of all heads, on the CPU; None on others than the lead.

        Raises:
            TargetError: The ranks' pieces do not make up a tensor.
        """
        keys, values = (
            self.join(Site.K_ROPE, tensor.to("cpu"), name=name)
            for name, tensor in zip(("keys of the past", "values of the past"), key_values, strict=True)
        )
        return None if keys is None or values is None else (keys, values)
