"""Site finder: finds the sites among a dump's pieces, by names and headers, and by proof where names do not tell."""

from __future__ import annotations

import difflib
import re
import shlex
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.dumps.found_sites import FoundSite, FoundSites, RankRows, SiteTerm, count_rows
from minimax_tools.dumps.name_map import (
    AFFINITIES,
    BEHIND_LAYERS,
    HEAD_INPUT,
    LAYER_ITSELF,
    NameMap,
    SumOfPlaces,
    usual_layout,
    usual_places,
)
from minimax_tools.dumps.piece import Dump, DumpPiece, SitePlace, word_modules
from minimax_tools.dumps.placed_capture import SiteKey
from minimax_tools.dumps.schedule import Schedule
from minimax_tools.dumps.stream_proof import prove_stream
from minimax_tools.dumps.tensor_file import read_tensor
from minimax_tools.errors import CaptureError
from minimax_tools.model.site_layouts import Partial, Replicated, Sharded, SiteLayout
from minimax_tools.model.sites import ModelSite, Site

_NUM_NAMED = 6


def find_sites(dump: Dump, names: NameMap) -> FoundSites:
    """Find the sites of a dump: those that the user's map (`names`) names, and the others under their usual names.

    Raises:
        CaptureError: The map names a place or a pass that the dump does not hold, or a place fits two modules.
    """
    schedule, not_joined = _find_schedule(dump, names)
    passes = _choose_passes(dump, names, schedule)
    wanted = frozenset(step for group in passes for step in group)
    num_ranks = names.num_ranks or dump.num_ranks
    zeros: list[DumpPiece] = []  # pieces that stand for a tensor that the tool did not find
    by_module: dict[str, list[DumpPiece]] = defaultdict(list)
    for piece in dump.pieces:
        pieces = zeros if _stands_for_nothing(dump, piece) else by_module[piece.module]
        pieces.append(piece)
    finder = _Finder(dump, by_module, wanted=wanted, num_ranks=num_ranks)
    sites = {**_find_usual(finder, dump, names), **_find_named(finder, dump, names, by_module)}
    _settle_outputs(sites, dump)
    sites, rank_notes = _with_all_ranks(sites, num_ranks=num_ranks, dump=dump)
    used = {
        piece.module for found in sites.values() for term in found.terms for piece in term.pieces.values()
    }
    unmapped = tuple(sorted(by_module.keys() - used - {""}))
    # Only modules of sites tell passes: a module that one pass calls several times, such as an expert's, tells none.
    called = {piece.step for module in used for piece in by_module[module]}
    left = tuple(step for step in dump.steps if step in called - wanted)
    returns = {} if Site.OUTPUT in names.sites or not names.has_usual_names else _find_returns(finder, sites)
    found_sites = FoundSites(
        dump=dump,
        layer_returns=returns,
        sites=sites,
        num_ranks=num_ranks,
        passes=passes,
        left=left,
        schedule=schedule,
        not_joined=not_joined,
        unmapped=unmapped,
    )
    found_sites = prove_stream(found_sites)
    return replace(found_sites, notes=(*found_sites.notes, *_notes(found_sites, names, zeros), *rank_notes))


def _find_named(
    finder: _Finder, dump: Dump, names: NameMap, modules: Iterable[str]
) -> dict[SiteKey, FoundSite]:
    """Find the sites that the map names; each must be there."""
    sites: dict[SiteKey, FoundSite] = {}
    for site, mapped in names.sites.items():
        found = finder.find(site, mapped.terms)
        if not found:
            raise _names_nothing(names, dump.directory, site, mapped.terms, modules)
        sites |= {key: FoundSite(terms=terms, transpose=mapped.transpose) for key, terms in found.items()}
    return sites


def _find_usual(finder: _Finder, dump: Dump, names: NameMap) -> dict[SiteKey, FoundSite]:
    """Find the other sites under the usual names."""
    if not names.has_usual_names:
        return {}
    has_pairs = any(_is_residual_beside_a_norm(piece) for piece in dump.pieces)
    sites: dict[SiteKey, FoundSite] = {}
    for site, sources in usual_places(dump.format, has_fused_residuals=has_pairs).items():
        if site in names.sites:
            continue
        for source in sources:
            for key, terms in finder.find(site, source).items():
                sites.setdefault(key, FoundSite(terms=terms))
    if Site.ROUTER_WEIGHTS not in names.sites:
        for source in AFFINITIES:
            for key, terms in finder.find(Site.ROUTER_WEIGHTS, source).items():
                sites.setdefault(key, _find_weights(terms))
    return sites


def _find_returns(finder: _Finder, sites: Mapping[SiteKey, FoundSite]) -> dict[int, FoundSite]:
    """Return what the layers' modules return, in layers whose output no name tells."""
    return {
        layer: FoundSite(terms=terms)
        for (layer, site), terms in finder.find(Site.OUTPUT, (LAYER_ITSELF,)).items()
        if layer is not None and (layer, site) not in sites
    }


def _find_weights(terms: tuple[SiteTerm, ...]) -> FoundSite:
    """Return the site of the chosen experts' weights, from what a router returns beside the chosen experts."""
    widths = [next(iter(term.pieces.values())).shape[-1:] for term in terms]
    # As many values as chosen experts are their weights.
    return (
        FoundSite(terms=terms[:1])
        if widths[0] == widths[1]
        else FoundSite(terms=terms, is_of_affinities=True)
    )


def _settle_outputs(sites: dict[SiteKey, FoundSite], dump: Dump) -> None:
    """Correct the outputs at both ends of the held layers.

    In a dump of layers 5 and 6 alone, the input of layer 5 was found as the output of layer 4, of which nothing else is
    held: it is dropped. In a dump of the whole model, the final norm's input is the output of the last layer.
    """
    held_layers = {layer for layer, site in sites if layer is not None and site is not Site.OUTPUT}
    for layer, site in list(sites):
        if site is Site.OUTPUT and layer not in held_layers and not _is_at_layer(sites[layer, site]):
            del sites[layer, site]
    head_input = sites.pop((None, HEAD_INPUT), None)
    if head_input is not None and held_layers and dump.is_whole_model:
        sites.setdefault((max(held_layers), Site.OUTPUT), head_input)


class _Finder:
    """A dump's modules, searched for places of sites. A site is the sum of its terms, each a tensor at one place.

    `wanted` are labels of the passes to read, `num_ranks` those that the port was divided among.
    """

    def __init__(
        self,
        dump: Dump,
        by_module: Mapping[str, list[DumpPiece]],
        *,
        wanted: frozenset[str],
        num_ranks: int,
    ) -> None:
        self._dump = dump
        self._by_module = by_module
        self._wanted = wanted
        self._num_ranks = num_ranks
        self._records = {record.step: record for record in dump.records if not record.ends}

    def find(self, site: Site | ModelSite | str, source: SumOfPlaces) -> dict[SiteKey, tuple[SiteTerm, ...]]:
        """Return the site's terms in each layer that holds all of them; `source` has a place for each term."""
        terms = [self._find_place(site, place) for place in source]
        return {
            (layer, site): tuple(of_place[layer] for of_place in terms)
            for layer in set.intersection(*map(set, terms))
            # A site of a layer has a layer, any other has none.
            if (layer is not None) == isinstance(site, Site)
        }

    def _find_place(self, site: Site | ModelSite | str, place: SitePlace) -> dict[int | None, SiteTerm]:
        """Find a place's modules and pieces, by layer."""
        terms = {}
        for layer, module in place.find_layers(self._by_module).items():
            pieces = [piece for piece in place.choose(self._by_module[module]) if piece.step in self._wanted]
            if pieces:
                layout, is_declared = self._layout(site, place, pieces[0])
                by_pass_and_rank = self._by_pass_and_rank(pieces)
                terms[layer] = SiteTerm(
                    place=place,
                    module=module,
                    pieces=by_pass_and_rank,
                    rank_rows={} if place.layout is not None else self._rank_rows(site, by_pass_and_rank),
                    layout=layout,
                    is_declared=is_declared,
                    joins_heads=site in (Site.Q_NORM, Site.K_NORM) and len(pieces[0].shape) == 4,
                )
        return terms

    def _rank_rows(
        self, site: Site | ModelSite | str, pieces: Mapping[tuple[str, int], DumpPiece]
    ) -> dict[str, RankRows]:
        """Return the tokens that the ranks' rows are of, in passes where these are not all tokens of the pass."""
        found = {}
        for (step, _), piece in pieces.items():
            record = self._records.get(step)
            if record is None:
                continue
            if site in BEHIND_LAYERS and count_rows(piece.shape) == len(record.requests):
                continue  # a row for each request alone
            rows = RankRows.of(piece.shape, record, num_ranks=self._num_ranks)
            if rows != RankRows():
                found[step] = rows
        return found

    def _layout(
        self, site: Site | ModelSite | str, place: SitePlace, piece: DumpPiece
    ) -> tuple[SiteLayout, bool]:
        """Return the layout of the ranks' pieces, and whether the map or the dump declares it."""
        if place.layout is not None:
            return place.layout, True
        if piece.dims is not None:
            return read_dims(piece.dims), True
        if site is ModelSite.LOGITS and self._dump.num_ranks == self._num_ranks:
            # Each rank may have a part of the vocabulary: so it is if the ranks' pieces differ.
            return Sharded(dim=-1), False
        return usual_layout(site), False

    def _by_pass_and_rank(self, pieces: Iterable[DumpPiece]) -> dict[tuple[str, int], DumpPiece]:
        found: dict[tuple[str, int], DumpPiece] = {}
        for piece in pieces:
            first = found.setdefault((piece.step, piece.rank), piece)
            if first is not piece:
                raise CaptureError(
                    f"{self._dump.directory} holds {piece} twice for rank {piece.rank} in pass {piece.step}",
                    found=f"{first.file} and {piece.file}",
                    next_step="Keep the dump of each run, and of each data-parallel replica, in a folder of its own.",
                )
        return found


def read_dims(dims: str) -> SiteLayout:
    """Read a layout from a dump's names of dims: `b s h[tp]` is divided along dim 2, `t h[tp:partial]` is to be summed.

    A dim of size one, written `1`, counts too. Notes may follow the names, behind `#`.
    """
    # `(num_heads*head_dim)[tp]` is one dim.
    names = re.findall(r"\([^)]*\)(?:\[[^\]]*\])?|\S+", dims.split("#")[0])
    for dim, name in enumerate(names):
        if re.search(r"\[([^\]]*,\s*)?tp:partial", name):
            return Partial()
        if re.search(r"\[([^\]]*,\s*)?tp\b", name):
            return Sharded(dim=dim)
    return Replicated()


def _find_schedule(dump: Dump, names: NameMap) -> tuple[Schedule | None, str]:
    """Join the recorded passes, or return why they cannot be joined; (None, "") if the map tells the rows."""
    if names.steps or names.is_packed is False or names.attention_mask or not dump.records:
        return None, ""
    try:
        return Schedule.of(dump.records), ""
    except CaptureError as error:
        return None, str(error)


def _choose_passes(dump: Dump, names: NameMap, schedule: Schedule | None) -> tuple[tuple[str, ...], ...]:
    """Return the groups of passes that the schedule joins, or the map names; else the dump's first pass alone."""
    if schedule is not None:
        return (tuple(step for step in dump.steps if step not in schedule.repeated),)
    unknown = [step for group in names.steps for step in group if step not in dump.steps]
    if unknown:
        raise CaptureError(
            f"{dump.directory} holds no pass {', '.join(unknown)}",
            expected=f"one of {', '.join(dump.steps)}",
            next_step=f"Correct steps in {names.path}.",
        )
    return names.steps or ((dump.steps[:1],) if dump.steps else ())


def _stands_for_nothing(dump: Dump, piece: DumpPiece) -> bool:
    """Decide whether a piece is the single zero, or NaN, that NxDI writes for a tensor that it did not find."""
    if piece.shape != (1,):
        return False
    value = read_tensor(dump.directory / piece.file, piece.keys)
    return not bool(value.any()) or bool(value.to(torch.float32).isnan().all())


def _is_residual_beside_a_norm(piece: DumpPiece) -> bool:
    """Decide whether a piece is the residual stream that a norm returns beside the normed value, as vLLM's do."""
    is_second = piece.point == "output" and piece.element == "1"
    return is_second and piece.module.endswith("post_attention_layernorm")


def _is_at_layer(found: FoundSite) -> bool:
    """Decide whether a layer's output was found at the layer itself, not as the input of the next (`{next}`)."""
    return all("{next}" not in term.place.path for term in found.terms)


def _with_all_ranks(
    sites: Mapping[SiteKey, FoundSite], *, num_ranks: int, dump: Dump
) -> tuple[dict[SiteKey, FoundSite], tuple[str, ...]]:
    """Return the sites with all pieces that they need, and a note on the others, whose missing ranks wrote no dump."""
    complete, lacking = {}, []
    for key, found in sites.items():
        missing = {rank for term in found.terms for rank in _missing_ranks(term, num_ranks)}
        if missing and min(missing) < dump.num_ranks:  # the dump holds other tensors of that rank
            layer, site = key
            place = str(site) if layer is None else f"{site} of layer {layer}"
            ranks = ", ".join(str(rank) for rank in sorted(missing))
            raise CaptureError(
                f"{dump.directory} lacks a piece of {place}",
                expected=f"one of each of {num_ranks} ranks",
                found=f"none of rank {ranks}",
                next_step="Copy the dump again, whole, or run the capture again.",
            )
        if missing:
            lacking.append(key)
        else:
            complete[key] = found
    if not lacking:
        return complete, ()
    named = dict.fromkeys(str(site) for _, site in lacking)
    return complete, (
        f"of {num_ranks} ranks only {dump.num_ranks} are held: {', '.join(named)} cannot be put together",
    )


def _missing_ranks(term: SiteTerm, num_ranks: int) -> set[int]:
    """Return the ranks whose piece is needed and missing in some pass."""
    is_whole = isinstance(term.layout, Replicated)
    return {
        rank
        for step in term.steps
        if num_ranks > 1 and (term.rows_in(step).are_divided or not is_whole)
        for rank in set(range(num_ranks)) - term.of_pass(step).keys()
    }


def _names_nothing(
    names: NameMap,
    directory: Path,
    site: Site | ModelSite | str,
    source: SumOfPlaces,
    modules: Iterable[str],
) -> CaptureError:
    known = word_modules(modules)
    wanted = source[0].path
    near = difflib.get_close_matches(wanted, known, n=3, cutoff=0.5) or known[:3]
    return CaptureError(
        f"{names.path}: sites.{site} is {source[0]}, which the dump does not hold",
        found=f"such modules as {', '.join(near)}" if near else "no module",
        next_step=f"This lists what it holds: {shlex.join(('mm2-test', 'show', str(directory)))}",
    )


def _notes(found: FoundSites, names: NameMap, zeros: Sequence[DumpPiece]) -> Iterator[str]:
    """Yield sentences on how the dump is read, for the reader of a comparison."""
    if found.left and found.schedule is not None:
        yield (
            f"{_some(found.left)}: not read, because a longer pass has tokens of the same request from its first on, "
            "as in a run without a cache"
        )
    elif found.left:
        read = [step for group in found.passes for step in group]
        yield (
            f"of {len(read) + len(found.left)} passes {', '.join(read)} is read, not {_some(found.left)}: "
            "a map's steps choose others"
        )
    if found.unmapped:
        number = f"{len(found.unmapped)} modules map" if len(found.unmapped) > 1 else "1 module maps"
        yield f"{number} to no site: {_some(word_modules(found.unmapped))}"
    yield from found.dump.notes
    if zeros:
        named = _some(word_modules(map(str, zeros)))
        yield f"a single zero stands for what the tool did not find: {named}"
    if any(site.is_of_affinities for site in found.sites.values()):
        yield "router_weights are computed from the affinities and the chosen experts, normalised as the model does"
    if found.dump.is_one_rank and names.num_ranks is None:
        yield (
            "this tool keeps rank 0's tensors alone, and the port is taken to have run on one rank: "
            "else say ranks in a map"
        )


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:_NUM_NAMED]) + (" …" if len(names) > _NUM_NAMED else "")
