"""Golden logits of rows, and the right models that explain a token which a right port sends to another expert."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from compare.prompts.logits_verdict import LogitsVerdict, judge_logits
from compare.prompts.prompt_judge import GoldenSource, PortLogits
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.golden_logits.golden_logits import GoldenLogits
from minimax_tools.golden_logits.golden_rows import GoldenRows
from minimax_tools.golden_logits.logits_store import LogitsStore
from minimax_tools.model.inputs import pad_rows
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.rounded_model import RoundedModel
from minimax_tools.reference.rounding import RoundingKind
from minimax_tools.text.answered_prompts import split_rows
from minimax_tools.text.tokenizer import encode_texts

LEARNED = Path(__file__).parents[2] / "models" / "learned"
# A row of held-out text in which one of these right models sends a token to an expert that no variant chooses.
FIRST, NUM_TOKENS, FLIPPING = 16882, 90, 6
TOKENS = torch.arange(NUM_TOKENS)


@pytest.fixture(scope="module")
def goldens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GoldenRows]:
    spec = ModelSpec.from_folder(LEARNED)
    with CheckpointReader(LEARNED) as reader:
        store = LogitsStore.open(tmp_path_factory.mktemp("golden_logits"), reader=reader, spec=spec)
        yield GoldenRows(store=store, reader=reader, spec=spec)


@pytest.fixture(scope="module")
def row(goldens: GoldenRows) -> tuple[int, ...]:
    text = (LEARNED / "held_out.txt").read_text(encoding="utf-8")
    (tokens,) = encode_texts(LEARNED, [text], chat=False)
    row = tuple(tokens[FIRST : FIRST + NUM_TOKENS])
    goldens.make([row])
    return row


@pytest.fixture(scope="module")
def right_port(goldens: GoldenRows, row: tuple[int, ...]) -> torch.Tensor:
    """Return the logits [T,V] of a right model that rounds at random, and makes an eighth of the plausible flips."""
    kinds = (RoundingKind.EXACT, RoundingKind.NEAREST, *(RoundingKind.RANDOM,) * 9)
    model = RoundedModel(spec=goldens.spec, reader=goldens.reader, kinds=kinds, flip_shares=(1 / 8,) * 8)
    batch = pad_rows([list(row)], padding_side="right", buckets=(), pad_token_id=0, source="row")
    (states,) = model.run([batch])
    return model.head().score(states[:, 0], draw=7)[FLIPPING]


@dataclass(frozen=True)
class WithoutAlternatives:
    """Golden logits of which no alternatives are known."""

    goldens: GoldenRows

    def read(self, row: Sequence[int]) -> GoldenLogits:
        return self.goldens.read(row)

    def find_alternatives(self, goldens: Sequence[GoldenLogits]) -> list[GoldenLogits]:
        return list(goldens)


def judge(row: tuple[int, ...], logits: torch.Tensor, source: GoldenSource) -> LogitsVerdict:
    port = PortLogits(tokens=TOKENS, logits=source.read(row).measure(logits, TOKENS))
    return judge_logits(split_rows([row], num_decoded=4), [port], source, through="all layers")


def test_rare_flip_of_a_right_model_is_right(
    goldens: GoldenRows, row: tuple[int, ...], right_port: torch.Tensor
) -> None:
    assert judge(row, right_port, WithoutAlternatives(goldens)).excess > 2.0
    verdict = judge(row, right_port, goldens)
    assert (verdict.is_right, verdict.num_flipped) == (True, 1)


def test_same_error_at_a_token_that_no_flip_reaches_is_wrong(
    goldens: GoldenRows, row: tuple[int, ...], right_port: torch.Tensor
) -> None:
    golden = goldens.read(row)
    moved = right_port.clone()
    # The first token's logits are those after another token.
    moved[0] = right_port[1]
    verdict = judge(row, moved, goldens)
    assert (verdict.is_right, verdict.first_pass) == (False, 0)
    assert golden.alternatives == ()


def test_alternatives_are_kept_and_computed_once(goldens: GoldenRows, row: tuple[int, ...]) -> None:
    golden = goldens.read(row)
    (found,) = goldens.find_alternatives([golden])
    files = {path: path.stat().st_mtime_ns for path in goldens.store.directory.iterdir()}
    (again,) = goldens.find_alternatives([golden])
    assert {path: path.stat().st_mtime_ns for path in goldens.store.directory.iterdir()} == files
    assert len(found.alternatives) == 48
    for one, other in zip(found.alternatives, again.alternatives, strict=True):
        assert torch.equal(one.candidates, other.candidates)


def test_logits_of_a_golden_at_hand_are_an_alternative(
    goldens: GoldenRows, row: tuple[int, ...], right_port: torch.Tensor
) -> None:
    """The golden itself makes the flip: nothing else need be computed."""
    captured = replace(goldens, captured={row: right_port})
    assert len(captured.read(row).alternatives) == 1
    verdict = judge(row, right_port, WithoutAlternatives(captured))
    assert (verdict.is_right, verdict.num_flipped) == (True, 1)
