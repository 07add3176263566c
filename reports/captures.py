"""Captures: the contents of a capture, with the statistics of every tensor, as text and as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from minimax_tools.capture.manifest import Description, Entry
from minimax_tools.capture.mirror import address_of
from minimax_tools.capture.source import CaptureInspection, CaptureSource
from minimax_tools.capture.store import GOLDEN_SIDE
from minimax_tools.errors import CaptureError, format_count
from minimax_tools.json_codec import encode
from minimax_tools.metrics.tensor_statistics import TensorStatistics, measure_tensor
from minimax_tools.model.sites import ModelSite, Site, find_level
from minimax_tools.model.span import word_layers
from minimax_tools.stored_dtype import dtype_name
from reports.canvas import Canvas, Row, columns
from reports.data import to_json
from reports.dumps import draw_dump, dump_record
from reports.wording import word_figure, word_layer, word_shape, word_sites_by_layer, word_variants


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteContents:
    """A site's tensor: its shape, dtype and statistics."""

    site: str
    shape: tuple[int, ...]
    dtype: str
    statistics: TensorStatistics

    @property
    def num_nonfinite(self) -> int:
        """Elements that are NaN or infinite."""
        return self.statistics.num_nan + self.statistics.num_inf


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerContents:
    """Contents of a layer, or of the model outside its layers if `layer` is None."""

    layer: int | None
    sites: tuple[SiteContents, ...]  # its sites, in execution order
    not_exposed: tuple[str, ...] = ()  # sites that the run asked for and the port does not expose
    further: tuple[SiteContents, ...] = ()  # further outputs of the port, named as it was asked for them


def read_contents(source: CaptureSource) -> tuple[LayerContents, ...]:
    """Return the contents of a capture: its layers ascending, then the sites outside them.

    Statistics come from the manifest. Those of further outputs are computed, and without a manifest all, with one
    tensor in memory at a time. Further outputs that cannot be read are left out: the capture's inspection names them.
    """
    layers = [
        LayerContents(
            layer=layer,
            sites=tuple(
                _read_site(site, source.entry(layer, site), partial(source.read, layer, site))
                for site in source.sites(layer)
            ),
            not_exposed=tuple(str(site) for site in source.not_exposed(layer)),
            further=tuple(_read_further(source, layer)),
        )
        for layer in source.layers
    ]
    model = tuple(
        _read_site(site, source.entry(None, site), partial(source.read, None, site))
        for site in source.model_sites()
    )
    return (*layers, LayerContents(layer=None, sites=model)) if model else tuple(layers)


def measure_contents(layers: Mapping[int, Mapping[Site, torch.Tensor]]) -> tuple[LayerContents, ...]:
    """Return the contents of a run that was not saved, from its CPU tensors by layer and site."""
    return tuple(
        LayerContents(
            layer=layer,
            sites=tuple(
                _measure_site(str(site), layers[layer][site])
                for site in sorted(layers[layer], key=lambda site: site.order)
            ),
        )
        for layer in sorted(layers)
    )


def _read_further(source: CaptureSource, layer: int) -> Iterator[SiteContents]:
    for name in source.further(layer):
        with suppress(CaptureError):
            yield _measure_site(name, source.read_further(layer, name))


def _read_site(site: Site | ModelSite, entry: Entry | None, read: Callable[[], torch.Tensor]) -> SiteContents:
    if entry is None:
        return _measure_site(str(site), read())
    # A layer's input may be stored as the output of the layer before, so its entry may have another name.
    return SiteContents(site=str(site), shape=entry.shape, dtype=entry.dtype, statistics=entry.statistics)


def _measure_site(site: str, tensor: torch.Tensor) -> SiteContents:
    return SiteContents(
        site=site,
        shape=tuple(tensor.shape),
        dtype=dtype_name(tensor.dtype),
        statistics=measure_tensor(tensor),
    )


# With more layers than this, each layer has one line instead of a table.
_MOST_DETAILED_LAYERS = 4

_COLUMNS = columns("<site", "<shape", "<dtype", "mean", "std", "min", "max", "NaN", "Inf")


def capture_record(source: CaptureSource, inspection: CaptureInspection | None = None) -> dict[str, Any]:
    """Return a capture as JSON: its run (null if the layout does not say) and the statistics of every site.

    Another tool's dump whose tensors are not sites yet has a `listing`, which is returned as `dump_record` words it.

    `inspection` is the result of reading all of it; None if it was not read.
    """
    listing = source.listing()
    if listing is not None:
        return dump_record(source, listing)
    description = source.known_description
    return {
        "directory": address_of(source.directory),
        "complete": source.is_complete if description else None,
        "description": to_json(encode(description)) if description else None,
        "observed_dtypes": dict(source.observed_dtypes),
        "certificate": encode(source.certificate) if source.certificate else None,
        "inspection": None if inspection is None else to_json(asdict(inspection)),
        **_contents_record(read_contents(source)),
    }


def is_damaged(source: CaptureSource, inspection: CaptureInspection | None) -> bool:
    """Decide whether an inspection found faults, or a certificate of other tensors; False without an inspection."""
    return inspection is not None and (bool(inspection.faults) or source.has_void_certificate)


def statistics_record(layers: Mapping[int, Mapping[Site, torch.Tensor]]) -> dict[str, Any]:
    """Return a run that was not saved as JSON, from its CPU tensors: the keys of `capture_record`, mostly null."""
    names = ("directory", "complete", "description", "observed_dtypes", "certificate", "inspection")
    return {**dict.fromkeys(names), "observed_dtypes": {}, **_contents_record(measure_contents(layers))}


def render_capture(
    source: CaptureSource,
    inspection: CaptureInspection | None = None,
    *,
    shows_statistics: bool = True,
) -> str:
    """Draw a capture as text: its run, then a table for each layer, or a line for each if there are many.

    Without `shows_statistics`, the tables are left out, and no tensor is read. For `inspection` see
    `capture_record`.
    """
    canvas = Canvas()
    listing = source.listing()
    if listing is not None:
        draw_dump(canvas, source, listing)
        return canvas.text
    canvas.line(f"Capture {address_of(source.directory)}", style="bold")
    canvas.facts(_facts(source, inspection))
    for fault in () if inspection is None else inspection.faults:
        canvas.paragraph(f"DAMAGED: {fault}", style="bold red")
    if not source.is_complete:
        num_stored, num_declared = len(source.layers), len(source.description.run.span)
        canvas.line(f"  incomplete: {num_stored} of {num_declared} layers are stored", style="yellow")
    if shows_statistics:
        _draw_contents(canvas, read_contents(source))
    return canvas.text


def render_statistics(
    layers: Mapping[int, Mapping[Site, torch.Tensor]],
) -> str:
    """Draw a run that was not saved, from its CPU tensors, as `render_capture` draws a capture."""
    canvas = Canvas()
    canvas.line("Not saved", style="bold")
    _draw_contents(canvas, measure_contents(layers))
    return canvas.text


def _contents_record(contents: Sequence[LayerContents]) -> dict[str, Any]:
    model = [_site_record(site) for layer in contents if layer.layer is None for site in layer.sites]
    layers = [
        {
            "layer": layer.layer,
            "sites": [_site_record(site) for site in layer.sites],
            "not_exposed": list(layer.not_exposed),
            "further": [_site_record(output, key="name") for output in layer.further],
        }
        for layer in contents
        if layer.layer is not None
    ]
    return {"layers": layers, "model": model}


def _site_record(site: SiteContents, *, key: str = "site") -> dict[str, Any]:
    statistics: dict[str, Any] = to_json(site.statistics)
    return {key: site.site, "shape": list(site.shape), "dtype": site.dtype, **statistics}


def _facts(source: CaptureSource, inspection: CaptureInspection | None) -> list[tuple[str, str]]:
    description = source.known_description
    if description is None:
        return [("made by", "unknown: this layout does not say")]
    run, made = description.run, description.provenance
    level = find_level(run.sites)
    kept = f"sites {level}" if level else f"{len(run.sites)} sites"
    dtypes = {**made.dtypes, **source.observed_dtypes}
    device = "" if made.device == made.backend else f" ({made.device})"
    quick = ", the short rows of --quick" if description.is_quick else ""
    variants = f", of {word_variants(description.floor_variants)}" if description.floor_variants else ""
    facts = [
        ("run", f"{run}, {kept}"),
        ("model", made.model_source),
        ("backend", f"{made.backend}{device}{_word_ranks(made.options)}"),
        ("made by" if description.side == GOLDEN_SIDE else "port", made.target),
        *([("weights", f"by {made.options['conversion']}")] if "conversion" in made.options else []),
        ("dtypes", ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())),
        ("inputs", f"{description.input_source}{quick} (sha256 {description.inputs_digest[:8]})"),
    ]
    if description.side == GOLDEN_SIDE:
        facts.append(("experts", _word_experts(source)))
        facts.append(("noise floor", f"{description.noise_floor}{variants}"))
        facts.append(("certificate", _word_certificate(source, inspection)))
    return [*facts, ("digests", _word_digests(description, inspection))]


def _word_experts(source: CaptureSource) -> str:
    """Return how many experts no token of a golden chose, such as `some chosen by no token: 2 in layer 3`."""
    unreached = {layer: source.unreached_experts(layer) for layer in source.layers}
    if None in unreached.values():
        return "not counted"
    missing = [(layer, len(experts)) for layer, experts in unreached.items() if experts]
    if not missing:
        return "all chosen by a token, in every layer"
    layer, most = max(missing, key=lambda counted: counted[1])
    return (
        f"{sum(count for _, count in missing)} chosen by no token, in {format_count(len(missing), 'layer')}; "
        f"most of them, {most}, in layer {layer}"
    )


def _word_certificate(source: CaptureSource, inspection: CaptureInspection | None) -> str:
    if source.certificate is None:
        return "none: mm2-gpu certify makes one"
    if source.has_void_certificate:
        return "VOID: of other tensors than are listed here"
    if inspection is not None and inspection.faults:
        return f"VOID: the files are no longer those of which {source.certificate}"
    return str(source.certificate)


def _word_digests(description: Description, inspection: CaptureInspection | None) -> str:
    """Return the result of an inspection in words, such as `96 tensors match`."""
    if inspection is None:
        program = "mm2-gpu" if description.side == GOLDEN_SIDE else "mm2-test"
        return f"not verified here: {program} show verifies them"
    if inspection.faults:
        return f"{inspection.num_tensors} tensors match, {format_count(len(inspection.faults), 'fault')}"
    return f"{inspection.num_tensors} tensors match"


def _word_ranks(options: Mapping[str, Any]) -> str:
    """Return in words how many ranks share a layer; empty for one."""
    degree, expert_degree = options.get("tp_degree", 1), options.get("ep_degree", 1)
    if degree == 1:
        return ""
    groups = f" in {expert_degree} groups of experts" if expert_degree > 1 else ""
    summed = f", summed in {options['reduce_dtype']}" if "reduce_dtype" in options else ""
    return f", divided among {degree}{groups}{summed}"


def _draw_contents(canvas: Canvas, contents: Sequence[LayerContents]) -> None:
    layers = [layer for layer in contents if layer.layer is not None]
    has_overview = len(layers) > _MOST_DETAILED_LAYERS
    if has_overview:
        _draw_overview(canvas, layers)
    for layer in contents:
        if layer.layer is None or not has_overview:
            _draw_layer(canvas, layer)
    missing = [(layer.layer, site) for layer in contents for site in layer.not_exposed]
    _draw_sites(canvas, "Not exposed by the port", missing)
    if has_overview:
        further = [(layer.layer, output.site) for layer in contents for output in layer.further]
        _draw_sites(canvas, "Further outputs, never judged", further)
        canvas.gap()
        canvas.line("--json prints the statistics of every site.", style="dim")


def _draw_layer(canvas: Canvas, layer: LayerContents) -> None:
    canvas.section(word_layer(layer.layer).capitalize())
    canvas.table(_COLUMNS, [_row(site) for site in layer.sites])
    if layer.further:
        canvas.line("  further outputs, never judged", style="dim")
        canvas.table((*columns("<name"), *_COLUMNS[1:]), [_row(output) for output in layer.further])


def _draw_overview(canvas: Canvas, layers: Sequence[LayerContents]) -> None:
    """Draw one line for each layer: the statistics of its last site, most often its output."""
    canvas.gap()
    canvas.line(
        f"{word_layers(layer.layer for layer in layers).capitalize()}: what each ends in", style="bold"
    )
    rows = [
        Row(
            cells=(str(layer.layer), str(len(layer.sites)), *_cells(layer.sites[-1])),
            style=_style(*layer.sites),
        )
        for layer in layers
        if layer.sites
    ]
    canvas.table((*columns("layer", "sites"), *_COLUMNS), rows)
    nonfinite = [(layer.layer, site.site) for layer in layers for site in layer.sites if site.num_nonfinite]
    _draw_sites(canvas, "NaN or Inf", nonfinite, style="bold red")


def _draw_sites(
    canvas: Canvas, title: str, sites: Sequence[tuple[int | None, str]], *, style: str = "bold"
) -> None:
    if sites:
        canvas.section(title, style=style)
        for line in word_sites_by_layer(sites):
            canvas.paragraph(line)


def _row(site: SiteContents) -> Row:
    return Row(cells=_cells(site), style=_style(site))


def _cells(site: SiteContents) -> tuple[str, ...]:
    found = site.statistics
    figures = tuple(map(word_figure, (found.mean, found.std, found.min, found.max)))
    shape = word_shape(site.shape)
    return site.site, shape, site.dtype, *figures, str(found.num_nan), str(found.num_inf)


def _style(*sites: SiteContents) -> str:
    return "red" if any(site.num_nonfinite for site in sites) else ""
