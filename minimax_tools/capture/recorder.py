"""Recorder: keeps the tensors at a module's sites while it runs, or feeds others in their place."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import torch

from minimax_tools.capture.taps import Tap
from minimax_tools.model.sites import Site

Keep = Callable[[torch.Tensor], torch.Tensor]


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on the CPU that later in-place operations cannot reach."""
    return tensor.detach().to("cpu", copy=True)


def copy_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """A copy that stays where it is: a lazy device's graph is not cut."""
    return tensor.detach().clone()


class Recorder:
    """Hooks on a module for the time of a `with` block.

    Args:
        module: The module whose sites are recorded.
        taps: Where each site shows.
        keep: How a tensor is kept when its hook fires.
        feeds: Tensors to feed at some sites instead of what the module computes there; reshaped and cast
            to what they replace.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        taps: Mapping[Site, Tap],
        *,
        keep: Keep,
        feeds: Mapping[Site, torch.Tensor] | None = None,
    ) -> None:
        self._module = module
        self._taps = dict(taps)
        self._keep = keep
        self._feeds = dict(feeds or {})
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.tensors: dict[Site, torch.Tensor] = {}

    def record(self, site: Site, tensor: torch.Tensor) -> None:
        """Keep a tensor that a hook cannot see."""
        self.tensors[site] = self._keep(tensor)

    def __enter__(self) -> Recorder:
        # All are looked up before the first hook is made: a missing one leaves none behind.
        submodules = {site: self._module.get_submodule(tap.path) for site, tap in self._taps.items()}
        for site, tap in self._taps.items():
            self._handles.append(self._hook(submodules[site], site, tap))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(self, submodule: torch.nn.Module, site: Site, tap: Tap) -> torch.utils.hooks.RemovableHandle:
        if tap.point == "input":
            return submodule.register_forward_pre_hook(self._pre_hook(site, tap), with_kwargs=True)
        return submodule.register_forward_hook(self._post_hook(site, tap))

    def _pre_hook(self, site: Site, tap: Tap) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            names = list(kwargs)
            values = (*args, *kwargs.values())
            replaced = self._visit(site, tap, values)
            if replaced is None:
                return None
            return replaced[: len(args)], dict(zip(names, replaced[len(args) :], strict=True))

        return hook

    def _post_hook(self, site: Site, tap: Tap) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, __: Any, output: Any) -> Any:
            return self._visit(site, tap, output)

        return hook

    def _visit(self, site: Site, tap: Tap, value: Any) -> Any:
        """Record the tapped tensor; the value to go on with where one is fed, else None."""
        found = tap.pick(value)
        if found is None:
            return None
        fed = self._feeds.get(site)
        if fed is None:
            self.record(site, found)
            return None
        fed = fed.to(device=found.device, dtype=found.dtype).reshape(found.shape)
        self.record(site, fed)
        return tap.put(value, fed)


def shape_to_batch(site: Site, tensor: torch.Tensor, batch_shape: tuple[int, int]) -> torch.Tensor:
    """A site's [B·S, …] as [B, S, …]; any other shape as it is, for the comparison to judge.

    Args:
        site: The site.
        tensor: As a submodule gave it.
        batch_shape: B and S.
    """
    if site.has_heads_dim:
        return tensor
    if tensor.ndim >= 1 and tensor.shape[0] == math.prod(batch_shape) and tensor.shape[:2] != batch_shape:
        return tensor.reshape(*batch_shape, *tensor.shape[1:])
    return tensor
