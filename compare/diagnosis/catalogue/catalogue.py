"""The catalogue: every known mistake within a layer, by name."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType

from compare.diagnosis.catalogue.attention import ATTENTION_MISTAKES
from compare.diagnosis.catalogue.experts import EXPERT_MISTAKES
from compare.diagnosis.catalogue.experts_by_number import EXPERT_NUMBER_MISTAKES
from compare.diagnosis.catalogue.fp8 import FP8_MISTAKES
from compare.diagnosis.catalogue.norms import NORM_MISTAKES
from compare.diagnosis.catalogue.other_layer import OTHER_LAYER_MISTAKES, RESIDUAL_MISTAKES
from compare.diagnosis.catalogue.rope import ROPE_MISTAKES, ROPE_POSITION_MISTAKES
from compare.diagnosis.catalogue.router import ROUTER_MISTAKES
from compare.diagnosis.catalogue.tokens import TOKEN_MISTAKES
from compare.diagnosis.mistake import Mistake
from minimax_tools.errors import UsageError, did_you_mean

# If two mistakes explain an output alike, the earlier one is named first.
CATALOGUE: Mapping[str, Mistake] = MappingProxyType(
    {
        mistake.name: mistake
        for mistake in (
            *NORM_MISTAKES,
            *ROPE_MISTAKES,
            *ROPE_POSITION_MISTAKES,
            *ATTENTION_MISTAKES,
            *RESIDUAL_MISTAKES,
            *ROUTER_MISTAKES,
            *EXPERT_MISTAKES,
            *EXPERT_NUMBER_MISTAKES,
            *TOKEN_MISTAKES,
            *FP8_MISTAKES,
            *OTHER_LAYER_MISTAKES,
        )
    }
)


def find_mistakes(names: tuple[str, ...], *, also: Collection[str] = ()) -> tuple[Mistake, ...]:
    """Find the mistakes of these names; all of the catalogue if no name is given.

    Names in `also`, those of the mistakes outside the layers, are allowed and passed over.

    Raises:
        UsageError: A name is neither in the catalogue nor in `also`.
    """
    unknown = [name for name in names if name not in CATALOGUE and name not in also]
    if unknown:
        near = did_you_mean(unknown[0], (*CATALOGUE, *also))
        raise UsageError(
            f"no mistake is called {unknown[0]!r}",
            next_step=f"{near} mm2-diagnose --list shows the catalogue.".strip(),
        )
    if not names:
        return tuple(CATALOGUE.values())
    return tuple(CATALOGUE[name] for name in names if name in CATALOGUE)
