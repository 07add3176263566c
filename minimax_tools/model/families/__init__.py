"""The families that mm2 knows, each a description in its own file.

- `dots1`: two shared experts in one, a dense first layer
- `glm4_moe`: a shared expert, a dense first layer, biases, a scale of the routing weights
- `minimax_m2`: MiniMax-M2, whose graph is the measure of all others
- `minimax_m3`: gains of 1 + weight, SwiGLU-OAI, a shared expert, dense layers, attention to blocks
- `qwen3_moe`: norms of queries and keys per head, a router with softmax
- `mixtral`: no norms of queries and keys, a router with softmax
- `olmoe`: norms over all heads, a router with softmax
- `solar_open`: no norms of queries and keys, a shared expert
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from minimax_tools.model.families.dots1 import DOTS1
from minimax_tools.model.families.glm4_moe import GLM4_MOE
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.families.minimax_m3 import MINIMAX_M3
from minimax_tools.model.families.mixtral import MIXTRAL
from minimax_tools.model.families.olmoe import OLMOE
from minimax_tools.model.families.qwen3_moe import QWEN3_MOE
from minimax_tools.model.families.solar_open import SOLAR_OPEN
from minimax_tools.model.family import Family

FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        family.model_type: family
        for family in (MINIMAX_M2, MINIMAX_M3, QWEN3_MOE, GLM4_MOE, OLMOE, DOTS1, MIXTRAL, SOLAR_OPEN)
    }
)


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family that a config.json names; MiniMax-M2 if it names none that mm2 knows."""
    return FAMILIES.get(str(config.get("model_type")), MINIMAX_M2)
