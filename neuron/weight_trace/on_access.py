"""OnAccess: tensors by name, each made when it is asked for and kept by nobody."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch


class OnAccess(Mapping[str, torch.Tensor]):
    """Tensors that are made anew at every access.

    Args:
        makers: What makes each, by name.
    """

    def __init__(self, makers: Mapping[str, Callable[[], torch.Tensor]]) -> None:
        self._makers = makers

    def __getitem__(self, name: str) -> torch.Tensor:
        """A tensor of one's own; KeyError where there is none of the name."""
        return self._makers[name]()

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)
