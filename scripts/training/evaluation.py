"""Evaluation of a trained model on held-out text: its bits per byte, those of simpler codes, and its choice of experts.

Experts are specialised if both hold:

- Tokens predict experts: the mutual information of tokens and experts exceeds that of shuffled experts.
- Other experts do worse: bits per byte rise if each token goes to another token's experts, with its own weights.
"""

from __future__ import annotations

import lzma
import math
from collections import Counter
from dataclasses import dataclass

import torch

from training.text import Corpus, TokenStream
from training.trainee import Trainee

# Most tokens that are evaluated, and rows of a batch: they trade precision and memory for time.
_MOST_TOKENS = 32_768
_ROWS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExperts:
    """The choice of experts of a layer over held-out text.

    Information is mutual information in bits, less that of shuffled experts.
    """

    load: tuple[float, ...]  # share of the choices that each expert got, with sum 1
    token_information: float  # between a token and one of its experts
    next_token_information: float  # between the token after it and one of its experts

    @property
    def load_range(self) -> tuple[float, float]:
        """Smallest and largest load, in units of an even share."""
        return min(self.load) * len(self.load), max(self.load) * len(self.load)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEvaluation:
    """Results of a model on held-out text."""

    num_tokens: int  # that are predicted
    bits_per_byte: float
    bits_per_byte_random_experts: float  # the same if each token goes to the experts of another, random token
    layers: tuple[LayerExperts, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rivals:
    """Bits per byte of the same held-out text in codes without a model."""

    unigram: float  # by the frequencies of bytes in the training text
    lzma: float  # growth of the compressed training text when the held-out text is appended


def evaluate(
    trainee: Trainee, text: TokenStream, *, length: int, num_experts: int, seed: int
) -> HeldOutEvaluation:
    """Evaluate a model on at most 32 768 tokens of held-out `text`, in rows of `length` tokens; `seed` shuffles."""
    rows = text.cut_rows(length=length + 1, most=max(1, _MOST_TOKENS // length))
    generator = torch.Generator().manual_seed(seed)

    def shuffle(experts: torch.Tensor) -> torch.Tensor:
        return experts[torch.randperm(len(experts), generator=generator)]

    loss, choices = _run(trainee, rows)
    with trainee.rerouted(shuffle):
        random_loss, _ = _run(trainee, rows)
    tokens, next_tokens = rows[:, :-1].flatten(), rows[:, 1:].flatten()
    layers = tuple(
        LayerExperts(
            load=_load(choice, num_experts),
            token_information=_information(tokens, choice, generator),
            next_token_information=_information(next_tokens, choice, generator),
        )
        for choice in choices
    )
    bits_per_byte_of_a_nat = 1 / math.log(2) / text.bytes_per_token
    return HeldOutEvaluation(
        num_tokens=rows[:, 1:].numel(),
        bits_per_byte=loss * bits_per_byte_of_a_nat,
        bits_per_byte_random_experts=random_loss * bits_per_byte_of_a_nat,
        layers=layers,
    )


def measure_rivals(corpus: Corpus) -> Rivals:
    """Measure the held-out text of a corpus in codes by unigrams and by lzma, both given the training text."""
    training = "".join(corpus.training).encode()
    held_out = "".join(corpus.held_out).encode()
    counts = Counter(training)
    # Each of the 256 bytes counts once more, so that none has probability 0.
    total = len(training) + 256
    unigram = sum(-math.log2((counts[byte] + 1) / total) for byte in held_out) / len(held_out)
    grown = len(_compress(training + held_out)) - len(_compress(training))
    return Rivals(unigram=unigram, lzma=8 * grown / len(held_out))


def _compress(data: bytes) -> bytes:
    # A dictionary of 32 MB, so that all of the text counts.
    return lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 6, "dict_size": 1 << 25}])


@torch.no_grad()
def _run(trainee: Trainee, rows: torch.Tensor) -> tuple[float, list[torch.Tensor]]:
    """Run the model in evaluation mode; return the mean loss in nats per token, and the experts [T,k] of each layer."""
    was_training = trainee.module.training
    trainee.module.eval()
    losses, choices = [], []
    for batch in rows.split(_ROWS_AT_ONCE):
        losses.append(trainee.token_losses(batch).flatten())
        choices.append(trainee.choices)
    trainee.module.train(was_training)
    choices_of_layers = [torch.cat(batches) for batches in zip(*choices, strict=True)]
    return float(torch.cat(losses).double().mean()), choices_of_layers


def _load(choice: torch.Tensor, num_experts: int) -> tuple[float, ...]:
    counts = torch.bincount(choice.flatten(), minlength=num_experts).double()
    return tuple((counts / counts.sum()).tolist())


def _information(tokens: torch.Tensor, choice: torch.Tensor, generator: torch.Generator) -> float:
    """Return the mutual information in bits, less that of shuffled experts, which arises by chance."""
    shuffled = choice[torch.randperm(len(choice), generator=generator)]
    return _mutual_information(tokens, choice) - _mutual_information(tokens, shuffled)


def _mutual_information(tokens: torch.Tensor, choice: torch.Tensor) -> float:
    """Return the mutual information in bits between tokens [T] and one of their experts [T,k]."""
    num_experts = int(choice.max()) + 1
    cells = (tokens[:, None] * num_experts + choice).flatten()
    joint = torch.bincount(cells, minlength=(int(tokens.max()) + 1) * num_experts).double()
    joint = joint.unflatten(0, (-1, num_experts)) / joint.sum()
    independent = joint.sum(1, keepdim=True) * joint.sum(0, keepdim=True)
    occurs = joint > 0
    return float((joint[occurs] * (joint[occurs] / independent[occurs]).log2()).sum())
