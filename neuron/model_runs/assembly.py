"""Results of a whole port's passes, put where their tokens lie in the golden's batch, and the tokens chosen by them.

B prompts, S columns of the golden's batch, s columns of a pass, N heads.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain

import torch

from minimax_tools.capture.passes import CachePair, Choice, LogitsForm, MisplacedLogits
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.json_codec import finite_or_none
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import head_name
from neuron.model_runs.passes import Pass


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassResult:
    """The result of one pass, on the CPU."""

    logits: torch.Tensor  # [B,s,vocab] or [B,1,vocab]
    tokens: torch.Tensor | None  # tokens that the port chose, [B]; None if it chooses none
    # Sites by layer and outside the layers, as far as they are shown
    layers: Mapping[int, Mapping[Site, torch.Tensor]] = field(default_factory=dict)
    model: Mapping[ModelSite, torch.Tensor] = field(default_factory=dict)
    cache: Sequence[CachePair] | None = None  # by layer; None if it cannot be read
    layer_calls: tuple[int, ...] = ()  # layers in the order in which they were called


def join_rows(results: Sequence[PassResult]) -> PassResult:
    """Join the results of a prefill's rows; the last one's cache holds all of them."""
    first = results[0]
    tokens = [result.tokens for result in results if result.tokens is not None]
    calls = {result.layer_calls for result in results}
    return PassResult(
        logits=torch.cat([result.logits for result in results]),
        tokens=torch.cat(tokens) if len(tokens) == len(results) else None,
        layers={
            layer: {
                site: torch.cat([result.layers[layer][site] for result in results])
                for site in sites
                if all(site in result.layers.get(layer, {}) for result in results)
            }
            for layer, sites in first.layers.items()
        },
        model={
            site: torch.cat([result.model[site] for result in results])
            for site in first.model
            if all(site in result.model for result in results)
        },
        cache=results[-1].cache,
        # Rows that call other layers are shown whole: no order of layers is right then.
        layer_calls=calls.pop()
        if len(calls) == 1
        else tuple(chain.from_iterable(r.layer_calls for r in results)),
    )


def assemble_site(
    pieces: Sequence[tuple[Pass, torch.Tensor]],
    site: Site | ModelSite,
    *,
    num_columns: int,
    tokens_first: Collection[Site] = (),
) -> torch.Tensor:
    """Return a site's tensor [B,S,…] or [B,N,S,D] from those of passes, [B,s,…] or [B,N,s,D]; padding is zero.

    At sites in `tokens_first`, a piece with as many heads as tokens is [B,s,N,D]. A piece that is not laid out as its
    pass is returned as it is, for the comparison to judge its shape.
    """
    by_pass = [
        (model_pass, _by_token(piece, site, is_tokens_first=site in tokens_first))
        for model_pass, piece in pieces
    ]
    first = by_pass[0][1]
    for (model_pass, by_token), (_, piece) in zip(by_pass, pieces, strict=True):
        batch_size, num_tokens = model_pass.batch_shape
        is_laid_out = (
            by_token.ndim > 1 and by_token.shape[0] == batch_size and by_token.shape[1] >= num_tokens
        )
        if not is_laid_out or by_token.shape[2:] != first.shape[2:]:
            return piece
    assembled = first.new_zeros((first.shape[0], num_columns, *first.shape[2:]))
    for model_pass, by_token in by_pass:
        rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
        assembled[rows, model_pass.columns[rows, columns]] = by_token[rows, columns]
    return assembled.transpose(1, 2).contiguous() if site.has_heads_dim else assembled


def _by_token(piece: torch.Tensor, site: Site | ModelSite, *, is_tokens_first: bool) -> torch.Tensor:
    """Return a pass's tensor with tokens in front of heads: [B,s,…], or [B,s,N,D]."""
    if not site.has_heads_dim or piece.ndim != 4:
        return piece
    is_as_it_is = is_tokens_first and piece.shape[1] == piece.shape[2]
    return piece if is_as_it_is else piece.transpose(1, 2)


def assemble_logits(
    pieces: Iterable[tuple[Pass, torch.Tensor]], *, num_columns: int, vocab_size: int
) -> torch.Tensor:
    """Return logits [B,S,vocab] from those of passes: [B,s,·] of all tokens, or [B,1,·] of each row's last one."""
    assembled: torch.Tensor | None = None
    for model_pass, piece in pieces:
        logits = piece[..., :vocab_size]
        if assembled is None:
            assembled = logits.new_zeros((logits.shape[0], num_columns, logits.shape[2]))
        if logits.shape[1] == model_pass.columns.shape[1]:
            rows, columns = (model_pass.columns >= 0).nonzero(as_tuple=True)
            assembled[rows, model_pass.columns[rows, columns]] = logits[rows, columns]
        else:
            columns = model_pass.columns.gather(1, model_pass.last_columns[:, None])[:, 0]
            # A chunk may hold no token of a short row.
            rows = (columns >= 0).nonzero().flatten()
            assembled[rows, columns[rows]] = logits[rows, 0]
    assert assembled is not None, "a run has a prefill"
    return assembled


def last_logits(model_pass: Pass, logits: torch.Tensor) -> torch.Tensor:
    """Return the logits [B,·] of each row's last real token, from a pass's [B,s,·] or [B,1,·]."""
    if logits.shape[1] == 1:
        return logits[:, 0]
    return logits[torch.arange(len(logits)), model_pass.last_columns]


# Words of the vocabulary by which logits are told apart.
_NUM_WORDS = 1024
# Another column's logits are nearer than this share of the right column's distance.
_NEARER = 0.1


def logits_form(prefill: Pass, result: PassResult) -> LogitsForm:
    """Return the columns that the prefill's logits are of: all, or each prompt's last alone."""
    return LogitsForm.LAST if result.logits.shape[1] == 1 < prefill.columns.shape[1] else LogitsForm.ALL


def find_misplaced(
    prefill: Pass, result: PassResult, *, spec: ModelSpec, reader: CheckpointReader
) -> tuple[MisplacedLogits, ...]:
    """Find rows whose only logits are those of another column than the last real token's."""
    normed = result.model.get(ModelSite.FINAL_NORM)
    if logits_form(prefill, result) is not LogitsForm.LAST or normed is None or normed.shape[1] == 1:
        return ()
    num_words = min(_NUM_WORDS, spec.vocab_size)
    weight = torch.empty(num_words, spec.hidden_size)
    reader.read_weight_into(head_name(spec), weight, rows=range(num_words))
    # Logits of every column, [B,s,words], and those returned, [B,1,words].
    right = normed.float() @ weight.T
    error = (right - result.logits[..., :num_words].float()).norm(dim=-1)
    misplaced = []
    for row, last in enumerate(prefill.last_columns.tolist()):
        nearest = int(error[row].nan_to_num(nan=torch.inf).argmin())
        # The right column's own error is that of rounding; another column must be nearer by far.
        if nearest != last and float(error[row, nearest]) < _NEARER * float(error[row, last]):
            is_padding = int(prefill.columns[row, nearest]) < 0
            misplaced.append(MisplacedLogits(row=row, column=nearest, is_padding=is_padding))
    return tuple(misplaced)


def list_choices(model_pass: Pass, result: PassResult) -> list[Choice]:
    """List what the port chose after a pass, beside its own likeliest token; nothing if it chose none."""
    if result.tokens is None:
        return []
    logits = last_logits(model_pass, result.logits).float()
    likeliest = logits.argmax(-1)
    choices = []
    for row, chosen in enumerate(result.tokens.tolist()):
        best = int(likeliest[row])
        is_token = 0 <= chosen < logits.shape[-1]
        behind = float(logits[row, best] - logits[row, chosen]) if is_token else float("inf")
        choices.append(
            Choice(
                number=model_pass.number,
                row=row,
                chosen=chosen,
                likeliest=best,
                behind=finite_or_none(behind),
                rank=int((logits[row] > logits[row, chosen]).sum()) if is_token else logits.shape[-1],
                columns=_columns_of_choice(result.logits[row], chosen),
                last_column=int(model_pass.last_columns[row]) if result.logits.shape[1] > 1 else 0,
                num_columns=result.logits.shape[1],
            )
        )
    return choices


def _columns_of_choice(logits: torch.Tensor, chosen: int) -> tuple[int, ...]:
    """Return the columns of a row's logits [s,·] whose likeliest token was chosen; () of a single column."""
    if len(logits) == 1:
        return ()
    return tuple((logits.float().argmax(-1) == chosen).nonzero().flatten().tolist())
