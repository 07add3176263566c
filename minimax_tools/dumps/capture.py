"""DumpCapture: another tool's dump, read as a capture.

A pass is one forward pass of the dumped run, `step` its label; the passes of a group continue the same prompts. Serving
engines compute final norm and logits only for the tokens to sample from: the last one of each prompt in a pass.
B prompts, S their padded length, R rows of a site's tensor in one pass, F channels.
"""

from __future__ import annotations

import math
import shlex
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Entry
from minimax_tools.capture.proof import name_place
from minimax_tools.capture.recorder import with_signed
from minimax_tools.capture.source import CaptureSource, DumpListing, ListedTensor
from minimax_tools.dumps.assembly import DumpAssembly, TokenKind, batch_mask, lay_out
from minimax_tools.dumps.cache_capture import CACHE_FILE, CacheCapture
from minimax_tools.dumps.formats import FORMATS, find_format, read_dump
from minimax_tools.dumps.found_sites import FoundSite, FoundSites
from minimax_tools.dumps.name_map import BEHIND_LAYERS, INPUT_IDS, NameMap
from minimax_tools.dumps.piece import DumpPiece, find_layer, word_module, word_modules
from minimax_tools.dumps.placed_capture import PlacedCapture
from minimax_tools.dumps.row_finder import find_rows
from minimax_tools.dumps.schedule import Stretch, TokenRows
from minimax_tools.dumps.site_finder import find_sites
from minimax_tools.errors import CaptureError, IncomparableError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers

# Sites whose width tells how many ranks divided the heads. Keys and values may be copied on several ranks.
_QUERY_SITES = (Site.Q_PROJ, Site.Q_NORM, Site.ATTN_CONTEXT)
_KEY_SITES = (Site.K_PROJ, Site.K_NORM, Site.V_PROJ)
# Sites of the hidden size that dumps hold most often.
_HIDDEN_SITES = (Site.INPUT_NORM, Site.ATTN_DELTA, Site.POST_NORM, Site.MOE_DELTA, Site.OUTPUT)


def find_last_tokens(site: FoundSite, rows: TokenRows) -> TokenRows | None:
    """Return the rows of a site that is held for the tokens to sample from; None if it has a row for each real token.

    A pass counts only if the site has exactly one row in it for each request, or all rows of a pass that records them.
    """
    counts = {step: site.terms[0].count_rows(step) for step in rows.steps}
    if all(rows.passes[step].are_held(count) for step, count in counts.items()):
        return None
    return TokenRows(
        stretches=tuple(tuple(_last_tokens(of_prompt, rows, counts)) for of_prompt in rows.stretches),
        passes={
            step: replace(rows.passes[step], num_rows=count, is_exact=True) for step, count in counts.items()
        },
    )


def _last_tokens(
    stretches: tuple[Stretch, ...], rows: TokenRows, counts: Mapping[str, int]
) -> Iterator[Stretch]:
    """Yield the last token of each of a prompt's stretches, if its row is known."""
    for stretch in stretches:
        in_pass, count = rows.passes[stretch.step], counts[stretch.step]
        last = replace(stretch, start=stretch.stop - 1, length=1)
        # The row of a request that goes on in the pass is of a later token.
        if count == in_pass.num_requests and not stretch.is_cut:
            yield replace(last, row=stretch.number)
        elif rows.padding is None and in_pass.are_held(count):
            yield replace(last, row=stretch.row + stretch.length - 1)


def mark_tokens(rows: TokenRows, mask: torch.Tensor) -> torch.Tensor:
    """Return a mask of these tokens alone, bool [B,S], given the mask [B,S] of all real tokens."""
    marks = torch.zeros_like(mask, dtype=torch.bool)
    for is_marked, is_real, stretches in zip(marks, mask, rows.stretches, strict=True):
        columns = is_real.nonzero()[:, 0]
        for stretch in stretches:
            is_marked[columns[stretch.start : stretch.stop]] = True
    return marks


class DumpCapture(PlacedCapture[FoundSite]):
    """A dump opened for reading; one site is in memory at a time. `CaptureSource` describes its methods.

    Args:
        found: The dump's sites.
        names: The user's map of the dump, which tells what its files do not.
        other: The capture whose batch tensors are laid out as; None for the batch that the dump's own lengths give,
            or, without lengths, for tensors as they are.
        caches: Keys and values in the cache of the same run, which are read in place of the dump's, and whose folder
            is the capture's.
    """

    may_omit_inputs = True

    def __init__(
        self,
        found: FoundSites,
        names: NameMap,
        *,
        other: CaptureSource | None = None,
        caches: CacheCapture | None = None,
    ) -> None:
        super().__init__(found.dump.directory if caches is None else caches.directory, found.sites)
        self.takes_other_layouts = caches is None
        self._caches = caches
        self.found = found  # the sites, and the groups of passes to read
        self._names = names
        self._assembly = DumpAssembly(found=found)
        mask = None if other is None else other.read_attention_mask()
        self._mask = None if mask is None else mask.bool()
        self._rows = find_rows(self._assembly, names, other=other, mask=self._mask)
        if self._mask is None and self._rows is not None:
            self._mask = batch_mask(self._rows.lengths)
        self._hidden_size = None if other is None or mask is None else _find_hidden_size(other)
        self._last_tokens = self._find_last_tokens()
        self.notes = (*found.notes, *self._partial_notes(), *self._padding_notes(), *self._cache_notes())

    @classmethod
    def open(
        cls,
        directory: Path,
        names: NameMap,
        *,
        format_: str | None = None,
        caches: CacheCapture | None = None,
    ) -> DumpCapture:
        """Open a dump, with the caches of the same run if there are any; the files tell the format if none is given."""
        chosen = format_ or find_format(directory)
        if chosen is None:
            raise CaptureError(
                f"the tool that wrote {directory} is not known",
                expected=f"a layout of one of {', '.join(FORMATS)}",
                next_step="Name the folder that holds the files themselves.",
            )
        return cls(find_sites(read_dump(directory, chosen), names), names, caches=caches)

    def laid_out_as(self, other: CaptureSource) -> CaptureSource:
        """Return this capture laid out as the other side's batch.

        Raises:
            IncomparableError: The prompts are of other lengths or tokens.
        """
        self._refuse_part_of_heads(other)
        if other.read_attention_mask() is None:
            return self
        caches = None if self._caches is None else self._caches.laid_out_as(other)
        aligned = DumpCapture(self.found, self._names, other=other, caches=caches)
        aligned._check_tokens(other.read_input_ids())
        return aligned

    def listing(self) -> DumpListing:
        """List the dump's tensors; those of the same name in several layers are one."""
        # Sites of each tensor; an inner dict keeps each site once, in order.
        sites: dict[str, dict[str, None]] = defaultdict(dict)
        for (_, site), found_site in self.found.sites.items():
            # The terms of a running sum are sites themselves.
            for term in () if found_site.is_running_sum else found_site.terms:
                for piece in term.pieces.values():
                    sites[_template(piece)][str(site)] = None
        pieces: dict[str, list[DumpPiece]] = defaultdict(list)
        for piece in self.found.dump.pieces:
            pieces[_template(piece)].append(piece)
        return DumpListing(
            format=self.found.dump.format,
            steps=self.found.dump.steps,
            passes=self.found.passes,
            joins_requests=self.found.schedule is not None,
            num_ranks=self.found.num_ranks,
            tensors=tuple(
                _describe(name, of_name, sites=tuple(sites.get(name, ()))) for name, of_name in pieces.items()
            ),
            unmapped=tuple(word_modules(self.found.unmapped)),
        )

    def sites(self, layer: int) -> tuple[Site, ...]:
        held = {*super().sites(layer), *self._cached_sites(layer)}
        return tuple(site for site in Site if site in held)

    def model_sites(self) -> tuple[ModelSite, ...]:
        """Return the sites found outside the layers, without those whose tokens are not known."""
        unknown = {site for site, rows in self._last_tokens.items() if not rows.steps}
        return tuple(site for site in super().model_sites() if site not in unknown)

    def held_tokens(self, site: ModelSite) -> torch.Tensor | None:
        rows = self._last_tokens.get(site)
        return None if rows is None or self._mask is None else mark_tokens(rows, self._mask)

    def not_exposed(self, layer: int) -> tuple[Site, ...]:
        held = self.sites(layer)
        return tuple(site for site in Site if site not in held)

    def read(self, layer: int | None, site: Site | ModelSite) -> torch.Tensor:
        """Read a site's tensor; zeros on padding and outside `held_tokens`.

        If nothing tells the padding, it is read as the file holds it.
        """
        # A module's values may be right, and written wrongly into the cache: the cache shows either mistake.
        if self._caches is not None and layer is not None and site in self._cached_sites(layer):
            return self._caches.read(layer, site)
        found_site, place = self._find(layer, site), name_place(site, layer)
        if found_site is None:
            raise CaptureError(
                f"{self.directory} holds no {place}",
                next_step="Capture the whole model."
                if layer is None
                else "A map (--map) says where sites lie. This lists what the dump holds: "
                f"{shlex.join(('mm2-test', 'show', str(self.directory)))}",
            )
        last = self._last_tokens.get(site) if isinstance(site, ModelSite) else None
        return self._read(found_site, what=place, has_heads_dim=site.has_heads_dim, last=last)

    def read_attention_mask(self) -> torch.Tensor | None:
        return None if self._mask is None else self._mask.to(torch.int64)

    def read_input_ids(self) -> torch.Tensor | None:
        """Read the dump's token ids, int64 [B,S]; None if a pass lacks them, or nothing tells real tokens."""
        found_site = self.found.sites.get((None, INPUT_IDS))
        steps = {step for group in self.found.passes for step in group}
        if (
            found_site is None
            or self._rows is None
            or self._mask is None
            or not steps <= found_site.terms[0].steps
        ):
            return None
        tokens = self._assembly.read_tokens(found_site, self._rows, kind=TokenKind.NUMBER, what=INPUT_IDS)
        return lay_out(tokens[:, None], self._mask)[..., 0].to(torch.int64)

    def _cached_sites(self, layer: int) -> tuple[Site, ...]:
        return () if self._caches is None else self._caches.sites(layer)

    def _cache_notes(self) -> Iterator[str]:
        if self._caches is None:
            return
        yield f"k_rope and v_proj are read from {CACHE_FILE}, whether modules return them or not"
        others = sorted(set(self._caches.layers) - set(self.layers))
        if others:
            layers = word_layers(others)
            yield f"{CACHE_FILE} holds {layers} too, of which no module was captured: they are left out"

    def _find_last_tokens(self) -> dict[ModelSite, TokenRows]:
        """Find the tokens that a site behind the layers is held for, if not for all; none if nothing tells which."""
        last_tokens = {}
        for site in BEHIND_LAYERS:
            found_site = self.found.sites.get((None, site))
            if found_site is not None and self._rows is not None:
                rows = find_last_tokens(found_site, self._rows)
                if rows is not None:
                    last_tokens[site] = rows
        return last_tokens

    def _read(
        self, found_site: FoundSite, *, what: str, has_heads_dim: bool, last: TokenRows | None = None
    ) -> torch.Tensor:
        """Read all tokens of a site, or the `last` ones."""
        if self._rows is None or self._mask is None:
            # Nothing tells which tokens are real: the first pass is read alone, and as it lies.
            return self._assembly.read_pass(found_site, self.found.passes[0][0], what=what)
        kind = TokenKind.HEADS if has_heads_dim else TokenKind.CHANNELS
        tokens = self._assembly.read_tokens(found_site, last or self._rows, kind=kind, what=what)
        tokens = with_signed(tokens)
        mask = self._mask if last is None else mark_tokens(last, self._mask)
        if not has_heads_dim:
            return lay_out(self._without_zero_channels(tokens), mask)
        heads = tokens.shape[1:]
        batch: torch.Tensor = lay_out(tokens.flatten(1), mask).unflatten(-1, heads)
        return batch.transpose(1, 2)

    def _without_zero_channels(self, tokens: torch.Tensor) -> torch.Tensor:
        """Cut the channels behind the hidden size off [T,F], if the port padded it and they are zero."""
        padded = self._padded_size
        if padded is None or self._hidden_size is None or tokens.shape[-1] != padded:
            return tokens
        return tokens if bool(tokens[:, self._hidden_size :].any()) else tokens[:, : self._hidden_size]

    @property
    def _padded_size(self) -> int | None:
        """The hidden size that the port padded its own to, as its tensors show; None if it did not."""
        return None if self._padded_site is None else _own_width(self._padded_site)

    @cached_property
    def _padded_site(self) -> FoundSite | None:
        """The first site of the hidden size that is wider than the other side's; None without one."""
        keys = [(layer, site) for layer in self.layers for site in _HIDDEN_SITES]
        sites = (self.found.sites.get(key) for key in [(None, ModelSite.EMBEDDING), *keys])
        size = self._hidden_size
        return next((site for site in sites if site and size is not None and _own_width(site) > size), None)

    def _padding_notes(self) -> tuple[str, ...]:
        if self._padded_site is None or self._padded_size is None or self._hidden_size is None:
            return ()
        num_channels = self._padded_size - self._hidden_size
        step = min(self._padded_site.terms[0].steps)
        first = self._assembly.read_pass(self._padded_site, step, what="a tensor of the hidden size")
        if bool(first[..., self._hidden_size :].any()):
            return ()
        return (
            f"proved: the hidden size is padded to {self._padded_size}; the last {num_channels} channels are zero, "
            "and are cut off",
        )

    def _refuse_part_of_heads(self, other: CaptureSource) -> None:
        """Refuse a tool's lone rank that holds a part of the other side's heads, if no map says of how many ranks."""
        if not self.found.dump.is_one_rank or self._names.num_ranks is not None:
            return
        for sites in (_QUERY_SITES, _KEY_SITES):
            # How many times wider a site is on the other side.
            shares = {
                (layer, site): width / own_width
                for (layer, site), found_site in self.found.sites.items()
                if isinstance(site, Site)
                and site in sites
                and (width := _width(other.entry(layer, site)))
                and (own_width := _own_width(found_site))
            }
            if shares:
                break
        else:
            return
        [share, *others] = sorted(set(shares.values()))
        if others or share <= 1 or share != int(share):
            # Not one part of all: another mistake, to be judged.
            return
        layer, site = next(iter(shares))
        raise CaptureError(
            f"{self.directory} holds the tensors of rank 0 alone, and {site} of layer {layer} is one of "
            f"{share:.0f} parts",
            expected=f"a map that says of how many ranks: ranks: {share:.0f}",
            found="no ranks in a map",
            next_step=f"Write 'ranks: {share:.0f}' into a file, more if heads were padded, and give it with --map. "
            "If the port ran on one rank, write 'ranks: 1', and the shape is judged.",
        )

    def _partial_notes(self) -> tuple[str, ...]:
        return tuple(
            f"{site}: held of {sum(rows.lengths)} tokens to sample from alone, which are judged"
            if rows.steps
            else f"{site}: held of some tokens alone, nothing tells which, and not judged"
            for site, rows in self._last_tokens.items()
        )

    def _check_tokens(self, input_ids: torch.Tensor | None) -> None:
        """Raise if the dump's token ids are not those of the other side; else note that they were checked, if known."""
        own_ids = None if input_ids is None else self.read_input_ids()
        if own_ids is None or input_ids is None or self._mask is None:
            return
        differing = (own_ids != input_ids) & self._mask
        if bool(differing.any()):
            row, position = differing.nonzero()[0].tolist()
            raise IncomparableError(
                f"the captures have different inputs: input_ids differ, first at row {row}, token {position}",
                expected=f"{int(input_ids[row, position])}, as on the other side",
                found=f"{int(own_ids[row, position])} in {self.directory}",
                next_step="Run both sides on the same prompts; if they are, check lengths, padding and steps in a map.",
            )
        self.has_checked_tokens = True


def _find_hidden_size(source: CaptureSource) -> int | None:
    keys: list[tuple[int | None, Site | ModelSite]] = [(None, ModelSite.EMBEDDING)]
    keys += [(layer, site) for layer in source.layers for site in (Site.INPUT, Site.OUTPUT)]
    entries = (source.entry(layer, site) for layer, site in keys)
    return next((entry.shape[-1] for entry in entries if entry is not None), None)


def _width(entry: Entry | None) -> int:
    return 0 if entry is None else entry.shape[-1]


def _own_width(found_site: FoundSite) -> int:
    """Return the width of the first piece of a site, 0 for a sum or a cut."""
    [term, *others] = found_site.terms
    if others or term.place.part is not None or found_site.transpose:
        return 0
    shape = next(iter(term.pieces.values())).shape
    return math.prod(shape[-2:]) if term.joins_heads else math.prod(shape[-1:])


def _template(piece: DumpPiece) -> str:
    """Return a piece's place as a map writes it, such as `blocks.{layer}.attn.wq:output[0]`."""
    return str(replace(piece, module=word_module(piece.module)))


def _describe(name: str, pieces: list[DumpPiece], *, sites: tuple[str, ...]) -> ListedTensor:
    layers = {find_layer(piece.module) for piece in pieces}
    return ListedTensor(
        name=name,
        layers=tuple(sorted(layer for layer in layers if layer is not None)),
        shapes=tuple(dict.fromkeys(piece.shape for piece in pieces)),
        dtypes=tuple(dict.fromkeys(piece.dtype for piece in pieces)),
        steps=tuple(dict.fromkeys(piece.step for piece in pieces)),
        ranks=tuple(sorted({piece.rank for piece in pieces})),
        sites=sites,
    )
