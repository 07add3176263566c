"""Dumps: the contents of another tool's capture as text and JSON, and a map to fill in.

A map says which tensor of the dump holds which site.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from minimax_tools.capture.source import CaptureSource, DumpListing, ListedTensor
from minimax_tools.dumps.name_map import INPUT_IDS
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.span import word_layers
from minimax_tools.printable import printable, printable_values
from reports.canvas import Canvas, Row, columns
from reports.data import to_json
from reports.wording import word_shape

_COLUMNS = columns("<tensor", "<layers", "<shape", "<dtype", "passes", "ranks", "<site")
# Shapes, and dtypes, that a tensor's line shows.
_MOST_SHAPES = 2
# Passes of the model (a prompt, then each decoded token) that a dump's head shows.
_MOST_PASSES = 4

_MAP_HEAD = """\
# A map of {directory}, for --map.
# A place is MODULE, then, where needed, :input or :output (the default) and which of several, [START:STOP] to cut each
# rank's tensor along its last dim, and @shard(DIM), @replicate or @partial for how ranks' pieces make it up, as in
# "layers.{{layer}}.self_attn.qkv_proj:output[0][0:768]@shard(-1)". Terms are added up by {{sum: [PLACE, PLACE]}}.
format: {format}
# ranks: {num_ranks}
# steps: {steps}
# lengths: [48, 33]  # real tokens of each prompt; else the golden's
# padding: right
# Below, what a token holds at each site, to know it by: H hidden, N heads, K kv heads, D head_dim, E experts, k chosen
# ones, V vocabulary.
sites:"""
# Tokens' contents at each site, for the map's lines; its head explains the letters.
_WIDTHS: dict[Site | ModelSite | str, str] = {
    **dict.fromkeys(Site, "H"),
    Site.INPUT: "H, the layer's input",
    Site.ATTN_DELTA: "H, what attention adds to the residual stream",
    Site.ATTN_RESIDUAL: "H, the stream with that",
    Site.MOE_DELTA: "H, what the experts add to it",
    Site.OUTPUT: "H, the stream with that",
    **dict.fromkeys((Site.Q_PROJ, Site.Q_NORM), "N*D"),
    Site.ATTN_CONTEXT: "N*D, the input of attention's output projection",
    **dict.fromkeys((Site.K_PROJ, Site.V_PROJ, Site.K_NORM), "K*D"),
    **dict.fromkeys((Site.Q_ROPE, Site.K_ROPE), "heads, then tokens, then D"),
    Site.ROUTER_LOGITS: "E",
    **dict.fromkeys((Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS), "k"),
    ModelSite.EMBEDDING: "H",
    ModelSite.FINAL_NORM: "H",
    ModelSite.LOGITS: "V",
    INPUT_IDS: "one number",
}


def dump_record(source: CaptureSource, listing: DumpListing) -> dict[str, Any]:
    """Return a dump as JSON: its tensors and the sites that they map to."""
    return {
        "directory": str(source.directory),
        "format": listing.format,
        "passes": list(listing.steps),
        "passes_read": [list(group) for group in listing.passes],
        "ranks": listing.num_ranks,
        "notes": list(source.notes),
        "tensors": [
            {"passes" if name == "steps" else name: value for name, value in to_json(tensor).items()}
            for tensor in listing.tensors
        ],
        "sites": [
            {"layer": layer, "sites": [str(site) for site in source.sites(layer)]} for layer in source.layers
        ],
        "model_sites": [str(site) for site in source.model_sites()],
    }


def draw_dump(canvas: Canvas, source: CaptureSource, listing: DumpListing) -> None:
    """Draw the tool that wrote a dump, a line for each of its tensors, and its notes."""
    canvas.line(f"Capture {source.directory}", style="bold")
    canvas.facts(
        [
            ("format", listing.format),
            ("ranks", str(listing.num_ranks)),
            ("passes", f"{len(listing.steps)}: {_first_few(listing.steps, _MOST_PASSES)}"),
            ("read", ", then ".join(" and ".join(group) for group in listing.passes)),
        ]
    )
    canvas.gap()
    rows = [
        Row(cells=_cells(tensor), style="" if tensor.sites else "yellow")
        for tensor in sorted(listing.tensors, key=lambda tensor: not tensor.sites)
    ]
    canvas.table(_COLUMNS, rows)
    if source.notes:
        canvas.gap()
        for note in source.notes:
            canvas.paragraph(note)
    canvas.gap()
    canvas.paragraph(
        "A map (--map FILE.yaml) says where the others lie: under sites, a site's name and one of the names above, "
        "such as q_proj: 'layers.{layer}.self_attn.qkv_proj:output[0][0:768]@shard(-1)'. "
        "--map-template prints one to fill in."
    )


def map_template_of(source: CaptureSource) -> str:
    """Return a map of a dump to fill in, with a line for every site that was not found.

    Raises:
        UsageError: The capture is not another tool's dump.
    """
    listing = source.listing()
    if listing is None:
        raise UsageError(
            f"{source.directory} was not written by another tool", next_step="Only others' dumps need a map."
        )
    return "\n".join(_template_lines(source, listing)) + "\n"


def _template_lines(source: CaptureSource, listing: DumpListing) -> Iterator[str]:
    yield _MAP_HEAD.format(
        directory=printable(str(source.directory), keep=""),
        format=listing.format,
        num_ranks=listing.num_ranks,
        steps=_word_passes(listing),
    )
    mapped_sites = {site for tensor in listing.tensors for site in tensor.sites}
    for site, width in _WIDTHS.items():
        if str(site) in mapped_sites:
            yield f"  # {site} was found"
        else:
            yield f'  # {site}: ""  # {width}'
    yield "# What the dump holds:"
    for tensor in sorted(listing.tensors, key=lambda tensor: bool(tensor.sites)):
        mapped = f"  ({', '.join(tensor.sites)})" if tensor.sites else ""
        yield f'#   "{printable(tensor.name, keep="")}"  {word_shape(tensor.shapes[0])} {tensor.dtypes[0]}{mapped}'


def _word_passes(listing: DumpListing) -> str:
    """Return the passes to read as a map's line names them, and what the line does."""
    if listing.joins_requests:
        return (
            "[[...]]  # passes to read; without this line they are joined by the requests that the dump tells"
        )
    passes = printable_values([list(group) for group in listing.passes])
    return f"{passes}  # the passes to read, an inner list for passes that follow each other"


def _cells(tensor: ListedTensor) -> tuple[str, ...]:
    layers = word_layers(tensor.layers).removeprefix("layers ").removeprefix("layer ") or "-"
    return (
        tensor.name,
        layers,
        _first_few([word_shape(shape) for shape in tensor.shapes], _MOST_SHAPES),
        _first_few(tensor.dtypes, _MOST_SHAPES),
        str(len(tensor.steps)),
        str(len(tensor.ranks)),
        ", ".join(tensor.sites) or "-",
    )


def _first_few(words: Sequence[str], most: int) -> str:
    return ", ".join(words[:most]) + (" …" if len(words) > most else "")
