"""SiteModules: the modules whose first outputs are sites, as another tool names them.

The names are those of transformers' MiniMax-M2, from which such a tool makes its own reference captures. A port may use
others: `moe_delta=model.layers.{layer}.block_sparse_moe`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from minimax_tools.errors import UsageError
from minimax_tools.model.sites import ModelSite, Site

_LAYER = "{layer}"

# Sites that no module returns as its first output are not here: residuals, inputs, rotated heads, chosen experts.
_TRANSFORMERS_MODULES: Mapping[Site | ModelSite, str] = MappingProxyType(
    {
        Site.INPUT_NORM: "model.layers.{layer}.input_layernorm",
        Site.Q_PROJ: "model.layers.{layer}.self_attn.q_proj",
        Site.K_PROJ: "model.layers.{layer}.self_attn.k_proj",
        Site.V_PROJ: "model.layers.{layer}.self_attn.v_proj",
        Site.Q_NORM: "model.layers.{layer}.self_attn.q_norm",
        Site.K_NORM: "model.layers.{layer}.self_attn.k_norm",
        Site.ATTN_DELTA: "model.layers.{layer}.self_attn",
        Site.POST_NORM: "model.layers.{layer}.post_attention_layernorm",
        Site.ROUTER_LOGITS: "model.layers.{layer}.mlp.gate",
        Site.MOE_DELTA: "model.layers.{layer}.mlp",
        Site.OUTPUT: "model.layers.{layer}",
        ModelSite.EMBEDDING: "model.embed_tokens",
        ModelSite.FINAL_NORM: "model.norm",
        ModelSite.LOGITS: "lm_head",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SiteModules:
    """The module of each site that is a module's first output."""

    # Paths of modules, with `{layer}` for the number of the layer
    paths: Mapping[Site | ModelSite, str] = field(default_factory=lambda: _TRANSFORMERS_MODULES)

    @classmethod
    def parse(cls, texts: Iterable[str]) -> SiteModules:
        """Read texts like `moe_delta=model.layers.{layer}.block_sparse_moe`; other sites keep their usual modules.

        Raises:
            UsageError: A text names no such site, or a module that cannot be that site's; or two sites have one module.
        """
        paths = dict(_TRANSFORMERS_MODULES)
        for text in texts:
            name, _, path = (part.strip() for part in text.partition("="))
            site = next((site for site in paths if site == name), None)
            if site is None:
                raise UsageError(
                    f"--module {text}: {name!r} is not the first output of a module",
                    expected="SITE=MODULE with one of " + ", ".join(paths),
                )
            if not _is_path_of(site, path):
                raise UsageError(
                    f"--module {text} names no module of {site}",
                    expected=f"{site}={_TRANSFORMERS_MODULES[site]}, or another module of that kind",
                )
            paths[site] = path
        _refuse_one_path_for_two(paths)
        return cls(paths=paths)

    def find(self, site: str, layer: int | None) -> str | None:
        """Return the module of the site of this name, such as `model.layers.7.mlp`; None if no module returns it.

        `layer` is None outside the layers.
        """
        return next(
            (path.replace(_LAYER, str(layer)) for own, path in self.paths.items() if own == site), None
        )


def _is_path_of(site: Site | ModelSite, path: str) -> bool:
    """Decide whether a path can be a site's module: it has a layer's number exactly if the site has a layer."""
    parts = path.replace(_LAYER, "0").split(".")
    is_path = all(part.isidentifier() or part.isdecimal() for part in parts)
    return is_path and path.count(_LAYER) == (1 if isinstance(site, Site) else 0)


def _refuse_one_path_for_two(paths: Mapping[Site | ModelSite, str]) -> None:
    owners: dict[str, Site | ModelSite] = {}
    for site, path in paths.items():
        first = owners.setdefault(path, site)
        if first is not site:
            raise UsageError(
                f"--module gives {first} and {site} one module",
                found=path,
                next_step="Name another module for one of them.",
            )
