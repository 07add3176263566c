"""LocalStore: what the only rank of a run says to itself; torch's own store would need a torch that can do more."""

from __future__ import annotations

from collections.abc import Sequence


class LocalStore:
    """Texts by key, with the calls of torch's stores."""

    def __init__(self) -> None:
        self._values: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        """Keep a value."""
        self._values[key] = value

    def get(self, key: str) -> str:
        """A value that was kept."""
        return self._values[key]

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all of these were kept."""
        return all(key in self._values for key in keys)

    def add(self, key: str, amount: int) -> int:
        """Count, and give the count."""
        self._values[key] = str(int(self._values.get(key, "0")) + amount)
        return int(self._values[key])
