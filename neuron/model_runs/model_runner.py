"""ModelRun: carries out a run of a whole port, from its first pass to the capture.

The passes are a prefill and decoding steps that are fed the golden's own tokens. Then the same prompts run once more in
other rows of the batch, as prefill and free generation: a cache that keeps something of earlier prompts shows there.
Last, the prompts run in chunks, passes of several tokens behind a cache, which the port may refuse.
B prompts, S columns of the golden's batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from minimax_tools.capture.manifest import Description
from minimax_tools.capture.passes import (
    CHUNKS_FOLDER,
    GENERATION_NAME,
    PASSES_NAME,
    Generation,
    ModelPasses,
    Repeated,
    Repetition,
    pass_name,
)
from minimax_tools.capture.resumption import clear_capture
from minimax_tools.capture.store import DEVICE_SIDE
from minimax_tools.capture.writer import CaptureWriter, open_capture
from minimax_tools.checkpoint.fingerprint import fingerprint_model
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.json_codec import encode
from minimax_tools.machine.progress import NoProgress, Progress
from minimax_tools.model.run import chunked_run, single_layer_run
from minimax_tools.model.site_layouts import are_equal_bits
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.text.tokenizer import decode_if_possible, read_end_tokens, until_end
from neuron.devices.runtime import Runtime
from neuron.model_runs.assembly import (
    PassResult,
    assemble_logits,
    assemble_site,
    find_misplaced,
    last_logits,
    list_choices,
    logits_form,
)
from neuron.model_runs.cache_record import CacheRecord
from neuron.model_runs.model_executor import ModelExecutor, PassRefusedError, PassRequest
from neuron.model_runs.model_request import ModelRequest
from neuron.model_runs.passes import Pass, next_pass, plan_chunks
from neuron.model_runs.repetition import compare_logits, other_rows, repeat_run
from neuron.ports.target import ModelBatch
from neuron.runs.device_request import refuse_other_model

# The chunk, counted from 0, by which a port that forgets is told from others.
_PROBED = 2
# Largest difference of logits, relative to them, that is one of arithmetic: what a prefix adds is far more.
_ALIKE = 0.05


def run_chunks(executor: ModelExecutor, chunks: Sequence[Pass]) -> tuple[list[PassResult], str]:
    """Return the results of the chunks, or none and the reason why they are not tested."""
    if not chunks:
        return [], "no prompt has tokens enough"
    if not executor.takes_chunks:
        return [], "the port says that it takes none"
    try:
        results = [_run(executor, chunk) for chunk in chunks]
        is_forgetful = executor.keeps_cache and _forgets(executor, chunks, results)
    except PassRefusedError as error:
        return [], f"the port refuses them: {error.found}"
    if is_forgetful:
        return [], "the port takes each for new prompts, and forgets what it has cached"
    return results, ""


def _run(executor: ModelExecutor, chunk: Pass, *, records: bool = True) -> PassResult:
    request = PassRequest(model_pass=chunk, is_first=chunk.number == 0, records=records, may_be_refused=True)
    return executor.run(request)


def _forgets(executor: ModelExecutor, chunks: Sequence[Pass], results: Sequence[PassResult]) -> bool:
    """Decide whether a port that keeps its cache begins anew with the second chunk.

    Then the third one has the logits that it has behind the second alone.
    """
    if len(chunks) <= _PROBED:
        return False
    second = _as_new_prompts(chunks[_PROBED - 1])
    third = _behind(second, chunks[_PROBED])
    _run(executor, second, records=False)
    again = _run(executor, third, records=False)
    has_tokens = (third.columns >= 0).any(dim=1)
    before, later = (
        last_logits(third, logits)[has_tokens].double() for logits in (results[_PROBED].logits, again.logits)
    )
    differences = (later - before).norm(dim=-1) / before.norm(dim=-1)
    return bool((differences <= _ALIKE).all())


def _as_new_prompts(chunk: Pass) -> Pass:
    return replace(chunk, number=0, attention_mask=_own_mask(chunk))


def _behind(before: Pass, chunk: Pass) -> Pass:
    mask = torch.cat((before.attention_mask, _own_mask(chunk)), dim=1)
    return replace(chunk, number=before.number + 1, attention_mask=mask)


def _own_mask(chunk: Pass) -> torch.Tensor:
    return chunk.attention_mask[:, -chunk.batch_shape[1] :]


# Bound of numbers in JSON, which has no infinity.
_HUGE = 1e30


class ModelRun:
    """A run of a whole port; a context manager, in which the port is in memory. `progress` shows every pass."""

    def __init__(
        self,
        request: ModelRequest,
        *,
        runtime: Runtime,
        reader: CheckpointReader,
        progress: Progress | None = None,
    ) -> None:
        self._request = request
        self._runtime = runtime
        self._reader = reader
        self._progress = progress or NoProgress()
        self._passes = request.plan_passes(request.run.num_decoded)
        self._model = fingerprint_model(reader, request.spec, request.run.span)
        if request.golden is not None:
            refuse_other_model(request.golden, self._model)
        batch = ModelBatch.of(
            request.inputs, num_decoded=request.run.num_decoded, max_new_tokens=request.max_new_tokens
        )
        self._executor = ModelExecutor(request, batch=batch, runtime=runtime, reader=reader)

    def __enter__(self) -> ModelRun:
        self._executor.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        self._executor.__exit__(kind, *error)

    def capture(self, directory: Path) -> None:
        """Run all passes and write the capture."""
        chunks_folder = directory / CHUNKS_FOLDER
        if chunks_folder.is_dir():
            clear_capture(chunks_folder)
        results = []
        for model_pass in self._passes:
            request = PassRequest(model_pass=model_pass, is_first=model_pass.number == 0)
            results.append(self._executor.run(request))
            self._progress.advance(model_pass.number, num_bytes=0)
        repetitions, generated = self._run_again(results)
        with open_capture(directory, self.describe(), inputs=self._request.inputs) as writer:
            self._write(writer, self._passes, results, repetitions)
            if generated is not None:
                sampling = {"do_sample": False, "max_new_tokens": self._request.max_new_tokens}
                texts = decode_if_possible(self._request.folder, generated)
                generation = Generation.of(self._request.inputs, generated, sampling=sampling, texts=texts)
                writer.write_json(GENERATION_NAME, encode(generation))
            writer.finish()
        # A port's run is memory that the chunks need.
        results.clear()
        self._capture_chunks(chunks_folder)

    def _capture_chunks(self, directory: Path) -> None:
        """Run the prompts in chunks and write that capture; or one that says why there are none."""
        chunks = plan_chunks(self._request.inputs, pads_right=self._request.target.pads_right)
        if self._request.runs_chunks:
            results, untested = run_chunks(self._executor, chunks)
        else:
            results, untested = [], "--no-chunks leaves them out"
        with open_capture(directory, self.describe(chunks), inputs=self._request.inputs) as writer:
            if untested:
                writer.write_json(PASSES_NAME, encode(ModelPasses(num_passes=0, untested=untested)))
            else:
                self._write(writer, chunks, results)
            writer.finish()

    def capture_layer(self, layer: int, directory: Path) -> None:
        """Run the prefill with the golden's input of one layer in place of the port's, and write that layer alone.

        So the layer runs isolated, inside the port as it is. All tokens are prefilled.
        """
        request = self._request
        assert request.golden is not None, "a layer runs isolated on a golden's input"
        (prefill,) = request.plan_passes(0)
        layer_input = prefill.cut(request.golden.read(layer, Site.INPUT))
        result = self._executor.run(PassRequest(model_pass=prefill, is_first=True, fed=(layer, layer_input)))
        sites = dict(result.layers.get(layer, {}))
        sites[Site.INPUT] = layer_input
        run = single_layer_run(layer, sites_level="all", graph=request.golden.graph)
        description = Description(
            side=DEVICE_SIDE,
            run=run,
            provenance=request.provenance(self._runtime, model=self._model, options={}),
            inputs_digest=request.inputs.digest(),
            input_source=f"golden {request.golden.description.run.name}",
        )
        with open_capture(directory, description, inputs=request.inputs) as writer:
            if layer not in writer.complete_layers:
                self._write_layer(writer, layer, [(prefill, sites)])
            writer.finish()

    def _run_again(self, results: list[PassResult]) -> tuple[tuple[Repetition, ...], list[list[int]] | None]:
        """Run the prompts again in other rows; return how their logits differ, and the tokens generated.

        First come the same passes, then a prefill of the whole prompts, after which the port generates freely.
        """
        repetitions = repeat_run(
            self._executor, self._passes, results, vocab_size=self._request.spec.vocab_size
        )
        if not self._request.max_new_tokens:
            return repetitions, None
        generated, whole = self._generate(other_rows(self._request.inputs.batch_size))
        return (*repetitions, *self._compare_whole(results, whole)), generated

    def _compare_whole(self, results: list[PassResult], whole: torch.Tensor) -> Iterator[Repetition]:
        """Compare the logits of the steps with those of the prefill of whole prompts, [B,S,·] or [B,1,·]."""
        if whole.shape[1] != self._request.inputs.sequence_length:
            return  # of each prompt's last token alone
        rows = torch.arange(len(whole))
        for model_pass, result in zip(self._passes[1:], results[1:], strict=True):
            before, again = last_logits(model_pass, result.logits), whole[rows, model_pass.columns[:, 0]]
            yield from compare_logits(model_pass.number, rows.tolist(), before, again, kind=Repeated.WHOLE)

    def _generate(self, rows: torch.Tensor) -> tuple[list[list[int]], torch.Tensor]:
        """Generate after each whole prompt, in the order of the request; row b of the batch holds prompt `rows[b]`.

        The tokens are those that the port chooses, or else the likeliest. The logits of the prefill come with them,
        [B,S,·] or [B,1,·] in the order of the request.
        """
        spec, end_tokens = self._request.spec, read_end_tokens(self._request.folder)
        (whole,) = self._request.plan_passes(0)
        model_pass, tokens = whole.in_rows(rows), list[torch.Tensor]()
        of_prefill: torch.Tensor | None = None
        while True:
            is_first = not tokens
            result = self._executor.run(PassRequest(model_pass=model_pass, is_first=is_first, records=False))
            of_prefill = result.logits[rows.argsort()] if of_prefill is None else of_prefill
            logits = last_logits(model_pass, result.logits)[:, : spec.vocab_size]
            chosen = logits.nan_to_num(nan=-torch.inf).argmax(-1) if result.tokens is None else result.tokens
            tokens.append(chosen[:, None])
            if len(tokens) == self._request.max_new_tokens:
                in_order = torch.cat(tokens, dim=1)[rows.argsort()]
                return [until_end(row, end_tokens) for row in in_order.tolist()], of_prefill
            model_pass = next_pass(model_pass, tokens[-1], last_position=spec.max_position_embeddings - 1)

    def _write(
        self,
        writer: CaptureWriter,
        planned: list[Pass],
        results: list[PassResult],
        repetitions: tuple[Repetition, ...] = (),
    ) -> None:
        """Write what the passes of a run gave: a prefill and steps, or chunks."""
        cache = self._follow_cache(planned, results)
        is_chunked = planned is not self._passes
        layers = range(self._request.spec.num_hidden_layers)
        before: torch.Tensor | None = None
        for layer in layers:
            shown = [
                (model_pass, dict(result.layers.get(layer, {})))
                for model_pass, result in zip(planned, results, strict=True)
            ]
            before = self._write_layer(writer, layer, shown, before=before, cache=cache)
        passes = list(zip(planned, results, strict=True))
        num_columns, vocab_size = self._request.inputs.sequence_length, self._request.spec.vocab_size
        model: dict[ModelSite, torch.Tensor] = {
            site: assemble_site(
                [(model_pass, result.model[site]) for model_pass, result in passes],
                site,
                num_columns=num_columns,
            )
            for site in results[0].model
            if site is not ModelSite.LOGITS and all(site in result.model for result in results)
        }
        model[ModelSite.LOGITS] = assemble_logits(
            [(model_pass, result.logits) for model_pass, result in passes],
            num_columns=num_columns,
            vocab_size=vocab_size,
        )
        writer.write(None, {site: model[site] for site in ModelSite if site in model})
        above = [
            float((result.logits[..., vocab_size:].amax(-1) - result.logits[..., :vocab_size].amax(-1)).max())
            for result in results
            if result.logits.shape[-1] > vocab_size
        ]
        classes = self._executor.classes
        writer.write_json(
            PASSES_NAME,
            encode(
                ModelPasses(
                    num_passes=len(passes),
                    chunks=tuple(map(_count_tokens, planned)) if is_chunked else (),
                    logits=logits_form(*passes[0]),
                    layer_calls=tuple(result.layer_calls for result in results),
                    cached_layers=() if cache is None else tuple(layers),
                    cache_form="" if cache is None else str(cache.form),
                    cache_shift=0 if cache is None else cache.shift,
                    cache_changes=() if cache is None else cache.changes(),
                    choices=()
                    if is_chunked
                    else tuple(found for ran in passes for found in list_choices(*ran)),
                    vocab_size=vocab_size,
                    misplaced=find_misplaced(*passes[0], spec=self._request.spec, reader=self._reader),
                    num_padded_logits=max(results[0].logits.shape[-1] - vocab_size, 0),
                    padded_logits_above=_clipped(max(above)) if above else None,
                    repetitions=repetitions,
                    classes=None if classes is None else classes.here,
                    other_classes=None if classes is None else classes.other,
                )
            ),
        )

    def _write_layer(
        self,
        writer: CaptureWriter,
        layer: int,
        shown: list[tuple[Pass, dict[Site, torch.Tensor]]],
        *,
        before: torch.Tensor | None = None,
        cache: CacheRecord | None = None,
    ) -> torch.Tensor | None:
        """Store a layer's sites of all passes; one that a pass lacks is left out, and an input that equals `before`.

        `before` is what the layer before put out. Returns the layer's own output; None if it is not shown.
        """
        num_columns = self._request.inputs.sequence_length
        held = self._request.run.sites_of(layer)
        tensors = {
            site: assemble_site(
                [(model_pass, sites[site]) for model_pass, sites in shown],
                site,
                num_columns=num_columns,
                tokens_first=self._executor.tokens_first,
            )
            for site in held
            if all(site in sites for _, sites in shown)
        }
        # The executor knows the port's submodules; a layer that never ran exposes its sites, and stores none.
        exposures = self._executor.exposure.exposures
        has_run = bool(tensors)
        not_exposed = tuple(
            site
            for site in held
            if site not in tensors and (has_run or not exposures) and site is not Site.INPUT
        )
        layer_input = tensors.get(Site.INPUT)
        if before is not None and layer_input is not None and are_equal_bits(before, layer_input):
            # A capture finds it as that output.
            del tensors[Site.INPUT]
        writer.write(
            layer,
            tensors,
            not_exposed=not_exposed,
            num_calls=self._executor.num_calls(layer),
            observed_dtypes=self._executor.router_dtypes,
            cache=None if cache is None else cache.layer(layer),
        )
        return tensors.get(Site.OUTPUT)

    def _follow_cache(self, planned: list[Pass], results: list[PassResult]) -> CacheRecord | None:
        record = CacheRecord(num_columns=self._request.inputs.sequence_length)
        for model_pass, result in zip(planned, results, strict=True):
            if result.cache is None:
                return None
            record.add(model_pass, result.cache)
        return record

    def describe(self, chunks: list[Pass] | None = None) -> Description:
        """Describe all that decides the numbers of the run, or of its `chunks`."""
        request, golden = self._request, self._request.golden
        source = f"tokens: {request.inputs.source}"
        if golden is not None:
            source = f"tokens of the golden {golden.description.run.name}"
        return Description(
            side=DEVICE_SIDE,
            run=request.run if chunks is None else chunked_run(request.run),
            provenance=request.provenance(
                self._runtime,
                model=self._model,
                options={
                    "passes": [
                        pass_name(planned.number, is_chunk=chunks is not None)
                        for planned in (self._passes if chunks is None else chunks)
                    ]
                },
            ),
            inputs_digest=request.inputs.digest(),
            input_source=source,
        )


def _count_tokens(model_pass: Pass) -> tuple[int, ...]:
    return tuple((model_pass.columns >= 0).sum(dim=1).tolist())


def _clipped(value: float) -> float:
    """Return a finite number for JSON: infinities become huge, and NaN is taken for the largest."""
    return _HUGE if math.isnan(value) else min(max(value, -_HUGE), _HUGE)
