"""Extras: what the optional parts of mm2 need, as the command that installs it anywhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# As in pyproject.toml; the packages by name, because mm2 itself is not on the package index.
EXTRA_REQUIREMENTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"golden": ("accelerate>=1.0", "transformers>=5.23"), "xla": ("torch==2.9.*", "torch_xla==2.9.*")}
)


def install_command(extra: str) -> str:
    """The pip command that installs what `extra` needs."""
    return "pip install " + " ".join(f"'{requirement}'" for requirement in EXTRA_REQUIREMENTS[extra])
