"""Run: the layers that are computed, their inputs and the sites that are kept; and the parts of a layer that run alone.

Each command that runs layers has a function below that builds its `Run`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from minimax_tools.errors import UsageError
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import DENSE_SITES, EXPERT_SITES, ModelSite, Site
from minimax_tools.model.span import Span
from minimax_tools.text_enum import TextEnum


class Component(TextEnum):
    """A part of a layer that can run alone."""

    ATTENTION = "attention"
    ROUTER = "router"
    EXPERTS = "experts"
    MOE = "moe"
    INPUT_NORM = "input_norm"
    POST_NORM = "post_norm"


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """The border of a component in its layer."""

    fed: tuple[Site, ...]  # sites at which it gets the golden's values
    computed: tuple[Site, ...]  # sites that it computes, as far as a layer has them


_ATTENTION_SITES = (
    Site.Q_PROJ,
    Site.K_PROJ,
    Site.V_PROJ,
    Site.Q_NORM,
    Site.K_NORM,
    Site.Q_ROPE,
    Site.K_ROPE,
    Site.ATTN_CONTEXT,
    Site.ATTN_DELTA,
)
_ROUTER_SITES = (Site.ROUTER_LOGITS, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS)

BOUNDARIES: Mapping[Component, Boundary] = MappingProxyType(
    {
        Component.ATTENTION: Boundary(fed=(Site.INPUT_NORM,), computed=_ATTENTION_SITES),
        Component.ROUTER: Boundary(fed=(Site.POST_NORM,), computed=_ROUTER_SITES),
        Component.EXPERTS: Boundary(
            fed=(Site.POST_NORM, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS),
            computed=(Site.ROUTED_DELTA, Site.SHARED_DELTA, Site.MOE_DELTA),
        ),
        Component.MOE: Boundary(fed=(Site.POST_NORM,), computed=(*EXPERT_SITES, *DENSE_SITES)),
        Component.INPUT_NORM: Boundary(fed=(Site.INPUT,), computed=(Site.INPUT_NORM,)),
        Component.POST_NORM: Boundary(fed=(Site.ATTN_RESIDUAL,), computed=(Site.POST_NORM,)),
    }
)


class Mode(TextEnum):
    """Source of a layer's input."""

    ISOLATED = "isolated"  # the golden's input of that layer
    CHAINED = "chained"  # the output of the layer before


class Extent(TextEnum):
    """The point at which a bisection ends."""

    FIRST = "first"  # the first finding that proves the port wrong
    ALL = "all"  # the last layer: the search goes on after every finding
    EXHAUSTIVE = "exhaustive"  # the last layer, and every layer runs alone


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """The plan of a run.

    Raises:
        UsageError: No site is kept, or a component is to decode.
        ValueError: The sites are not in execution order, or repeat.
    """

    name: str  # name of the capture directory, such as `single_layer_7`
    span: Span  # the layers that run
    mode: Mode  # source of each layer's input
    sites: tuple[Site, ...]  # sites of every layer to keep, in execution order
    model_sites: tuple[ModelSite, ...] = ()  # sites outside the layers to keep
    component: Component | None = None  # the only component of a layer that runs; None for whole layers
    # Number of tokens at each prompt's end that are decoded: computed one at a time, from cached keys and values. 0
    # computes all tokens at once.
    num_decoded: int = 0
    # Whether each prompt decodes its own last tokens, as a server does. False: all prompts decode the same columns of
    # the batch, chosen by `decoded_columns`.
    decodes_by_row: bool = False
    dense_layers: tuple[int, ...] = ()  # layers that have one MLP in place of experts, and its site

    def __post_init__(self) -> None:
        if self.num_decoded and self.component is not None:
            raise UsageError(
                "a component does not decode: it gets the golden's values for all tokens at once",
                next_step="Decode with mm2-test single-layer, or leave out --decode.",
            )
        if not self.sites:
            raise UsageError("a run keeps no site", next_step="Choose --sites layer, component or all.")
        if list(self.sites) != sorted(set(self.sites), key=lambda site: site.order):
            raise ValueError(f"sites are not in execution order: {self.sites}")

    @property
    def fed_sites(self) -> tuple[Site, ...]:
        """Sites that the run takes from the golden."""
        return BOUNDARIES[self.component].fed if self.component else (Site.INPUT,)

    @property
    def computed_sites(self) -> tuple[Site, ...]:
        """Kept sites that the run itself computes: only these can be judged."""
        return tuple(site for site in self.sites if site not in self.fed_sites)

    def sites_of(self, layer: int) -> tuple[Site, ...]:
        """Return the kept sites that a layer has."""
        others = EXPERT_SITES if layer in self.dense_layers else DENSE_SITES
        return tuple(site for site in self.sites if site not in others)

    def computed_sites_of(self, layer: int) -> tuple[Site, ...]:
        """Return the `computed_sites` that a layer has."""
        return tuple(site for site in self.sites_of(layer) if site not in self.fed_sites)

    def decoding(self, num_tokens: int) -> Run:
        """Return this run with the last `num_tokens` of each prompt decoded, and named so; unchanged for 0."""
        if num_tokens == 0:
            return self
        return replace(self, name=f"{self.name}_decode_{num_tokens}", num_decoded=num_tokens)

    def to_json(self) -> dict[str, Any]:
        """Return the run as a manifest holds it; `from_json` ignores `first_site` and `last_site`."""
        # Loaded here: `mm2-test component --help` names the components.
        from minimax_tools.json_codec import encode

        return {
            "name": self.name,
            "start_layer": self.span.start,
            "stop_layer": self.span.stop,
            "mode": encode(self.mode),
            "first_site": encode(self.sites[0]),
            "last_site": encode(self.sites[-1]),
            "sites": encode(self.sites),
            "model_sites": encode(self.model_sites),
            "component": encode(self.component),
            "decode_rows": self.num_decoded,
            # Absent if false, as of most runs.
            **({"decodes_by_row": True} if self.decodes_by_row else {}),
            # Absent for models without such layers.
            **({"dense_layers": list(self.dense_layers)} if self.dense_layers else {}),
        }

    @classmethod
    def from_json(cls, record: Mapping[str, Any]) -> Run:
        """Return the run that a manifest describes."""
        from minimax_tools.json_codec import decode_fields

        span = {"start": record["start_layer"], "stop": record["stop_layer"]}
        return decode_fields(cls, {**record, "span": span}, num_decoded="decode_rows")

    def __str__(self) -> str:
        decoded = f", last {self.num_decoded} tokens of each prompt decoded" if self.num_decoded else ""
        return f"{self.name} ({self.mode}, {self.span}{decoded})"


# The graph of the runs below, if no other is given.
_MINIMAX_M2 = ModelGraph()


def _layers_run(name: str, span: Span, mode: Mode, sites_level: str, graph: ModelGraph) -> Run:
    return Run(
        name=name, span=span, mode=mode, sites=graph.level(sites_level), dense_layers=graph.dense_layers
    )


def full_run(num_hidden_layers: int, *, sites_level: str, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of all layers, chained from the embedding to the logits."""
    run = _layers_run("full_model", Span(0, num_hidden_layers), Mode.CHAINED, sites_level, graph)
    return replace(run, model_sites=tuple(ModelSite))


def model_run(
    num_hidden_layers: int, *, sites_level: str, num_decoded: int, graph: ModelGraph = _MINIMAX_M2
) -> Run:
    """Return a run of a whole port: prefill, then the last `num_decoded` tokens of each prompt one at a time."""
    return replace(
        full_run(num_hidden_layers, sites_level=sites_level, graph=graph),
        name="whole_port",
        num_decoded=num_decoded,
        decodes_by_row=num_decoded > 0,
    )


def chunked_run(run: Run) -> Run:
    """Return the same run of a whole port with all tokens in chunks: passes of several tokens behind a cache."""
    return replace(run, name=f"{run.name}_chunks", num_decoded=0, decodes_by_row=False)


def single_layer_run(layer: int, *, sites_level: str, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of one layer, isolated. Where no golden gives its input, the layers before are computed first."""
    name, span = f"single_layer_{layer}", Span.single(layer)
    return _layers_run(name, span, Mode.ISOLATED, sites_level, graph)


def multi_layer_run(span: Span, *, sites_level: str, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of chained layers."""
    name = f"layers_{span.start}_to_{span.last}"
    return _layers_run(name, span, Mode.CHAINED, sites_level, graph)


def sweep_run(span: Span, *, sites_level: str, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of isolated layers, each on the golden's input."""
    name = f"sweep_{span.start}_to_{span.last}"
    return _layers_run(name, span, Mode.ISOLATED, sites_level, graph)


def bisect_run(span: Span, *, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of the layers that a bisection searches. Each probe chains some, from the golden's input."""
    name = f"bisect_{span.start}_to_{span.last}"
    return _layers_run(name, span, Mode.CHAINED, "layer", graph)


def whole_bisect_run(num_hidden_layers: int, *, num_decoded: int, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of a whole port whose stream is replaced, at another point in each of its runs."""
    return replace(
        model_run(num_hidden_layers, sites_level="layer", num_decoded=num_decoded, graph=graph),
        name="bisect_whole",
    )


def component_run(layer: int, component: Component, *, graph: ModelGraph = _MINIMAX_M2) -> Run:
    """Return a run of one component of a layer, from the golden's values."""
    boundary, held = BOUNDARIES[component], graph.layer(layer).sites
    if not set(boundary.fed) <= set(held):
        raise UsageError(
            f"layer {layer} has no {component}: it is dense",
            next_step="Choose another layer, or --component moe, which is its MLP.",
        )
    return Run(
        name=f"component_{layer}_{component}",
        span=Span.single(layer),
        mode=Mode.ISOLATED,
        sites=tuple(site for site in held if site in (*boundary.fed, *boundary.computed)),
        component=component,
        dense_layers=graph.dense_layers,
    )
