"""DumpAssembly: a site's real tokens, put together from the pieces of ranks and passes.

T real tokens of all prompts, F channels, N heads, D head_dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import torch

from minimax_tools.dumps.found_sites import FoundSite, FoundSites, SiteTerm
from minimax_tools.dumps.rows import TokenRows, join_passes, take_stretch
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import CaptureError, TargetError
from minimax_tools.model.site_layouts import Replicated

_NUM_NAMED = 4


class Shape(str, Enum):
    """Shape of a token's value in a tensor."""

    CHANNELS = "channels"  # [B,S,F]
    HEADS = "heads"  # [B,N,S,D]
    NUMBER = "number"  # [B,S]


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpAssembly:
    """The tensors of a dump, read one site at a time."""

    found: FoundSites

    def whole(self, site: FoundSite, step: str, *, what: str) -> torch.Tensor:
        """Read a site from one pass, padding included, in mm2's shape of the site.

        Raises:
            CaptureError: A file is damaged, or the pieces do not fit the map or the usual names.
        """
        terms = [self._term(term, step, what=what) for term in site.terms]
        if site.transpose:
            terms = [_transposed(term, site.transpose, what=what) for term in terms]
        if len(terms) == 1:
            return terms[0]
        if any(term.shape != terms[0].shape for term in terms):
            raise CaptureError(
                f"{what} cannot be added up",
                expected="terms of one shape",
                found=", ".join(str(list(term.shape)) for term in terms),
                next_step="Correct the sum in the map.",
            )
        # Kernels add in float32 and round once.
        return torch.stack([term.to(torch.float32) for term in terms]).sum(dim=0).to(terms[0].dtype)

    def tokens(self, site: FoundSite, rows: TokenRows, *, shape: Shape, what: str) -> torch.Tensor:
        """Read a site's real tokens from all passes that are read: [T,F], [T,N,D] or [T].

        Raises:
            CaptureError: A file is damaged, the pieces do not fit, or nothing tells which rows are real.
        """
        if rows.stretches:
            return self._joined(site, rows, shape=shape, what=what)
        groups = self.found.passes
        if len(groups) not in (1, len(rows.lengths)):
            raise CaptureError(
                f"{self.found.dump.directory}: which prompts the passes are of cannot be told",
                expected=f"{len(rows.lengths)} passes, one for each prompt, or one for all",
                found=f"{len(groups)}",
                next_step="Name them as steps in a map: an inner list for passes that follow each other.",
            )
        try:
            return self._one_by_one(site, rows, groups, shape=shape, what=what)
        except CaptureError as error:
            hint = self._how_to_join()
            if not hint:
                raise
            raise CaptureError(
                error.what, expected=error.expected, found=error.found, next_step=hint
            ) from error

    def _how_to_join(self) -> str:
        """Return the advice for a dump with passes that are not read; empty if all are read."""
        if self.found.not_joined:
            return f"The passes could not be joined: {self.found.not_joined}"
        if not self.found.left:
            return ""
        read = ", ".join(step for group in self.found.passes for step in group)
        joined = [*self.found.passes[0], *self.found.left][:_NUM_NAMED]
        return (
            f"Of several passes {read} is read: steps in a map choose others, and joins those of a list, such as "
            f"steps: {[joined]}. Or run both sides on the same prompts."
        )

    def _one_by_one(
        self,
        site: FoundSite,
        rows: TokenRows,
        groups: tuple[tuple[str, ...], ...],
        *,
        shape: Shape,
        what: str,
    ) -> torch.Tensor:
        """Read the real tokens of passes chosen by the map, or of the first pass."""
        parts = []
        for number, group in enumerate(groups):
            of_group = rows if len(groups) == 1 else rows.of_prompt(number)
            where = [f"{what} in pass {step}" for step in group]
            flat = [
                _flattened(self.whole(site, step, what=place), shape, place)
                for step, place in zip(group, where, strict=True)
            ]
            of_passes = of_group.in_passes([math.prod(tensor.shape[:-1]) for tensor, _ in flat])
            taken = [
                unflatten(of_pass.take(tensor, what=what))
                for (tensor, unflatten), of_pass in zip(flat, of_passes, strict=True)
            ]
            parts.append(join_passes(taken, [of_pass.lengths for of_pass in of_passes]))
        return torch.cat(parts)

    def _joined(self, site: FoundSite, rows: TokenRows, *, shape: Shape, what: str) -> torch.Tensor:
        """Read the real tokens of passes that record their requests, one pass in memory at a time."""
        wanted = [
            (prompt, stretch) for prompt, stretches in enumerate(rows.stretches) for stretch in stretches
        ]
        num_rows = self.found.schedule.num_rows if self.found.schedule is not None else {}
        parts = {}
        for step in dict.fromkeys(stretch.step for _, stretch in wanted):
            where = f"{what} in pass {step}"
            tensor, unflatten = _flattened(self.whole(site, step, what=where), shape, where)
            for prompt, stretch in wanted:
                if stretch.step == step:
                    taken = take_stretch(tensor, stretch, num_rows=num_rows.get(step), what=where)
                    parts[prompt, stretch.start] = unflatten(taken).clone()
        return torch.cat([parts[place] for place in sorted(parts)])

    def _term(self, term: SiteTerm, step: str, *, what: str) -> torch.Tensor:
        pieces = {
            rank: term.place.cut(
                read_tensor(self.found.dump.directory / piece.file, piece.keys), what=f"{what}, {piece.file}"
            )
            for rank, piece in term.of_pass(step).items()
        }
        if not pieces:
            raise CaptureError(
                f"{self.found.dump.directory} does not hold {what}",
                found=f"passes {', '.join(sorted(term.steps))}",
                next_step="Choose passes that hold the same modules (steps in a map), or capture again.",
            )
        tensors = list(pieces.values())
        if len(tensors) == 1:
            return tensors[0]
        are_equal = all(torch.equal(tensors[0], tensor) for tensor in tensors[1:])
        layout = Replicated() if are_equal and not term.is_declared else term.layout
        try:
            return layout.assemble(tensors, what=f"{what} ({term.module} of {self.found.dump.directory})")
        except TargetError as error:
            raise CaptureError(
                error.what,
                expected=error.expected,
                found=error.found,
                next_step=f"It was taken to be {layout}: a map says otherwise, "
                "with @replicate, @shard(dim) or @partial behind the place.",
            ) from error


def _flattened(
    tensor: torch.Tensor, shape: Shape, what: str
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Flatten a token's value into one last dim; return with it the function that restores its shape from [T,F]."""
    if shape is Shape.CHANNELS:
        return tensor, lambda taken: taken
    if shape is Shape.NUMBER:
        return tensor[..., None], lambda taken: taken[:, 0]
    if tensor.ndim == 4:  # [B,N,S,D]
        tensor = tensor.transpose(1, 2)
    elif tensor.ndim != 3:  # packed [T',N,D]
        raise CaptureError(
            f"{what} does not show its heads",
            expected="[B,heads,S,head_dim], or [tokens,heads,head_dim]",
            found=str(list(tensor.shape)),
            next_step="Bring its dims into that order with transpose in a map, or leave the site out.",
        )
    heads = tensor.shape[-2:]
    return tensor.flatten(-2), lambda taken: taken.unflatten(-1, heads)


def _transposed(tensor: torch.Tensor, order: tuple[int, ...], *, what: str) -> torch.Tensor:
    if tensor.ndim != len(order):
        raise CaptureError(
            f"{what} cannot be transposed as the map says",
            expected=f"{len(order)} dims",
            found=str(list(tensor.shape)),
            next_step="Correct transpose in the map.",
        )
    return tensor.permute(order)
