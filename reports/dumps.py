"""Dumps: what another tool's directory holds, and to which site each tensor maps: what one needs to write a map."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from minimax_tools.dumps.capture import ForeignCapture
from minimax_tools.dumps.piece import DumpPiece, find_layer, word_module
from reports.canvas import Canvas, Column, Row
from reports.wording import word_layers, word_shape

_COLUMNS = (
    Column(title="tensor", is_text=True),
    Column(title="layers", is_text=True),
    Column(title="shape", is_text=True),
    Column(title="dtype", is_text=True),
    Column(title="passes"),
    Column(title="ranks"),
    Column(title="site", is_text=True),
)
_MOST_SHAPES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """The pieces of one name, in all layers, passes and ranks.

    Args:
        name: As a map's places have it, `{layer}` for the number.
        pieces: All of them.
        sites: The sites that they map to.
    """

    name: str
    pieces: tuple[DumpPiece, ...]
    sites: tuple[str, ...]

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that hold it, ascending."""
        numbers = {find_layer(piece.module) for piece in self.pieces}
        return tuple(sorted(number for number in numbers if number is not None))

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Its shapes, each once."""
        return tuple(dict.fromkeys(piece.shape for piece in self.pieces))

    @property
    def dtypes(self) -> tuple[str, ...]:
        """Its dtypes, each once."""
        return tuple(dict.fromkeys(piece.dtype for piece in self.pieces))

    @property
    def steps(self) -> tuple[str, ...]:
        """The passes that hold it."""
        return tuple(dict.fromkeys(piece.step for piece in self.pieces))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that wrote it."""
        return tuple(sorted({piece.rank for piece in self.pieces}))


def dump_record(source: ForeignCapture) -> dict[str, Any]:
    """A dump as JSON: its tensors, those that differ in their layer alone as one, and what they map to."""
    return {
        "directory": str(source.directory),
        "format": source.dump.format,
        "passes": list(source.dump.steps),
        "passes_read": [list(group) for group in source.findings.passes],
        "ranks": source.findings.num_ranks,
        "notes": list(source.notes),
        "tensors": [
            {
                "name": line.name,
                "layers": list(line.layers),
                "shapes": [list(shape) for shape in line.shapes],
                "dtypes": list(line.dtypes),
                "passes": list(line.steps),
                "ranks": list(line.ranks),
                "sites": list(line.sites),
            }
            for line in list_lines(source)
        ],
        "sites": [
            {"layer": layer, "sites": [str(site) for site in source.sites(layer)]} for layer in source.layers
        ],
        "model_sites": [str(site) for site in source.model_sites()],
    }


def render_dump(source: ForeignCapture, *, width: int | None = None, is_terminal: bool | None = None) -> str:
    """A dump as text: what wrote it, and a line for each tensor, those that differ in their layer alone as one.

    Args:
        source: The dump.
        width: Columns; None for standard output's own.
        is_terminal: Whether escape codes are understood; None where standard output decides.
    """
    canvas = Canvas(width=width, is_terminal=is_terminal)
    canvas.line(f"Capture {source.directory}", style="bold")
    passes = source.dump.steps
    read = ", then ".join(" and ".join(group) for group in source.findings.passes)
    facts = [
        ("format", source.dump.format),
        ("ranks", str(source.findings.num_ranks)),
        ("passes", f"{len(passes)}: {', '.join(passes[:4])}{' …' if len(passes) > 4 else ''}"),
        ("read", read),
    ]
    canvas.facts(facts)
    canvas.gap()
    rows = [
        Row(cells=_cells(line), style="" if line.sites else "yellow")
        for line in sorted(list_lines(source), key=lambda line: not line.sites)
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
    return canvas.text


def list_lines(source: ForeignCapture) -> list[Line]:
    """A line for each name, those that differ in their layer alone as one."""
    sites: dict[tuple[str, str, str], dict[str, None]] = defaultdict(dict)
    for (_, site), found in source.findings.sites.items():
        for term in found.terms:
            for piece in term.pieces.values():
                sites[_key(piece)][str(site)] = None
    pieces: dict[tuple[str, str, str], list[DumpPiece]] = defaultdict(list)
    for piece in source.dump.pieces:
        pieces[_key(piece)].append(piece)
    return [
        Line(name=_name(key), pieces=tuple(of_key), sites=tuple(sites.get(key, ())))
        for key, of_key in pieces.items()
    ]


def _key(piece: DumpPiece) -> tuple[str, str, str]:
    return word_module(piece.module), piece.point, piece.element


def _name(key: tuple[str, str, str]) -> str:
    module, point, element = key
    return f"{module}:{point}[{element}]" if element else f"{module}:{point}"


def _cells(line: Line) -> tuple[str, ...]:
    layers = word_layers(line.layers).removeprefix("layers ").removeprefix("layer ") if line.layers else "-"
    return (
        line.name,
        layers,
        _some([word_shape(shape) for shape in line.shapes]),
        _some(line.dtypes),
        str(len(line.steps)),
        str(len(line.ranks)),
        ", ".join(line.sites) or "-",
    )


def _some(words: Iterable[str]) -> str:
    shown = list(words)
    return ", ".join(shown[:_MOST_SHAPES]) + (" …" if len(shown) > _MOST_SHAPES else "")
