"""A single run of a layer: its input, request and result.

A column is one index along the padded length of the batch. A pass computes S columns, after P earlier ones, the past.
It is made in one or more *calls* of the layer, each of some rows of the batch.
B batch, b rows of a call, H hidden, K kv heads, D head_dim.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from minimax_tools.capture.further import FurtherPlace
from minimax_tools.capture.manifest import HeldWeights
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.sites import Site
from neuron.builtin.layer import KeyValues


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTimes:
    """Wall time of one layer, or the sum of several, in seconds."""

    read_s: float = 0.0  # reading bytes from the disk or its cache
    regroup_s: float = 0.0  # making weights of these bytes: dequantising, converting dtypes, cutting, joining
    transfer_s: float = 0.0  # copying weights to the device
    compile_s: float = 0.0  # compiling graphs
    run_s: float = 0.0  # the forward passes, without compiling
    copy_back_s: float = 0.0  # copying the results to the host

    @property
    def total_s(self) -> float:
        """The sum of all phases."""
        return float(sum(dataclasses.astuple(self)))

    def by_phase(self) -> dict[str, float]:
        """Return the seconds of each phase, by its name in words, such as `copy back`."""
        return {
            name.removesuffix("_s").replace("_", " "): value
            for name, value in dataclasses.asdict(self).items()
        }

    @classmethod
    def combined(cls, times: Sequence[LayerTimes], combine: Callable[[list[float]], float]) -> LayerTimes:
        """Combine the times of several layers, phase by phase, by a function such as `sum`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: combine([getattr(layer, name) for layer in times]) for name in names})

    def __add__(self, other: LayerTimes) -> LayerTimes:
        return self.combined((self, other), sum)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerInput:
    """The input of one forward pass of a layer, on the CPU."""

    hidden_states: torch.Tensor  # hidden states [B,S,H] of this pass's columns
    attention_mask: torch.Tensor  # mask [B,P+S] of 0/1, the past's columns first
    position_ids: torch.Tensor  # positions [B,S] of this pass's columns
    # Rotated keys and values of earlier columns, [B,K,P,D] each; None without earlier columns.
    past: KeyValues | None = None

    def __post_init__(self) -> None:
        num_past = 0 if self.past is None else self.past[0].shape[2]
        expected = (self.batch_size, num_past + self.num_columns)
        if tuple(self.attention_mask.shape) != expected:
            raise ValueError(f"the mask is {list(self.attention_mask.shape)}, expected {list(expected)}")

    @classmethod
    def of(cls, hidden_states: torch.Tensor, inputs: Inputs) -> LayerInput:
        """Build the input of one pass over all columns of a batch."""
        return cls(
            hidden_states=hidden_states,
            attention_mask=inputs.attention_mask,
            position_ids=inputs.position_ids,
        )

    def in_rows(self, rows: Sequence[int]) -> LayerInput:
        """Return the input of these rows alone."""
        numbers = list(rows)
        return LayerInput(
            hidden_states=self.hidden_states[numbers],
            attention_mask=self.attention_mask[numbers],
            position_ids=self.position_ids[numbers],
            past=None if self.past is None else (self.past[0][numbers], self.past[1][numbers]),
        )

    def shifted(self, num_columns: torch.Tensor) -> LayerInput:
        """Return the input with each row moved to the left by so many columns, int64 [B]; only without a past."""
        assert self.past is None, "columns with a past are not moved"
        return LayerInput(
            hidden_states=_shift(self.hidden_states, num_columns, dim=1),
            attention_mask=_shift(self.attention_mask, num_columns, dim=1),
            position_ids=_shift(self.position_ids, num_columns, dim=1),
        )

    @property
    def num_padded_left(self) -> torch.Tensor:
        """The number of columns of padding before each row's first token: int64 [B]."""
        first: torch.Tensor = self.attention_mask.argmax(dim=1)
        return first

    @property
    def batch_size(self) -> int:
        """The batch size B."""
        return self.hidden_states.shape[0]

    @property
    def num_columns(self) -> int:
        """The number S of columns of this pass."""
        return self.hidden_states.shape[1]

    def first(self, num_columns: int) -> LayerInput:
        """Return the input of the first columns alone; only without a past."""
        assert self.past is None, "columns with a past are not cut"
        return LayerInput(
            hidden_states=self.hidden_states[:, :num_columns],
            attention_mask=self.attention_mask[:, :num_columns],
            position_ids=self.position_ids[:, :num_columns],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRequest:
    """A request to run one layer once."""

    layer: int
    layer_input: LayerInput  # the layer's input, which is not changed
    sites: tuple[Site, ...] = ()  # the sites to record
    further: tuple[FurtherPlace, ...] = ()  # further outputs to record, which are no sites
    # Golden values that replace what the port computes at these sites.
    border: Mapping[Site, torch.Tensor] = field(default_factory=dict)
    keeps_past: bool = False  # whether the port must return keys and values
    next_layer: int | None = None  # the layer that runs next, to be read ahead; None after the last
    # The rows of each call of the layer, all calls of one size. A row that several calls have counts in the last.
    # Empty: one call of all rows.
    calls: tuple[tuple[int, ...], ...] = ()

    def shifted(self, num_columns: torch.Tensor) -> LayerRequest:
        """Return the request with each row moved to the left by so many columns, int64 [B]."""
        border = {site: _shift_site(site, tensor, num_columns) for site, tensor in self.border.items()}
        return replace(self, layer_input=self.layer_input.shifted(num_columns), border=border)

    def by_call(self) -> Iterator[LayerRequest]:
        """Yield a request for each call."""
        if not self.calls:
            yield self
        for rows in self.calls:
            yield replace(
                self,
                layer_input=self.layer_input.in_rows(rows),
                border={site: tensor[list(rows)] for site, tensor in self.border.items()},
                calls=(),
            )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerRun:
    """The result of one run of a layer, on the CPU."""

    output: torch.Tensor  # the layer's output [B,S,H]
    tensors: Mapping[Site, torch.Tensor]  # the values of the sites asked for and exposed
    not_exposed: tuple[Site, ...]  # the sites asked for that the port does not expose
    # Dtypes of the router gate and of the correction bias as loaded, as far as they are found.
    router_dtypes: Mapping[str, str]
    # Rotated keys and values of this pass's columns, [B,K,S,D] each; None unless `keeps_past` was asked for.
    key_values: KeyValues | None = None
    further: Mapping[str, torch.Tensor] = field(default_factory=dict)  # further outputs by name
    # What the port holds of the layer's weights; None if they were not loaded for this run, or not compared.
    held_weights: HeldWeights | None = None
    # How often the port computed sites that it does not expose because their parts do not add up to the batch
    num_calls: Mapping[Site, int] = field(default_factory=dict)
    times: LayerTimes = field(default_factory=LayerTimes)  # time by phase

    def shifted(self, num_columns: torch.Tensor) -> LayerRun:
        """Return the run with each row moved to the left by so many columns, int64 [B]; further outputs stay."""
        return replace(
            self,
            output=_shift(self.output, num_columns, dim=1),
            tensors={site: _shift_site(site, tensor, num_columns) for site, tensor in self.tensors.items()},
            key_values=self.key_values
            and (
                _shift(self.key_values[0], num_columns, dim=2),
                _shift(self.key_values[1], num_columns, dim=2),
            ),
        )

    @classmethod
    def join(cls, runs: Sequence[LayerRun], calls: Sequence[Sequence[int]]) -> LayerRun:
        """Join the runs of several calls into one of all rows; a site that one call lacks is left out.

        A further output that begins neither with the call's rows nor with its tokens is the first call's.
        """
        first, num_columns = runs[0], runs[0].output.shape[1]
        rows = [row for call in calls for row in call]
        # Of a row that several calls have, the place in the last.
        places = [place for _, place in sorted({row: place for place, row in enumerate(rows)}.items())]

        def join(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
            lengths = {len(tensor) if tensor.ndim else 0 for tensor in tensors}
            if lengths == {len(calls[0]) * num_columns}:
                by_row = [tensor.unflatten(0, (-1, num_columns)) for tensor in tensors]
                return torch.cat(by_row)[places].flatten(0, 1)
            return torch.cat(list(tensors))[places] if lengths == {len(calls[0])} else tensors[0]

        def join_named(named: Sequence[Mapping[Any, torch.Tensor]]) -> dict[Any, torch.Tensor]:
            shown = [name for name in named[0] if all(name in of_call for of_call in named)]
            return {name: join([of_call[name] for of_call in named]) for name in shown}

        tensors = join_named([run.tensors for run in runs])
        left_out = [site for site in first.tensors if site not in tensors]
        pasts = [run.key_values for run in runs if run.key_values is not None]
        return replace(
            first,
            output=join([run.output for run in runs]),
            tensors=tensors,
            not_exposed=tuple(sorted((*first.not_exposed, *left_out), key=lambda site: site.order)),
            key_values=(join([keys for keys, _ in pasts]), join([values for _, values in pasts]))
            if pasts
            else None,
            further=join_named([run.further for run in runs]),
            num_calls={site: number for run in runs for site, number in run.num_calls.items()},
            times=sum((run.times for run in runs), LayerTimes()),
        )


def _shift_site(site: Site, tensor: torch.Tensor, num_columns: torch.Tensor) -> torch.Tensor:
    """Move the rows of a site's tensor; one of an unlikely shape, which the comparison will refuse, stays."""
    dim = 2 if site.has_heads_dim else 1
    has_rows = tensor.ndim > dim and len(tensor) == len(num_columns)
    return _shift(tensor, num_columns, dim=dim) if has_rows else tensor


def _shift(tensor: torch.Tensor, num_columns: torch.Tensor, *, dim: int) -> torch.Tensor:
    """Move each row of [B,…] to the left along `dim`; the columns that leave it on the left come in on the right."""
    shifts = zip(tensor, num_columns.tolist(), strict=True)
    return torch.stack([row.roll(-shift, dims=dim - 1) for row, shift in shifts])
