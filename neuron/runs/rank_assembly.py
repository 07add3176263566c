"""RankAssembly: cuts tensors for the ranks that share a layer, and joins their pieces on the lead."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from minimax_tools.capture.further import FurtherPlace, names_place
from minimax_tools.errors import TargetError
from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues
from neuron.devices.runtime import Runtime
from neuron.ports.exposure import Exposure
from neuron.runs.layer_run import LayerInput


@dataclass(frozen=True, slots=True, kw_only=True)
class RankAssembly:
    """A forward pass of a layer that ranks share: each rank holds a piece of every tensor.

    All ranks make the same calls in the same order. On a single rank, the piece is the whole tensor.
    """

    runtime: Runtime
    exposure: Exposure  # the sites that the port exposes, and how each site's pieces make up the whole
    batch_shape: tuple[int, int]  # number of prompts, and tokens of each in this pass
    head_dim: int
    what: str  # target and layer, for errors

    def cut_past(self, layer_input: LayerInput) -> LayerInput:
        """Cut the past down to the heads that this rank holds.

        Raises:
            TargetError: The port does not say which heads a rank holds.
        """
        if layer_input.past is None:
            return layer_input
        # Values are divided among the ranks as keys are; keys have the layout of the site `k_rope`.
        keys, values = (self.cut(Site.K_ROPE, tensor) for tensor in layer_input.past)
        return replace(layer_input, past=(keys, values))

    def cut(self, site: Site, tensor: torch.Tensor) -> torch.Tensor:
        """Cut this rank's piece out of a site's whole tensor.

        Raises:
            TargetError: The port does not say how the site is divided.
        """
        return self.exposure.cut(site, tensor, ranks=self.runtime.ranks, what=f"{self.what}, {site}")

    def join(self, site: Site, piece: torch.Tensor | None, *, name: str = "") -> torch.Tensor | None:
        """Join the ranks' pieces of a site.

        Args:
            site: The site whose layout over ranks the tensor has.
            piece: This rank's piece, on the CPU; None if nothing was recorded.
            name: Name of the tensor in errors, if it is not the site.

        Returns:
            The whole tensor on the lead. None on other ranks, if no rank shows the site, and if its layout is unknown.

        Raises:
            TargetError: The pieces do not make up a tensor.
        """
        # Only the lead gets pieces; on other ranks the list is empty.
        pieces = self.runtime.messages.gather(piece)
        missing = [rank for rank, rank_piece in enumerate(pieces) if rank_piece is None]
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
        return self.exposure.assemble(site, pieces, self.batch_shape, head_dim=self.head_dim, what=what)

    def join_further(
        self, places: Sequence[FurtherPlace], tensors: Mapping[str, torch.Tensor]
    ) -> dict[str, torch.Tensor]:
        """Join the ranks' further outputs, by name and on the CPU; {} on ranks other than the lead.

        Raises:
            TargetError: Pieces contradict the layout that their place names.
        """
        if not places:
            return {}
        pieces = self.runtime.messages.gather({name: tensor.to("cpu") for name, tensor in tensors.items()})
        joined: dict[str, torch.Tensor] = {}
        for place in places if pieces else ():
            of_place = [
                {name: tensor for name, tensor in piece.items() if names_place(name, place)}
                for piece in pieces
            ]
            joined |= place.join(of_place, what=self.what)
        return joined

    def join_past(self, key_values: KeyValues) -> KeyValues | None:
        """Join keys and values of all heads, on the CPU; None on ranks other than the lead.

        Raises:
            TargetError: The pieces do not make up a tensor.
        """
        keys = self.join(Site.K_ROPE, key_values[0].to("cpu"), name="keys of the past")
        values = self.join(Site.K_ROPE, key_values[1].to("cpu"), name="values of the past")
        return None if keys is None or values is None else (keys, values)
