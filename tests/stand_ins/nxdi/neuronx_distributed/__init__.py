"""A stand-in for neuronx-distributed (NxD) on one rank: what `nxdi:` calls of it, behaving as NxD 0.18 does."""

from __future__ import annotations

import sys

from neuronx_distributed import modes

sys.modules["neuronx_distributed.utils"] = modes
