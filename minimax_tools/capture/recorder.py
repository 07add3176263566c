"""Recorder: hooks that keep the tensors at a module's sites while it runs, or replace them.

A site whose module runs several times in one forward is joined if the calls make up the batch, in its order:

| a call holds | for example |
|---|---|
| whole rows: [b,S,F], [b,N,S,D] | attention row by row |
| columns of every row: [B,s,F], [B,N,s,D] | a long prompt in chunks |
| tokens: [t,F], [1,t,F], [t,N,D], [1,N,t,D] | experts over chunks of all tokens, or of such columns |

Where tokens may be consecutive or columns of every row, the inputs of the calls tell: they are rows of a tensor that
was recorded whole. B batch, S sequence, F channels, N heads, D head_dim; b, s and t are parts of B, S and B·S.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import chain, pairwise
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from minimax_tools.capture.taps import Keep, Tap
from minimax_tools.errors import TargetError
from minimax_tools.model.site_layouts import are_equal_bits
from minimax_tools.model.sites import ModelSite, Site

logger = logging.getLogger(__name__)
# Channels of a call's input that are kept, to find its rows in other tensors.
NUM_TRACED = 8
# Sites of a layer, or those around the layers.
SiteKind = TypeVar("SiteKind", Site, ModelSite)
# Torch neither compares nor indexes these on a CPU.
_WIDE_UNSIGNED = (torch.uint16, torch.uint32, torch.uint64)


class Calls(NamedTuple):
    """The calls of one site in one forward, in their order."""

    tensors: tuple[torch.Tensor, ...]  # what the site showed in each
    # The first channels of what the module was given in each call behind the first, [...,NUM_TRACED]
    inputs: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class CallPlan:
    """The calls that make up a site, and how."""

    numbers: tuple[int, ...]  # the calls that count, in their order
    dim: int = 0  # the dim along which they are concatenated
    # Whether each holds columns of all rows, flat: [B·s,…].
    is_of_columns: bool = False

    def join(self, tensors: Sequence[torch.Tensor], batch_size: int) -> torch.Tensor:
        """Join the tensors of all calls to [B,…], or to [B·S,…]."""
        counted = [tensors[number] for number in self.numbers]
        if len(counted) == 1:
            return counted[0]
        if self.is_of_columns:
            parts = [_flat(tensor, self.dim).unflatten(0, (batch_size, -1)) for tensor in counted]
            return torch.cat(parts, dim=1)
        joined = torch.cat(counted, dim=self.dim)
        is_one_row = self.dim > 0 and batch_size > 1 and joined.shape[0] == 1
        return _flat(joined, self.dim) if is_one_row else joined


def plan_calls(sites: Mapping[Site, Calls], batch_shape: tuple[int, int]) -> dict[Site, CallPlan]:
    """Plan how the calls of each site make up the batch [B,S]; no plan if they do not, or in an unknown order."""
    whole = [
        calls.tensors[0]
        for site, calls in sites.items()
        if len(calls.tensors) == 1 and not site.has_heads_dim
    ]
    plans = {
        site: next(_plans(site, calls.tensors, batch_shape, inputs=calls.inputs, whole=whole), None)
        for site, calls in sites.items()
    }
    return {site: plan for site, plan in plans.items() if plan is not None}


def join_calls(sites: Mapping[Site, Calls], batch_shape: tuple[int, int]) -> dict[Site, torch.Tensor]:
    """Join the calls of each site of a batch [B,S]; a site whose calls do not make it up is left out."""
    return {
        site: plan.join(sites[site].tensors, batch_shape[0])
        for site, plan in plan_calls(sites, batch_shape).items()
    }


def _plans(
    site: Site,
    tensors: Sequence[torch.Tensor],
    batch_shape: tuple[int, int],
    *,
    inputs: Sequence[torch.Tensor],
    whole: Sequence[torch.Tensor],
) -> Iterator[CallPlan]:
    for numbers in _without_repeats(tensors):
        if len(numbers) == 1:
            if len(tensors) == 1 or _is_whole(tensors[0], batch_shape):
                yield CallPlan(numbers=numbers)
            return
        counted = [tensors[number] for number in numbers]
        plans = [
            CallPlan(numbers=numbers, dim=dim, is_of_columns=is_of_columns)
            for dim, is_of_columns in _ways(site, counted, batch_shape)
        ]
        if len(plans) > 1:
            plans = [plan for plan in plans if _fits(plan, tensors, inputs, whole, batch_shape)]
        if len(plans) == 1:
            yield plans[0]


def _without_repeats(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[int, ...]]:
    """Yield all calls; those that differ from the one before; then the first of several equal rounds of these."""
    yield tuple(range(len(tensors)))
    unlike = [0]
    unlike += [
        later
        for earlier, later in pairwise(range(len(tensors)))
        if not are_equal_bits(tensors[earlier], tensors[later])
    ]
    yield tuple(unlike)
    for length in range(2, len(unlike) // 2 + 1):
        rounds = zip(unlike, unlike[length:], strict=False)
        if len(unlike) % length == 0 and all(
            are_equal_bits(tensors[number], tensors[again]) for number, again in rounds
        ):
            yield tuple(unlike[:length])


def _is_whole(tensor: torch.Tensor, batch_shape: tuple[int, int]) -> bool:
    """Decide whether a call may hold all tokens, of one head or of several."""
    return (tensor.numel() // tensor.shape[-1]) % (batch_shape[0] * batch_shape[1]) == 0


def _ways(
    site: Site, tensors: Sequence[torch.Tensor], batch_shape: tuple[int, int]
) -> Iterator[tuple[int, bool]]:
    """Yield the ways in which calls add up to the batch: the dim to join, and whether they hold columns, flat."""
    batch_size, length = batch_shape
    num_dims, dtypes = {tensor.ndim for tensor in tensors}, {tensor.dtype for tensor in tensors}
    flat_dims = 3 if site.has_heads_dim else 2
    if len(dtypes) > 1 or num_dims not in ({flat_dims}, {flat_dims + 1}):
        return
    if num_dims == {flat_dims}:
        yield from _ways_of_tokens(tensors, 0, batch_shape)
        return
    # Heads may lie before the tokens or behind them.
    for dim in (2, 1) if site.has_heads_dim else (1,):
        if all(tensor.shape[dim] == length for tensor in tensors):
            if _adds_up(tensors, 0, batch_size):
                yield 0, False
        elif all(tensor.shape[0] == batch_size for tensor in tensors):
            if _adds_up(tensors, dim, length):
                yield dim, False
        elif all(tensor.shape[0] == 1 for tensor in tensors):
            yield from _ways_of_tokens(tensors, dim, batch_shape)


def _ways_of_tokens(
    tensors: Sequence[torch.Tensor], dim: int, batch_shape: tuple[int, int]
) -> Iterator[tuple[int, bool]]:
    batch_size, length = batch_shape
    if not _adds_up(tensors, dim, batch_size * length):
        return
    yield dim, False
    if batch_size > 1 and all(tensor.shape[dim] % batch_size == 0 for tensor in tensors):
        yield dim, True


def _adds_up(tensors: Sequence[torch.Tensor], dim: int, num_rows: int) -> bool:
    """Decide whether tensors have so many rows along `dim` together, and else one shape."""
    others = {(*tensor.shape[:dim], *tensor.shape[dim + 1 :]) for tensor in tensors}
    return len(others) == 1 and sum(tensor.shape[dim] for tensor in tensors) == num_rows


def _fits(
    plan: CallPlan,
    tensors: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    whole: Iterable[torch.Tensor],
    batch_shape: tuple[int, int],
) -> bool:
    """Decide whether the inputs of the calls behind the first, joined by the plan, are the rows of a whole tensor."""
    if len(inputs) != len(tensors) - 1:
        return False
    later = [inputs[number - 1].flatten(0, -2).float() for number in plan.numbers[1:]]
    num_rows = [tensors[number].shape[plan.dim] for number in plan.numbers]
    if [len(given) for given in later] != num_rows[1:]:
        return False
    first = later[0].new_full((num_rows[0], later[0].shape[-1]), torch.nan)
    by_tokens = CallPlan(numbers=tuple(range(len(later) + 1)), is_of_columns=plan.is_of_columns)
    rows = by_tokens.join([first, *later], batch_shape[0]).flatten(0, -2)
    return any(_begins_with(tensor, rows) for tensor in whole)


def _begins_with(tensor: torch.Tensor, rows: torch.Tensor) -> bool:
    """Decide whether the first channels of a tensor's rows are `rows` [T,NUM_TRACED], as far as these are known."""
    if not tensor.is_floating_point() or tensor.ndim < 2 or tensor.numel() != len(rows) * tensor.shape[-1]:
        return False
    flat = tensor.flatten(0, -2)[:, : rows.shape[1]].float()
    return flat.shape == rows.shape and bool(((flat == rows) | rows.isnan()).all())


def _flat(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """Return [1,t,F] and [1,N,t,D], whose tokens lie along `dim`, with the tokens in front; dim 0 is there already."""
    return tensor if dim == 0 else tensor[0].movedim(dim - 1, 0)


def copy_to_host(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the CPU, out of reach of later in-place operations."""
    return tensor.detach().to("cpu", copy=True)


def copy_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a tensor on its device, which leaves the graph of a lazy device whole."""
    return tensor.detach().clone()


def require_values(tensor: torch.Tensor, *, what: str) -> None:
    """Raise TargetError unless a tensor of a port is dense and has values; `what` names it."""
    if tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_quantized:
        return
    kinds = {torch.strided: "a quantised tensor", torch.sparse_coo: "a sparse tensor"}
    found = "a tensor on the meta device" if tensor.is_meta else kinds.get(tensor.layout, f"{tensor.layout}")
    raise TargetError(
        f"{what} cannot be compared",
        expected="a dense tensor with values",
        found=found,
        next_step="Return tensor.to_dense() or tensor.dequantize(), of weights that are loaded.",
    )


def with_signed(tensor: torch.Tensor) -> torch.Tensor:
    """Return wide unsigned integers, as MLX and JAX number experts, as int64; other dtypes as they are."""
    return tensor.to(torch.int64) if tensor.dtype in _WIDE_UNSIGNED else tensor


class Recorder(Generic[SiteKind]):
    """Hooks on a module for the time of a `with` block.

    Args:
        taps: Place of each site: a submodule of `module`, and which of its inputs or outputs.
        keep: `copy_to_host` or `copy_on_device`; copies a tensor when its hook fires.
        feeds: Tensors that replace the module's own at some sites, brought to the shape, dtype and device of those.
            Columns that the module has beyond them, padding of a bucket, stay its own.

    Attributes:
        tensors: The copies by site, as far as the module has run since the block began, or since `start`. Of a site
            that it computed several times, the last.
    """

    def __init__(
        self,
        module: torch.nn.Module,
        taps: Mapping[SiteKind, Tap],
        *,
        keep: Keep,
        feeds: Mapping[SiteKind, torch.Tensor] | None = None,
    ) -> None:
        self._module = module
        self._taps: dict[SiteKind, Tap] = dict(taps)
        self._keep = keep
        self._feeds: dict[SiteKind, torch.Tensor] = dict(feeds or {})
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self.tensors: dict[SiteKind, torch.Tensor] = {}
        # Copies of a site before the last, and of the first channels of each call's input.
        self._earlier: dict[SiteKind, list[torch.Tensor]] = {}
        self._inputs: dict[SiteKind, list[torch.Tensor]] = {}

    def start(self, feeds: Mapping[SiteKind, torch.Tensor]) -> None:
        """Forget the copies of an earlier run, and replace the module's own tensors by `feeds` from now on."""
        self.tensors, self._earlier, self._inputs = {}, {}, {}
        self._feeds = dict(feeds)

    def calls(self) -> dict[SiteKind, Calls]:
        """Return all copies of each site that the module computed, on the device that they are kept on."""
        calls: dict[SiteKind, Calls] = {}
        for site, last in self.tensors.items():
            tensors = tuple(chain(self._earlier.get(site, []), (last,)))
            calls[site] = Calls(tensors=tensors, inputs=tuple(self._inputs.get(site, [])))
        return calls

    def change(self, changed: Callable[[SiteKind, torch.Tensor], torch.Tensor]) -> None:
        """Replace each copy by what `changed` makes of it."""
        for site, last in self.tensors.items():
            self._earlier[site] = [changed(site, tensor) for tensor in self._earlier.get(site, ())]
            self.tensors[site] = changed(site, last)

    def record(self, site: SiteKind, tensor: torch.Tensor) -> None:
        """Keep a tensor that a hook cannot see.

        Raises:
            TargetError: The tensor is sparse, quantised or on the meta device.
        """
        require_values(tensor, what=f"the port's tensor at {site}")
        if site in self.tensors:
            self._earlier.setdefault(site, []).append(self.tensors[site])
        self.tensors[site] = self._keep(with_signed(tensor))

    def __enter__(self) -> Recorder[SiteKind]:
        # Look up all submodules before the first hook: a missing one leaves no hooks behind.
        submodules = {site: self._module.get_submodule(tap.path) for site, tap in self._taps.items()}
        for site, tap in self._taps.items():
            self._handles.append(self._hook(submodules[site], site, tap))
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _hook(
        self, submodule: torch.nn.Module, site: SiteKind, tap: Tap
    ) -> torch.utils.hooks.RemovableHandle:
        if tap.point == "input":
            return submodule.register_forward_pre_hook(self._pre_hook(site, tap), with_kwargs=True)
        return submodule.register_forward_hook(self._post_hook(site, tap), with_kwargs=True)

    def _pre_hook(self, site: SiteKind, tap: Tap) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            # A tap's index counts positional arguments first, and then keyword arguments, in one tuple.
            replaced = self._visit(site, tap, (*args, *kwargs.values()))
            if replaced is None:
                return None
            return replaced[: len(args)], dict(zip(kwargs, replaced[len(args) :], strict=True))

        return hook

    def _post_hook(self, site: SiteKind, tap: Tap) -> Callable[..., Any]:
        def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
            if site in self.tensors:
                self._trace_input(site, (*args, *kwargs.values()))
            return self._visit(site, tap, output)

        return hook

    def _trace_input(self, site: SiteKind, args: tuple[Any, ...]) -> None:
        """Keep the first channels of what a module was given in a call behind its first."""
        given = next((value for value in args if isinstance(value, torch.Tensor)), None)
        if given is not None and given.ndim > 1:
            self._inputs.setdefault(site, []).append(given.detach()[..., :NUM_TRACED].clone())

    def _visit(self, site: SiteKind, tap: Tap, value: Any) -> Any:
        """Record the tapped tensor of `value`, a module's inputs or outputs, or the tensor that replaces it.

        The result is `value` with the replacement; None, as PyTorch's hooks want it, if nothing is replaced.
        """
        tapped = tap.pick(value)
        if tapped is None:
            elements = value if isinstance(value, (tuple, list)) else (value,)
            if tap.index >= len(elements):
                _warn_of_absence(
                    f"{site} is not shown: {tap} is asked for, and {tap.path} has {len(elements)}"
                )
            return None
        replacement = self._feeds.get(site)
        if replacement is None:
            self.record(site, tapped)
            return None
        replacement = _fit(site, replacement.to(device=tapped.device, dtype=tapped.dtype), tapped)
        self.record(site, replacement)
        return tap.put(value, replacement)


@cache
def _warn_of_absence(text: str) -> None:
    """Log once, and not for every layer, that a site's place is not there."""
    logger.warning("%s. Indices begin at 0.", text)


def shape_to_batch(
    site: Site, tensor: torch.Tensor, batch_shape: tuple[int, int], *, head_dim: int | None = None
) -> torch.Tensor:
    """Bring a site's tensor to [B, S, …] or [B, heads, S, D]; any other shape stays, for the comparison to judge.

    A port may show [B·S, …] and, where a site has heads, [B, S, heads, D] or [B·S, heads, D]; with `head_dim` also
    [B, S, heads·D] or [B·S, heads·D]. With as many heads as tokens, shapes do not tell [B, S, heads, D] from
    [B, heads, S, D]: the tensor stays, for whoever reads it beside a golden.
    """
    if site.has_heads_dim:
        return _put_heads_first(_split_heads(tensor, batch_shape, head_dim), batch_shape)
    tensor = _join_heads(site, tensor, batch_shape)
    # [B, S, …] with S = 1 has B·S in front too, and stays.
    if tensor.ndim >= 1 and tensor.shape[0] == math.prod(batch_shape) and tensor.shape[:2] != batch_shape:
        return tensor.reshape(*batch_shape, *tensor.shape[1:])
    return tensor


def _join_heads(site: Site, tensor: torch.Tensor, batch_shape: tuple[int, int]) -> torch.Tensor:
    """Return [B, S, heads, D], and of a norm [B, heads, S, D], as [B, S, heads·D]; any other shape stays.

    Norms of each head give them so. With as many heads as tokens, tokens come first.
    """
    if tensor.ndim != 4:
        return tensor
    if tensor.shape[:2] == batch_shape:
        return tensor.flatten(2)
    return tensor.transpose(1, 2).flatten(2) if _is_normed_by_head(site, tensor, batch_shape) else tensor


def _is_normed_by_head(site: Site | ModelSite, tensor: torch.Tensor, batch_shape: Sequence[int]) -> bool:
    """Decide whether a tensor is surely what a norm of queries or keys gives for each head: [B, heads, S, D]."""
    if site not in (Site.Q_NORM, Site.K_NORM) or tensor.ndim != 4:
        return False
    return tensor.shape[:3:2] == tuple(batch_shape) and tensor.shape[1] != batch_shape[1]


def puts_tokens_first(tensor: torch.Tensor, num_tokens: int) -> bool:
    """Decide whether a tensor is surely [B, S, heads, D], and not [B, heads, S, D]; `num_tokens` is S."""
    return tensor.ndim == 4 and tensor.shape[1] == num_tokens != tensor.shape[2]


def _split_heads(tensor: torch.Tensor, batch_shape: tuple[int, int], head_dim: int | None) -> torch.Tensor:
    """Return [B, S, heads·D] and [B·S, heads·D] with heads apart, and other shapes as they are."""
    leading = tuple(tensor.shape[:-1])
    if head_dim is None or leading not in (batch_shape, (math.prod(batch_shape),)):
        return tensor
    return tensor if tensor.shape[-1] % head_dim else tensor.unflatten(-1, (-1, head_dim))


def _put_heads_first(tensor: torch.Tensor, batch_shape: tuple[int, int]) -> torch.Tensor:
    """Return [B, S, heads, D] and [B·S, heads, D] as [B, heads, S, D], and other shapes as they are."""
    is_flat = tensor.ndim == 3 and tensor.shape[0] == math.prod(batch_shape)
    by_token = tensor.unflatten(0, batch_shape) if is_flat else tensor
    is_by_token = tuple(by_token.shape[:2]) == batch_shape and puts_tokens_first(by_token, batch_shape[1])
    return by_token.transpose(1, 2).contiguous() if is_flat or is_by_token else tensor


def _fit(site: Site | ModelSite, replacement: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
    """Return a replacement, [B,S,…] or [B,heads,S,D], in the shape of a tapped tensor.

    The columns of one without heads may be padded on the right.
    """
    if site.has_heads_dim and replacement.ndim == 4:
        return _fit_heads(site, replacement, tapped)
    if replacement.numel() == tapped.numel():
        if replacement.ndim == 3 and _is_normed_by_head(site, tapped, replacement.shape[:2]):
            heads: torch.Tensor = replacement.unflatten(-1, (-1, tapped.shape[-1]))
            return heads.transpose(1, 2).contiguous()
        return replacement.reshape(tapped.shape)
    if replacement.numel() > tapped.numel():
        raise TargetError(
            f"{site} cannot be replaced: the port computes it in parts",
            expected=f"the shape {list(replacement.shape)}",
            found=str(list(tapped.shape)),
            next_step="Run the whole layer: mm2-test single-layer.",
        )
    num_rows, num_columns, *rest = replacement.shape
    padded = tapped.reshape(num_rows, -1, *rest).clone()
    padded[:, :num_columns] = replacement
    return padded.reshape(tapped.shape)


def _fit_heads(site: Site | ModelSite, replacement: torch.Tensor, tapped: torch.Tensor) -> torch.Tensor:
    """Return a replacement [B,heads,S,D] in the layout that `shape_to_batch` reads from the tapped tensor."""
    batch_size, num_heads, num_tokens, head_dim = replacement.shape
    flat, whole = (batch_size * num_tokens,), (batch_size, num_tokens)
    forms = [(*flat, num_heads, head_dim), *((*first, num_heads * head_dim) for first in (flat, whole))]
    if num_heads != num_tokens:
        forms.append((*whole, num_heads, head_dim))
    if tapped.shape in forms:
        return replacement.transpose(1, 2).reshape(tapped.shape)
    # As many numbers in another order would be wrong values without a word.
    if (tapped.ndim == 4 and tapped.shape != replacement.shape) or tapped.numel() != replacement.numel():
        raise TargetError(
            f"{site} cannot be replaced",
            expected=f"the shape {list(replacement.shape)}, or tokens before heads",
            found=str(list(tapped.shape)),
            next_step="Show [B,heads,S,D] or [B,S,heads,D] there.",
        )
    return replacement.reshape(tapped.shape)
