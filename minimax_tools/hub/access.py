"""HubAccess: which hub is asked, what it is told, where its files are kept, and how patiently."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from minimax_tools.errors import CheckpointError


@dataclass(frozen=True, slots=True, kw_only=True)
class HubAccess:
    """Access to a hub: endpoint, token, cache and patience.

    Args:
        endpoint: Its address, without a slash at the end.
        cache_dir: The cache, in the layout that all programs over huggingface_hub share.
        token: The user's token; None for what huggingface_hub finds (`HF_TOKEN`, a saved login).
        is_offline: Nothing is asked of the hub: what is cached is used.
        timeout_s: Longest silence of the hub that is waited for.
        num_attempts: Failures in a row, with nothing received between them, that end a transfer.
        first_delay_s: Wait after the first failure; doubled after each.
        num_workers: Files that are fetched at once.
    """

    endpoint: str
    cache_dir: Path
    token: str | None = None
    is_offline: bool = False
    timeout_s: float = 10.0
    num_attempts: int = 5
    first_delay_s: float = 1.0
    num_workers: int = 4

    def __post_init__(self) -> None:
        if self.num_attempts < 1 or self.num_workers < 1:
            raise ValueError(f"{self.num_attempts} attempts with {self.num_workers} workers fetch nothing")

    @classmethod
    def from_environment(cls) -> HubAccess:
        """Read the access from huggingface_hub's variables (`HF_ENDPOINT`, `HF_HOME`, `HF_HUB_OFFLINE`, …).

        Raises:
            CheckpointError: huggingface_hub cannot be imported.
        """
        try:
            from huggingface_hub import constants
        except ImportError as error:
            raise CheckpointError(
                "a model of the hub needs the package huggingface_hub, which cannot be imported",
                found=str(error),
                next_step="Repair it with: pip install -U huggingface_hub, or give --model a folder.",
            ) from error
        return cls(
            endpoint=constants.ENDPOINT.rstrip("/"),
            cache_dir=Path(constants.HF_HUB_CACHE).expanduser(),
            is_offline=bool(constants.HF_HUB_OFFLINE),
            timeout_s=float(constants.HF_HUB_DOWNLOAD_TIMEOUT),
        )


def hub_tools() -> Any:
    """huggingface_hub.utils: its session, headers, lock and bars, whose types differ from version to version."""
    return importlib.import_module("huggingface_hub.utils")
