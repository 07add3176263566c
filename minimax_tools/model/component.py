"""Component: a part of a layer that can run alone, and its border."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from minimax_tools.model.sites import Site
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
    computed: tuple[Site, ...]  # sites that it computes


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
            fed=(Site.POST_NORM, Site.ROUTER_EXPERTS, Site.ROUTER_WEIGHTS), computed=(Site.MOE_DELTA,)
        ),
        Component.MOE: Boundary(fed=(Site.POST_NORM,), computed=(*_ROUTER_SITES, Site.MOE_DELTA)),
        Component.INPUT_NORM: Boundary(fed=(Site.INPUT,), computed=(Site.INPUT_NORM,)),
        Component.POST_NORM: Boundary(fed=(Site.ATTN_RESIDUAL,), computed=(Site.POST_NORM,)),
    }
)
