"""The catalogue: every known mistake within a layer, by name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from compare.catalogue.attention import ATTENTION_MISTAKES
from compare.catalogue.experts import EXPERT_MISTAKES
from compare.catalogue.misread import MISREAD_MISTAKES
from compare.catalogue.mistake import Mistake
from compare.catalogue.norms import NORM_MISTAKES
from compare.catalogue.rope import ROPE_MISTAKES
from compare.catalogue.router import ROUTER_MISTAKES
from compare.catalogue.tokens import TOKEN_MISTAKES
from compare.catalogue.words import Place, read_words

_BUILT = {
    mistake.name: mistake
    for mistake in (
        *NORM_MISTAKES,
        *ROPE_MISTAKES,
        *ATTENTION_MISTAKES,
        *ROUTER_MISTAKES,
        *EXPERT_MISTAKES,
        *TOKEN_MISTAKES,
        *MISREAD_MISTAKES,
    )
}
# If two mistakes explain an output alike, the earlier one is named first.
CATALOGUE: Mapping[str, Mistake] = MappingProxyType({name: _BUILT[name] for name in read_words(Place.LAYER)})
