"""Words of the known mistakes, from `mistakes.toml`: names, sentences and the places where they act, without torch."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minimax_tools.errors import UsageError, did_you_mean
from minimax_tools.model.family import Family
from minimax_tools.model.graph import ModelGraph, QkNorm, RouterScores
from minimax_tools.text_enum import TextEnum
from reports.canvas import Canvas, Column, Row

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_FILE = Path(__file__).with_name("mistakes.toml")


class Place(TextEnum):
    """Place where a mistake acts."""

    LAYER = "layer"
    OUTSIDE = "outside"  # the embedding, the final norm or the logits
    DECODING = "decoding"  # what the decoded tokens of a layer read
    CACHE = "cache"  # what a layer's cache holds
    RUN = "run"  # the order of the layers, the stream between them, the chosen tokens, earlier prompts


# Options of a graph in words, by name and value.
_OPTIONS: Mapping[tuple[str, str | bool], str] = MappingProxyType(
    {
        ("qk_norm", str(QkNorm.ALL_HEADS)): "norms over all heads",
        ("qk_norm", str(QkNorm.PER_HEAD)): "norms per head",
        ("router_scores", str(RouterScores.SIGMOID)): "sigmoid",
        ("router_scores", str(RouterScores.SOFTMAX)): "softmax",
        ("has_float32_router", True): "float32 router",
        ("has_correction_bias", True): "correction bias",
        ("normalises_shares", True): "weights of sum 1",
        ("normalises_shares", False): "weights of any sum",
        ("has_gain_of_one_plus", True): "gains of 1 + weight",
        ("has_gain_of_one_plus", False): "gains of weight",
        ("has_qkv_bias", True): "biases of q, k and v",
        ("has_shared_experts", True): "shared experts",
        ("has_mlps", True): "shared experts or dense layers",
        ("has_sum_scale", True): "scaled routed sum",
        ("has_swiglu_oai", True): "SwiGLU-OAI",
        ("has_swiglu_oai", False): "plain SwiGLU",
    }
)
# Places whose mistakes a user may choose by name.
_CHOSEN = (Place.LAYER, Place.OUTSIDE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Words:
    """A known mistake in words."""

    name: str
    what: str = ""  # sentence that says what the port does
    look_at: str = ""  # place to look at in the port's code
    sources: tuple[str, ...] = ()  # public threads that report the mistake, as `repository#thread`
    # Options, by name, that a graph must have for it to be a mistake; a model with others may compute so.
    graph: Mapping[str, str | bool] = field(default_factory=dict)

    def fits(self, graph: ModelGraph) -> bool:
        """Decide whether it is a mistake in a model of a graph."""
        return graph.has(self.graph)

    def of(self, family: Family) -> Words:
        """Return the words as they are of a family's model."""
        return replace(self, what=family.retell(self.what), look_at=family.retell(self.look_at))

    @property
    def models(self) -> str:
        """Options of the models in which it is a mistake, in words; "" for all."""
        return ", ".join(_OPTIONS[option, value] for option, value in self.graph.items())


def read_words(place: Place) -> Mapping[str, Words]:
    """Read the known mistakes of a place by name, in the order in which they are listed and named."""
    return _read_file()[place]


@cache
def _read_file() -> Mapping[Place, Mapping[str, Words]]:
    record: dict[str, dict[str, dict[str, Any]]] = tomllib.loads(_FILE.read_text(encoding="utf-8"))
    return {
        place: {
            name: Words(
                name=name,
                what=entry["what"],
                look_at=entry["look_at"],
                sources=tuple(entry.get("sources", ())),
                graph=MappingProxyType(entry.get("graph", {})),
            )
            for name, entry in record[place].items()
        }
        for place in Place
    }


def words_of(name: str, place: Place) -> Words:
    """Return a mistake in words; a description of a port that is no known mistake has none."""
    return read_words(place).get(name) or Words(name=name)


def require_known(names: tuple[str, ...], *, places: tuple[Place, ...] = _CHOSEN) -> None:
    """Refuse names that no mistake of some places has.

    Raises:
        UsageError: A name is unknown.
    """
    known = [name for place in places for name in read_words(place)]
    unknown = [name for name in names if name not in known]
    if unknown:
        near = did_you_mean(unknown[0], known)
        raise UsageError(
            f"no mistake is called {unknown[0]!r}",
            next_step=f"{near} mm2-diagnose --list shows the catalogue.".strip(),
        )


def require_fitting(names: tuple[str, ...], graph: ModelGraph) -> None:
    """Refuse names of mistakes that are none in a model of a graph.

    Raises:
        UsageError: What a name says may be right in this model.
    """
    for name in names:
        words = next((words for words in _listed() if words.name == name), None)
        if words is not None and not words.fits(graph):
            raise UsageError(
                f"{name} is no mistake in this model",
                expected=f"a model with {words.models}",
                next_step="mm2-diagnose --list tells the models of each mistake.",
            )


def catalogue_record() -> dict[str, Any]:
    """Return the catalogue as JSON."""
    return {
        "mistakes": [
            {
                "mistake": words.name,
                "what": words.what,
                "look_at": words.look_at,
                "sources": list(words.sources),
                "models": words.models,
            }
            for words in _listed()
        ]
    }


def render_catalogue() -> str:
    """Render the catalogue as a table."""
    canvas = Canvas()
    columns = [
        Column(title="mistake", is_text=True),
        Column(title="of models with", is_text=True),
        Column(title="what the port does", is_text=True, is_broken=True),
    ]
    canvas.table(columns, [Row(cells=(words.name, words.models, words.what)) for words in _listed()])
    return canvas.text


def _listed() -> list[Words]:
    return [words for place in _CHOSEN for words in read_words(place).values()]
