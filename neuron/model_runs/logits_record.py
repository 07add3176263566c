"""Logits of a run's passes: which columns they are of, and the tokens chosen by them.

B prompts, s columns of a pass.
"""

from __future__ import annotations

import math

import torch

from minimax_tools.capture.passes import Choice, LogitsForm, MisplacedLogits
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model.sites import ModelSite
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import head_name
from neuron.model_runs.assembly import last_logits
from neuron.model_runs.pass_result import PassResult
from neuron.model_runs.passes import Pass

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
    """Find rows whose only logits are those of another column than the last real token's.

    Raises:
        CheckpointError: The head's weight cannot be read.
    """
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
                # JSON has no infinity and no NaN.
                behind=behind if math.isfinite(behind) else None,
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
