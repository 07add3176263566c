"""Strict loading of a layer's weights into a module, on any device.

On the CPU, threads read all weights straight into the module. For another device, weights are read into host buffers,
and sent one after the other while the next ones are read. The buffers are kept for the next layer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import nn

from minimax_tools.checkpoint.filling import Deferred, Filling, Gathered, ReadingPool
from minimax_tools.errors import Mm2Error, TargetError, list_names

_NUM_NAMES_SHOWN = 8
# Limit of host buffers read ahead of the weight that is sent next. It trades host memory for reading during transfers.
_AHEAD_BYTES = 128 << 20


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Staged:
    """A weight whose host buffer is being filled."""

    weight: Gathered
    host: torch.Tensor  # the buffer
    filling: Filling  # the work of the threads that read into it


# A weight: its values; or a function that writes them into given memory, called by the loading thread (`Deferred`); or
# tensors of the checkpoint, each read by a thread of a `ReadingPool` into its place there (`Gathered`), or being read
# already (`Staged`).
Weight = torch.Tensor | Deferred | Gathered | Staged
Convert = TypeVar("Convert", bound=Callable[..., object])


def read_in_place(convert: Convert) -> Convert:
    """Mark a convert_state_dict: its weights are read into their storage, without a second layer in memory."""
    convert.reads_in_place = True  # type: ignore[attr-defined]
    return convert


def reads_in_place(convert: Callable[..., object]) -> bool:
    """Decide whether a convert_state_dict is marked by `read_in_place`."""
    return bool(getattr(convert, "reads_in_place", False))


class WeightLoader:
    """A loader of weights onto one `device`, read by `pool`. `wait` returns when everything sent has arrived there."""

    def __init__(self, device: torch.device, *, wait: Callable[[], None], pool: ReadingPool) -> None:
        self.device = device
        self._wait = wait
        self._pool = pool
        self._buffers = _Buffers()
        # Seconds spent so far on sending weights to the device.
        self.sending_s = 0.0
        # Looks at every weight, by name, on the host while it is sent; None to look at none.
        self.look: Callable[[str, torch.Tensor], None] | None = None

    def load(self, module: nn.Module, weights: dict[str, Weight], *, what: str) -> None:
        """Fill every parameter and persistent buffer of `module` and move it to the device.

        Each weight is cast to the dtype of its parameter or buffer; nothing else is cast. `weights` holds them by the
        module's names. Each is removed when it is loaded, to free its memory. `what` names the module in errors.

        Raises:
            TargetError: Names are missing or unexpected, or shapes differ: all are listed. Or a weight cannot be
                cast. Or a buffer that is no weight has no memory.
        """
        parameters = dict(module.state_dict(keep_vars=True))
        _refuse_misfits(parameters, weights, what=what)
        self._fill(module, parameters, weights, what=what)
        self._finish(module, what=what)

    def load_in_parts(
        self, module: nn.Module, parts: Iterable[tuple[str, dict[str, Weight]]], *, what: str
    ) -> None:
        """Fill `module` as `load` does, from weights that come in parts, such as layer by layer.

        A part is made when the parts before it are loaded and freed. It holds its name in words, and its weights.
        """
        unfilled = dict(module.state_dict(keep_vars=True))
        filled_by: dict[str, str] = {}
        for part, weights in parts:
            _refuse_repeated(weights, filled_by, part=part, what=what)
            filled_by.update(dict.fromkeys(weights, part))
            named = {name: unfilled.pop(name) for name in tuple(weights) if name in unfilled}
            _refuse_misfits(named, weights, what=f"{what}, {part}")
            self._fill(module, named, weights, what=f"{what}, {part}")
        _refuse_misfits(unfilled, {}, what=what)
        self._finish(module, what=what)

    def _fill(
        self, module: nn.Module, parameters: dict[str, torch.Tensor], weights: dict[str, Weight], *, what: str
    ) -> None:
        if self.device.type == "cpu":
            self._fill_in_place(module, parameters, weights, what=what)
        else:
            self._send(module, parameters, weights, what=what)

    def _finish(self, module: nn.Module, *, what: str) -> None:
        _refuse_empty(module, what=what)
        module.to(self.device)

    def begin(self, module: nn.Module, weights: dict[str, Weight]) -> None:
        """Begin to read the weights of a later `load`, while the device computes with the present ones.

        Each weight that is being read is replaced by its `Staged` form; the module is not changed. Do nothing on the
        CPU, where weights have no memory but the module's, and if weights do not fit, which `load` reports.
        """
        parameters = module.state_dict(keep_vars=True)
        if self.device.type == "cpu" or _find_misfits(parameters, weights):
            return
        for name, parameter in parameters.items():
            weights[name] = self._stage(weights[name], parameter)

    def abandon(self, weights: Mapping[str, Weight]) -> None:
        """Stop reading weights after `begin`: they will not be loaded."""
        for weight in weights.values():
            if isinstance(weight, Staged):
                weight.filling.abandon()

    def release(self) -> None:
        """Free the host buffers."""
        self._buffers.clear()

    def _fill_in_place(
        self, module: nn.Module, parameters: dict[str, torch.Tensor], weights: dict[str, Weight], *, what: str
    ) -> None:
        """Fill the module's own memory: threads read weights that are gathered, this thread fills the others."""
        fillings: dict[str, Filling] = {}
        try:
            for name, parameter in parameters.items():
                storage = _storage_of(module, name, parameter)
                weight = weights.pop(name)
                with _naming_weight(name, what=what):
                    if isinstance(weight, Gathered):
                        fillings[name] = self._pool.fill(weight.places(storage), weight.read)
                    elif isinstance(weight, Deferred):
                        weight.fill(storage)
                    else:
                        assert isinstance(weight, torch.Tensor), "weights are staged only off the CPU"
                        storage.copy_(weight)
            for name, filling in fillings.items():
                with _naming_weight(name, what=what):
                    filling.finish()
        finally:
            for filling in fillings.values():
                filling.abandon()

    def _send(
        self, module: nn.Module, parameters: dict[str, torch.Tensor], weights: dict[str, Weight], *, what: str
    ) -> None:
        """Send all weights in order. While one is sent, threads read those after it into host buffers."""
        waiting, staged = deque(parameters), deque[str]()
        try:
            while waiting or staged:
                while waiting and self._may_stage([weights[name] for name in staged], parameters[waiting[0]]):
                    name = waiting.popleft()
                    with _naming_weight(name, what=what):
                        weights[name] = self._stage(weights[name], parameters[name])
                    staged.append(name)
                name = staged.popleft()
                with _naming_weight(name, what=what):
                    self._send_one(module, name, weights.pop(name), parameters)
        finally:
            self.abandon(weights)

    def _may_stage(self, staged: list[Weight], parameter: torch.Tensor) -> bool:
        """Decide whether the weight of `parameter` may be read too, while those of `staged` are read or sent."""
        # The first one staged is sent next. One after it is always allowed, further ones as far as their bytes allow.
        ahead_bytes = sum(weight.host.nbytes for weight in staged[1:] if isinstance(weight, Staged))
        return len(staged) < 2 or ahead_bytes + parameter.nbytes <= _AHEAD_BYTES

    def _stage(self, weight: Weight, parameter: torch.Tensor) -> Weight:
        """Begin to read a weight, and return its staged form; `_send_one` takes other weights as they are."""
        if not isinstance(weight, Gathered):
            return weight
        host = self._buffers.take(parameter)
        return Staged(weight=weight, host=host, filling=self._pool.fill(weight.places(host), weight.read))

    def _send_one(
        self, module: nn.Module, name: str, weight: Weight, parameters: dict[str, torch.Tensor]
    ) -> None:
        parameter = parameters.pop(name)
        if isinstance(weight, torch.Tensor):
            host = weight.to("cpu", parameter.dtype)
        elif isinstance(weight, Staged):
            host = weight.host
            weight.filling.finish()
        else:
            host = self._buffers.take(parameter)
            weight.fill(host)
        # The device holds one layer, not two: after this only the module refers to the old tensor, until `_replace`.
        del parameter
        looking = self._pool.start([] if self.look is None else [partial(self.look, name, host)])
        _replace(module, name, lambda: self._move(host))
        looking.finish()
        if not isinstance(weight, torch.Tensor):
            # The memory came from `_buffers`.
            self._buffers.give(host)

    def _move(self, host: torch.Tensor) -> torch.Tensor:
        started = time.perf_counter()
        moved = host.to(self.device)
        # The host buffer is filled again for another weight: the transfer must have ended.
        self._wait()
        self.sending_s += time.perf_counter() - started
        return moved


class _Buffers:
    """Host buffers for reuse, by shape and dtype."""

    def __init__(self) -> None:
        self._idle: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = {}

    def take(self, parameter: torch.Tensor) -> torch.Tensor:
        idle = self._idle.get((parameter.shape, parameter.dtype))
        return idle.pop() if idle else torch.empty(parameter.shape, dtype=parameter.dtype)

    def give(self, buffer: torch.Tensor) -> None:
        self._idle.setdefault((buffer.shape, buffer.dtype), []).append(buffer)

    def clear(self) -> None:
        self._idle.clear()


def _storage_of(module: nn.Module, name: str, parameter: torch.Tensor) -> torch.Tensor:
    """Return the CPU memory behind a parameter; allocate it if the module was built without memory."""
    if not parameter.is_meta:
        return parameter.data
    storage = torch.empty(parameter.shape, dtype=parameter.dtype)
    _replace(module, name, lambda: storage)
    return storage


def _replace(module: nn.Module, name: str, make: Callable[[], torch.Tensor]) -> None:
    """Set a parameter or buffer to a new tensor, without checks or casts; the old one is freed first."""
    path, _, leaf = name.rpartition(".")
    owner = module.get_submodule(path)
    if leaf in owner._parameters:
        owner._parameters[leaf] = None
        owner._parameters[leaf] = nn.Parameter(make(), requires_grad=False)
    else:
        owner._buffers[leaf] = None
        owner._buffers[leaf] = make()


@contextmanager
def _naming_weight(name: str, *, what: str) -> Iterator[None]:
    try:
        yield
    except Mm2Error:
        raise
    except (Exception, SystemExit) as error:  # any error of a weight that a port made
        raise TargetError(
            f"{what}: the weight {name} cannot be loaded",
            found=f"{type(error).__name__}: {error}",
            next_step="Check what convert_state_dict returns for it; see --debug for the traceback.",
        ) from error


def _refuse_repeated(
    weights: Mapping[str, Weight], filled_by: Mapping[str, str], *, part: str, what: str
) -> None:
    """Raise if an earlier part gave a weight already: one of the two is lost."""
    repeated = [f"{name} ({filled_by[name]} and {part})" for name in weights if name in filled_by]
    if repeated:
        raise TargetError(
            f"{what}: convert_state_dict gives the same weight twice",
            expected="each name once",
            found=list_names(repeated, most=_NUM_NAMES_SHOWN),
            next_step="Use layer_idx in the names that it returns.",
        )


def _refuse_misfits(
    parameters: Mapping[str, torch.Tensor], weights: Mapping[str, Weight], *, what: str
) -> None:
    faults = _find_misfits(parameters, weights)
    if faults:
        raise TargetError(
            f"{what}: the weights do not fit the module",
            found="; ".join(faults),
            next_step="Give the port a convert_state_dict(tensors, config, layer_idx) that returns the "
            "module's own names and shapes.",
        )


def _find_misfits(parameters: Mapping[str, torch.Tensor], weights: Mapping[str, Weight]) -> list[str]:
    shapes = {name: _shape_of(weight) for name, weight in weights.items()}
    names_by_fault = {
        "missing": [name for name in parameters if name not in shapes],
        "unexpected": [name for name in shapes if name not in parameters],
        "no tensor": [name for name, shape in shapes.items() if shape is None and name in parameters],
        "of another shape": [
            f"{name} (expected {list(parameter.shape)}, found {list(shape)})"
            for name, parameter in parameters.items()
            if (shape := shapes.get(name)) is not None and shape != tuple(parameter.shape)
        ],
    }
    return [
        f"{len(names)} {fault}: {list_names(names, most=_NUM_NAMES_SHOWN)}"
        for fault, names in names_by_fault.items()
        if names
    ]


def _refuse_empty(module: nn.Module, *, what: str) -> None:
    """Raise if a buffer has no memory, and no weight filled it: the port must compute it."""
    empty = [name for name, buffer in module.named_buffers() if buffer.is_meta]
    if empty:
        raise TargetError(
            f"{what}: buffers that are no weights were built without memory",
            expected="values, or persistent buffers that convert_state_dict returns",
            found=f"device meta: {list_names(empty, most=_NUM_NAMES_SHOWN)}",
            next_step="Leave torch.device('meta') before computing them.",
        )


def _shape_of(weight: object) -> tuple[int, ...] | None:
    """Return a weight's shape; None for anything else that a port returned among its weights."""
    weight = weight.weight if isinstance(weight, Staged) else weight
    return tuple(weight.shape) if isinstance(weight, (torch.Tensor, Deferred, Gathered)) else None
