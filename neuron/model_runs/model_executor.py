"""ModelExecutor: runs passes of a whole port on a device, and records its sites.

Each of several ranks has an executor. The lead's sends its calls to the others, which `follow`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from minimax_tools.capture.recorder import Recorder, copy_on_device
from minimax_tools.checkpoint.filling import ReadingPool
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import TargetError
from minimax_tools.machine.memory import MemoryBudget
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import layer_bytes, vocabulary_bytes
from neuron.devices.runtime import Runtime
from neuron.devices.weights import WeightLoader
from neuron.model_runs.assembly import PassResult, join_rows
from neuron.model_runs.model_request import RankJoin
from neuron.model_runs.passes import Pass
from neuron.ports.cpu_mode import CLASSES, ModelClasses, for_the_device, is_cpu_mode
from neuron.ports.exposure import ModelExposure, find_model_exposure, router_dtypes
from neuron.ports.returned import (
    CUT_TOKENS,
    JOIN_TOKENS,
    KEEPS_CACHE,
    MODEL_PAST,
    PREFILLS_BY_ROW,
    REPLACE_STREAM,
    TAKES_CHUNKS,
    ModelResult,
    parse_result,
    past_argument,
    require_decoding,
)
from neuron.ports.target import ModelBatch, ModelTarget, PortEndError, eager_module, port_errors
from neuron.process.status import doing
from neuron.runs.port_setup import ModelSetup, RankExecutor

_RUN_STEP = (
    "It is called as module(input_ids, attention_mask, position_ids, …); see --debug for the traceback."
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassRequest:
    """A request to run one pass."""

    model_pass: Pass
    is_first: bool  # whether a new batch begins: no past is given
    records: bool = True  # whether to keep the sites and the cache
    # Layer whose input is replaced by a tensor, [B,s,H]; the number of layers for what the final norm is given; None to
    # replace nothing.
    fed: tuple[int, torch.Tensor] | None = None
    # Whether the port may refuse the pass: then all ranks stay as they are, ready for the next one.
    may_be_refused: bool = False


class PassRefusedError(TargetError):
    """A port's refusal of a pass that it need not take."""


def follow_passes(
    runtime: Runtime,
    *,
    folder: Path,
    kind: type[ModelTarget],
    name: str,
    dtype: torch.dtype,
    sites: tuple[Site, ...],
    batch: ModelBatch | None,
    budget_bytes: int | None,
) -> None:
    """Run this rank's part of every pass that the lead runs, in a setup like the lead's, until its block ends."""
    setup = ModelSetup(
        target=kind.find_again(name),
        spec=ModelSpec.from_folder(folder),
        model_source=str(folder),
        folder=folder,
        dtype=dtype,
        sites=sites,
        budget=MemoryBudget(budget_bytes),
    )
    with (
        CheckpointReader(folder) as reader,
        ModelExecutor(setup, batch=batch, runtime=runtime, reader=reader) as executor,
    ):
        executor.follow()


class ModelExecutor(RankExecutor):
    """A whole port in memory. A context manager, whose threads and hooks end with the block."""

    def __init__(
        self,
        setup: ModelSetup,
        *,
        runtime: Runtime,
        reader: CheckpointReader,
        batch: ModelBatch | None = None,
    ) -> None:
        self.setup = setup
        self._batch = batch
        self.runtime = runtime
        self._reader = reader
        self._what = f"port {setup.target.name}"
        self._stack = ExitStack()
        self._calls: list[int] = []
        self._past: object = None

    def _order_to_follow(self) -> Callable[[Runtime], None]:
        return partial(
            follow_passes,
            folder=self.setup.folder,
            kind=type(self.setup.target),
            name=self.setup.target.name,
            dtype=self.setup.dtype,
            sites=self.setup.sites,
            batch=self._batch,
            budget_bytes=self.setup.budget.limit_bytes,
        )

    def _close(self) -> None:
        self._stack.close()

    def _open(self) -> None:
        """Build the port, load its weights, and hook its sites, once: a compiled graph keeps its first hooks."""
        setup, runtime = self.setup, self.runtime
        setup.budget.require(self._weight_bytes(), "the weights of the whole port")
        self.module = setup.target.build(
            setup.spec, dtype=setup.dtype, batch=self._batch, ranks=runtime.ranks
        )
        pool = ReadingPool(torch.get_num_threads())
        self._stack.callback(pool.close)
        loader = WeightLoader(runtime.device, wait=runtime.synchronise, pool=pool)
        setup.target.load(
            self.module, self._reader, setup.spec, dtype=setup.dtype, loader=loader, ranks=runtime.ranks
        )
        loader.release()
        eager = eager_module(self.module)
        self.exposure: ModelExposure = find_model_exposure(
            eager, num_layers=setup.spec.num_hidden_layers, graph=setup.spec.graph, what=self._what
        )
        self.router_dtypes = router_dtypes(eager)
        # Recorders know `Site`; the sites outside the layers are recorded the same way.
        self._model_recorder = self._stack.enter_context(
            Recorder(eager, self.exposure.taps, keep=copy_on_device)
        )
        self._recorders = []
        for index, layer in enumerate(self.exposure.layers):
            taps = {
                site: tap for site, tap in self.exposure.exposures[index].taps.items() if site in setup.sites
            }
            self._recorders.append(self._stack.enter_context(Recorder(layer, taps, keep=copy_on_device)))
            handle = layer.register_forward_pre_hook(self._call_hook(index))
            self._stack.callback(handle.remove)
        self._join = RankJoin(
            setup,
            runtime=runtime,
            exposure=self.exposure,
            recorders=self._recorders,
            model_recorder=self._model_recorder,
        )

    def num_calls(self, layer: int) -> Mapping[Site, int]:
        """Return how often a pass computed sites of a layer that are not shown, as their parts do not add up to it."""
        return self._join.num_calls.get(layer, {})

    def _weight_bytes(self) -> int:
        """Return the host memory that the weights of this rank take, if the ranks divide them evenly."""
        spec, dtype = self.setup.spec, self.setup.dtype
        outside_bytes = 2 * vocabulary_bytes(spec, dtype)
        if self.runtime.backend.is_neuron:
            # A device has memory of its own: the host holds what is converted at a time.
            return max(outside_bytes, layer_bytes(spec, dtype))
        num_bytes = outside_bytes + spec.num_hidden_layers * layer_bytes(spec, dtype)
        return num_bytes // self.runtime.ranks.degree

    def _call_hook(self, index: int) -> Any:
        def note_call(_: nn.Module, __: Any) -> None:
            self._calls.append(index)

        return note_call

    @property
    def classes(self) -> ModelClasses | None:
        """Classes of the port's submodules, and those that the device gets; None if the port does not tell them."""
        eager = eager_module(self.module)
        found = getattr(eager, CLASSES, None)
        if isinstance(found, ModelClasses):
            return found
        # Ranks would have to build together.
        if self.runtime.ranks.are_several or not is_cpu_mode():
            return None
        setup = self.setup
        with for_the_device(), torch.device("meta"):
            try:
                there = setup.target.build(setup.spec, dtype=setup.dtype, batch=self._batch)
            except TargetError:
                return ModelClasses.compare(eager, None)
        return ModelClasses.compare(eager, eager_module(there))

    @property
    def tokens_first(self) -> frozenset[Site]:
        """Sites with heads that the port shows as [B,s,heads,D], as far as its passes tell."""
        return frozenset(self._join.tokens_first)

    @property
    def takes_chunks(self) -> bool:
        """False if the port says that it takes no pass of several tokens behind a cache."""
        return getattr(eager_module(self.module), TAKES_CHUNKS, True) is not False

    @property
    def keeps_cache(self) -> bool:
        """True if the port keeps the keys and values of earlier passes itself."""
        return bool(getattr(eager_module(self.module), KEEPS_CACHE, False))

    @property
    def replaces_itself(self) -> bool:
        """True if the port replaces its stream itself: then no hook sees whether it did."""
        return getattr(eager_module(self.module), REPLACE_STREAM, None) is not None

    def run(self, request: PassRequest) -> PassResult:
        """Run one pass on all ranks.

        Raises:
            PassRefusedError: The port raised in a pass that it may refuse.
            TargetError: The port raised, returned no logits, or cannot decode.
        """
        self.send(partial(ModelExecutor._follow_pass, request=request))
        result = self._run_part(request)
        assert result is not None, "the lead assembles the parts of all ranks"
        return result

    def _follow_pass(self, request: PassRequest) -> None:
        with suppress(PassRefusedError):
            self._run_part(request)

    def _run_part(self, request: PassRequest) -> PassResult | None:
        with doing(f"at work on port {self.setup.target.name}", is_in_port=False):
            is_prefill = request.model_pass.number == 0
            if is_prefill and getattr(eager_module(self.module), PREFILLS_BY_ROW, False):
                return self._prefill_rows(request)
            return self._forward_and_join(request)

    def _prefill_rows(self, request: PassRequest) -> PassResult | None:
        results = []
        for row in range(request.model_pass.batch_shape[0]):
            fed = request.fed and (request.fed[0], request.fed[1][row : row + 1])
            row_pass = request.model_pass.in_rows(torch.tensor([row]))
            is_first = request.is_first and row == 0
            results.append(
                self._forward_and_join(replace(request, model_pass=row_pass, is_first=is_first, fed=fed))
            )
        of_lead = [result for result in results if result is not None]
        return join_rows(of_lead) if of_lead else None

    def _forward_and_join(self, request: PassRequest) -> PassResult | None:
        model_pass = request.model_pass
        self._model_recorder.start({})
        for recorder in self._recorders:
            recorder.start({})
        self._calls.clear()
        with torch.no_grad(), self._feeding(request):
            result = self._forward_or_refuse(request) if request.may_be_refused else self._forward(request)
        self.runtime.synchronise()
        logits = self._join.join_logits(result.logits)
        tokens = None if result.tokens is None else result.tokens.to("cpu")
        if not request.records:
            return None if logits is None else PassResult(logits=logits, tokens=tokens)
        self._join_tokens()
        layers, model = self._join.join_sites(result, model_pass.batch_shape)
        cache = self._join.join_cache(eager_module(self.module), self._past)
        if logits is None:
            # Only the lead gets the joined tensors.
            return None
        return PassResult(
            logits=logits,
            tokens=tokens,
            layers=layers,
            model=model,
            cache=cache,
            layer_calls=tuple(self._calls),
        )

    @contextmanager
    def _feeding(self, request: PassRequest) -> Iterator[None]:
        if request.fed is None:
            yield
            return
        point, states = request.fed
        eager = eager_module(self.module)
        replace_stream = getattr(eager, REPLACE_STREAM, None)
        if replace_stream is not None:
            replace_stream(point, states.to(self.runtime.device))
            yield
            replace_stream(None, None)
            return
        cut_tokens = getattr(eager, CUT_TOKENS, None)
        if cut_tokens is not None and request.model_pass.number == 0:
            states = cut_tokens(states)
        with self._feed_recorder(point, states) as recorder:
            yield
        if not recorder.tensors:
            raise TargetError(
                f"{self._what} did not take the stream that was to replace its own at point {point}",
                expected="a port whose layers are called as modules",
                found="a layer that never ran, or one within a compiled graph",
                next_step=f"Give the port the method {REPLACE_STREAM}(layer, states): see docs/whole-ports.md.",
            )

    def _feed_recorder(self, point: int, states: torch.Tensor) -> Recorder[Site]:
        layers = self.exposure.layers
        if not layers:
            raise TargetError(
                f"{self._what} does not show its layers: none can run alone",
                next_step="Name the list of layers in the port's `sites`, as scripts/examples/model_port.py has it; or "
                f"give it the method {REPLACE_STREAM}(layer, states).",
            )
        index, site = (point, Site.INPUT) if point < len(layers) else (len(layers) - 1, Site.OUTPUT)
        tap = self.exposure.exposures[index].taps[site]
        return Recorder(layers[index], {site: tap}, keep=copy_on_device, feeds={site: states})

    def _forward_or_refuse(self, request: PassRequest) -> ModelResult:
        """Call the port; raise PassRefusedError on all ranks if it raised on one."""
        result, refusal = None, None
        try:
            result = self._forward(request)
            self.runtime.synchronise()
        except PortEndError:
            raise
        except TargetError as error:
            refusal = error.found or error.what
        messages = self.runtime.messages
        # Only the lead gets the others' refusals.
        refusals = [found for found in messages.gather(refusal) if found is not None]
        self.send(refusals)
        refusals = refusals if self.runtime.ranks.is_lead else messages.receive()
        if refusals or result is None:
            raise PassRefusedError(f"{self._what} does not take the pass", found=refusals[0])
        return result

    def _forward(self, request: PassRequest) -> ModelResult:
        """Call the port, and keep what it returns as past."""
        model_pass, device = request.model_pass, self.runtime.device
        eager = eager_module(self.module)
        if model_pass.number:
            require_decoding(eager, what=self._what)
        inputs: dict[str, Any] = {
            "input_ids": model_pass.input_ids.to(device, copy=True),
            "attention_mask": model_pass.attention_mask.to(device, copy=True),
            "position_ids": model_pass.position_ids.to(device, copy=True),
        }
        if request.is_first:
            self._past = None
        elif (past_name := past_argument(eager)) is not None and self._past is not None:
            inputs[past_name] = self._past
        elif not getattr(eager, KEEPS_CACHE, False):
            raise TargetError(
                f"{self._what} cannot decode: it returned no {MODEL_PAST}",
                expected=f"(logits, {MODEL_PAST}), or keeps_cache = True on a port that keeps its cache",
                found="none",
                next_step="Return them from the prefill on, or give --decode 0.",
            )
        num_rows, num_columns = model_pass.batch_shape
        num_cached = model_pass.attention_mask.shape[1] - num_columns
        activity = (
            f"running port {self.setup.target.name} on token ids [{num_rows}, {num_columns}]"
            f"{f' behind a cache of {num_cached}' if num_cached else ''}"
        )
        with port_errors(f"{self._what} failed while it ran", activity=activity, next_step=_RUN_STEP):
            returned = self.module(**inputs)
        result = parse_result(returned, model_pass.batch_shape, what=self._what)
        self._past = result.past
        return result

    def _join_tokens(self) -> None:
        """Join recorded sites of a port that divides the tokens of a pass among ranks."""
        join_tokens = getattr(eager_module(self.module), JOIN_TOKENS, None)
        if join_tokens is None:
            return
        recorders: list[Recorder[Any]] = [self._model_recorder, *self._recorders]
        for recorder in recorders:
            recorder.change(lambda site, tensor: tensor if site.has_heads_dim else join_tokens(tensor))
