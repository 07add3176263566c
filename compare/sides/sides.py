"""Sides: the two captures of a comparison, their real tokens (`Batch`; padding is never judged), and their criteria.

B prompts, S columns, w columns of a pass, T real tokens, F channels. `rows` are tokens, not the glossary's sequences.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch

from compare.limits.criteria import Criteria
from compare.limits.limits import LimitContext, backend_of, computes_in_float32
from compare.sides.golden_weights import WeightSource
from compare.sides.pairing import find_mismatch
from minimax_tools.capture.passes import ModelPasses
from minimax_tools.capture.source import CaptureSource
from minimax_tools.errors import IncomparableError
from minimax_tools.metrics.noise_floor import token_rows
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import ModelSite, Site


class Batch:
    """The real tokens of a batch.

    Args:
        mask: [B,S], true on real tokens; None if neither side keeps it, so that every token counts as real.

    Raises:
        IncomparableError: No token is real.
    """

    def __init__(self, mask: torch.Tensor | None) -> None:
        if mask is not None and not bool(mask.any()):
            raise IncomparableError("no token is real: the attention mask is 0 everywhere")
        self._mask = None if mask is None else mask.bool()
        # Numbers of the real tokens; None if all are real, and none need be copied.
        self._real = None if mask is None or bool(mask.all()) else mask.flatten().nonzero().squeeze(-1)

    @classmethod
    def of(cls, reference: CaptureSource, target: CaptureSource) -> Batch:
        """Return the batch that two captures have in common.

        Raises:
            IncomparableError: Their masks differ, or no token is real.
        """
        golden, port = reference.read_attention_mask(), target.read_attention_mask()
        if golden is not None and port is not None and not torch.equal(golden.bool(), port.bool()):
            raise IncomparableError(
                "the captures have different inputs: attention_mask differs",
                expected=f"rows of {_lengths(golden)} tokens (golden)",
                found=_lengths(port),
            )
        kept = reference.read_kept_mask()
        return cls(port if kept is None else kept)

    def rows(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Return the real tokens [T,F] of a site's tensor, which is [B,S,…] or [B·S,F].

        Raises:
            IncomparableError: The tensor is of another batch.
        """
        return self.tokens(self._laid_out(tensor, site))

    def tokens(self, statistic: torch.Tensor) -> torch.Tensor:
        """Select the real tokens, [T,…], of [B,S,…].

        Raises:
            IncomparableError: The tensor is of another batch.
        """
        if self._mask is None:
            return statistic.flatten(0, 1)
        if statistic.shape[:2] != self._mask.shape:
            raise IncomparableError(
                "a tensor and the attention mask are of different batches",
                expected=f"[B,S] of {tuple(self._mask.shape)}",
                found=str(tuple(statistic.shape[:2])),
                next_step="Capture again: nothing tells which of its tokens are real.",
            )
        tokens = statistic.flatten(0, 1)
        return tokens if self._real is None else tokens.index_select(0, self._real)

    def places(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Return prompt (0 to B-1) and index in S of every real token of a site's tensor, [T,2]."""
        if self._mask is not None:
            return self._mask.nonzero()
        return torch.ones(self._laid_out(tensor, site).shape[:2]).nonzero()

    def _laid_out(self, tensor: torch.Tensor, site: Site | ModelSite) -> torch.Tensor:
        """Reshape a tensor to [B,S,F]; a flat tensor that does not fit the mask becomes one row, [1,T,F]."""
        if tensor.ndim > 2:
            # Sites of heads are [B,N,S,D] for N heads of D channels: `token_rows` makes [B,S,N·D] of them.
            return token_rows(tensor, site) if isinstance(site, Site) else tensor
        batch: tuple[int, ...] = (1, -1)
        if self._mask is not None and self._mask.numel() == tensor.shape[0]:
            batch = tuple(self._mask.shape)
        return tensor.reshape(*batch, tensor.shape[-1])


def spread_evenly(num_tokens: int, most: int) -> torch.Tensor:
    """Return the indices of at most `most` tokens, evenly spread: int64, ascending."""
    return torch.linspace(0, num_tokens - 1, min(num_tokens, most)).round().long()


def _lengths(mask: torch.Tensor) -> str:
    return ", ".join(str(int(length)) for length in mask.reshape(-1, mask.shape[-1]).sum(dim=-1))


def exchanged_tokens(passes: ModelPasses, attention_mask: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ways to mistake tokens for others of the same pass: in words, and the place of each token's values.

    Places are int64 [B,S], indices into the flat batch; -1 for padding. `attention_mask` is [B,S] of 0/1.
    """
    num_rows = attention_mask.shape[0]
    grids = _grids(passes, attention_mask)
    ways: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        f"rows rolled by {by}": partial(torch.roll, shifts=by, dims=0) for by in range(1, num_rows)
    }
    ways["[S,B] read as [B,S]"] = lambda grid: grid.T.reshape(grid.shape)
    ways["[B,S] read as [S,B]"] = lambda grid: grid.reshape(grid.shape[1], grid.shape[0]).T
    for words, exchange in ways.items() if num_rows > 1 else ():
        places = torch.full((attention_mask.numel(),), -1)
        for grid in grids:
            is_real = grid >= 0
            places[grid[is_real]] = exchange(grid)[is_real]
        yield words, places.view(attention_mask.shape)


def _grids(passes: ModelPasses, mask: torch.Tensor) -> list[torch.Tensor]:
    """Return the tokens of each pass as it lays them out, int64 [B,w]: indices into the flat batch; -1 for padding."""
    numbers = passes.number_tokens(mask).masked_fill(mask == 0, -1)
    num_columns, num_later = mask.shape[1], passes.num_passes - 1
    grids = []
    for number in range(passes.num_passes):
        rows = [(one == number).nonzero().flatten() for one in numbers]
        is_prefill = number == 0 and not passes.chunks
        width = num_columns - num_later if is_prefill else max(map(len, rows))
        grid = torch.full((len(rows), width), -1)
        for row, columns in enumerate(rows):
            start = 0 if mask[row, 0] else width - len(columns)
            grid[row, start : start + len(columns)] = row * num_columns + columns
        grids.append(grid)
    return grids


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Sides:
    """The golden (`reference`), the device run (`target`), and what they are judged by."""

    reference: CaptureSource
    target: CaptureSource
    batch: Batch  # tells the real tokens of both sides
    criteria: Criteria  # limits of ρ, or classic ones: fixed, on differences and correlations
    weights: WeightSource | None = None  # the golden's checkpoint

    @property
    def is_classic(self) -> bool:
        """True if the five classic limits judge."""
        return self.criteria.name == "classic"

    def limit_context(self, *, hides_flips: bool = False) -> LimitContext:
        """Return the facts that limits depend on; `hides_flips` if flips cannot be told from other tokens."""
        return LimitContext(
            backend=backend_of(self.target),
            is_float32=computes_in_float32(self.reference),
            share=self.criteria.share,
            hides_flips=hides_flips,
            is_other_graph=self.reference.graph != ModelGraph(),
        )

    def read_rows(self, layer: int, site: Site) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Read both sides' real tokens [T,F]; None if a side lacks them, or they cannot be compared."""
        if site not in self.reference.sites(layer) or site not in self.target.sites(layer):
            return None
        reference, target = self.reference.read(layer, site), self.target.read(layer, site)
        if find_mismatch(reference, target) is not None:
            return None
        return self.batch.rows(reference, site), self.batch.rows(target, site)

    def read_golden(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the golden's real tokens, [T,F] float32; None if it lacks them."""
        if site not in self.reference.sites(layer):
            return None
        return self.batch.rows(self.reference.read(layer, site), site).float()

    def read_exact(self, layer: int, site: Site) -> torch.Tensor | None:
        """Read the real tokens of the float32 twin, or of the golden if it kept no twin: [T,F] float32."""
        twin = self.reference.read_twin(layer, site)
        return self.read_golden(layer, site) if twin is None else self.batch.rows(twin, site).float()

    def holds_beside(self, layer: int, site: Site) -> bool:
        """Decide whether the golden kept what `read_beside` reads."""
        if site is self.reference.graph.layer(layer).routed_sum:
            return True
        has_shared = self.reference.graph.has_shared_experts
        is_shared_known = not has_shared or Site.SHARED_DELTA in self.reference.sites(layer)
        return is_shared_known and (site is Site.MOE_DELTA or self.holds_stream(layer))

    def read_beside(self, layer: int, site: Site, *, is_exact: bool) -> torch.Tensor | None:
        """Read what the golden adds to the routed experts' sum up to a site, [T,H] float32; None if it is not known.

        It is zero for the sum itself, the shared experts' for `moe_delta`, and the residual stream too for the output.
        `is_exact` prefers float32 twins to the golden's values.
        """
        graph, read = self.reference.graph, self.read_exact if is_exact else self.read_golden
        if not self.holds_beside(layer, site):
            return None
        if site is graph.layer(layer).routed_sum:
            states = read(layer, Site.POST_NORM)
            return None if states is None else torch.zeros_like(states)
        shared = read(layer, Site.SHARED_DELTA) if graph.has_shared_experts else None
        stream = self.read_stream(layer, is_exact=is_exact) if site is Site.OUTPUT else None
        if shared is None or stream is None:
            return stream if shared is None else shared
        return shared + stream

    def routed_scale(self, site: Site) -> float:
        """Return the factor on the routed experts' sum in a site behind it."""
        return 1.0 if site is Site.ROUTED_DELTA else self.reference.graph.sum_scale

    def holds_stream(self, layer: int) -> bool:
        """Decide whether the golden kept the residual stream, or what it follows from (see `read_stream`)."""
        held = self.reference.sites(layer)
        return Site.ATTN_RESIDUAL in held or (Site.OUTPUT in held and self._last_delta(layer) in held)

    def _last_delta(self, layer: int) -> Site:
        return self.reference.graph.layer(layer).last_delta

    def read_stream(self, layer: int, *, is_exact: bool) -> torch.Tensor | None:
        """Read the golden's residual stream that the experts' sum is added to, [T,H] float32.

        A golden that did not keep it has it as output − sum. `is_exact` prefers float32 twins to the golden's values.
        """
        read = self.read_exact if is_exact else self.read_golden
        residual = read(layer, Site.ATTN_RESIDUAL)
        if residual is not None:
            return residual
        output, added = read(layer, Site.OUTPUT), read(layer, self._last_delta(layer))
        return None if output is None or added is None else output - added
