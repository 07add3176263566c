from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_reference.golden.generation import generate
from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.golden.sampling import Sampling
from minimax_tools.capture.passes import Generation
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

Continue = Callable[..., Generation]

GREEDY = Sampling(max_new_tokens=8)
# Of transformers' own `generate`.
OWN = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "use_mtp": False}


@pytest.fixture(scope="module")
def opened(ask: Any) -> Iterator[Golden]:
    with open_golden(ask()) as golden:
        yield golden


@pytest.fixture(scope="module")
def go_on(opened: Golden, toy: Path) -> Continue:
    """Continues rows, greedily unless told otherwise."""

    def run(inputs: Inputs, sampling: Sampling = GREEDY) -> Generation:
        return generate(opened.model, inputs, sampling, folder=toy)

    return run


def batch(folder: Path, **options: Any) -> Inputs:
    return build_inputs(InputRequest(**options), folder=folder, spec=ModelSpec.from_folder(folder))


def new_ids(generated: Generation) -> list[list[int]]:
    return [list(row.generated_ids) for row in generated.rows]


def test_greedy_generation_is_transformers_own(
    go_on: Continue, toy: Path, toy_bf16: Path, load_with_float32_router: Any
) -> None:
    inputs = batch(toy, seq_lens=(12,))
    expected = load_with_float32_router(toy_bf16).generate(inputs.input_ids, **OWN)
    assert new_ids(go_on(inputs)) == [expected[0, 12:].tolist()]


def test_generation_counts_on_from_the_rows_last_position(opened: Golden, go_on: Continue, toy: Path) -> None:
    inputs = batch(toy, seq_lens=(12,), start_positions=(4090,))
    model: Any = opened.model
    expected = model.generate(inputs.input_ids, position_ids=inputs.position_ids, **OWN)
    assert new_ids(go_on(inputs)) == [expected[0, 12:].tolist()]


def test_generation_ends_with_the_models_positions(go_on: Continue, toy: Path) -> None:
    last = ModelSpec.from_folder(toy).max_position_embeddings - 1
    inputs = batch(toy, seq_lens=(4, 4), start_positions=(last - 3, last - 5))
    assert [len(row) for row in new_ids(go_on(inputs))] == [1, 3]


def test_likeliest_tokens_of_every_step_are_those_of_the_logits(
    opened: Golden, go_on: Continue, ask: Any
) -> None:
    logits, inputs = opened.forward(), ask().inputs
    generated = go_on(inputs)
    for row, length in enumerate(inputs.lengths):
        found = generated.rows[row]
        assert [tokens[0].token for tokens in found.likeliest] == list(found.generated_ids)
        first = logits[row, length - 1].float()
        for one in found.likeliest[0]:
            # The batch was padded and the row was not: that much BF16 leaves between them.
            assert one.behind == pytest.approx(float(first.max() - first[one.token]), abs=0.2)
        assert [one.behind for one in found.likeliest[0]] == sorted(one.behind for one in found.likeliest[0])
    drawn = go_on(inputs, Sampling(max_new_tokens=2, do_sample=True))
    assert all(row.likeliest == () for row in drawn.rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_do_not_depend_on_their_neighbours(go_on: Continue, toy: Path, side: str) -> None:
    sampling = Sampling(max_new_tokens=6, do_sample=True, seed=3)
    together = go_on(batch(toy, input_ids=("5,6,7,8,9", "40,41"), padding_side=side), sampling)
    assert [row.prompt_ids for row in together.rows] == [(5, 6, 7, 8, 9), (40, 41)]
    assert new_ids(together)[1:] == new_ids(go_on(batch(toy, input_ids=("40,41",)), sampling))


def test_sampling_repeats_with_its_seed_and_differs_with_another(go_on: Continue, toy: Path) -> None:
    inputs = batch(toy, seq_lens=(12,))
    samplings = [Sampling(max_new_tokens=8, do_sample=True, seed=seed) for seed in (0, 0, 1)]
    first, again, other = (new_ids(go_on(inputs, sampling)) for sampling in samplings)
    assert first == again != other


def test_sampling_option_without_sampling_is_refused() -> None:
    for option, name in (("temperature", "--temperature"), ("top_k", "--top-k"), ("top_p", "--top-p")):
        given: dict[str, Any] = {option: 1}
        with pytest.raises(UsageError, match=f"{name} has no effect on greedy generation. Add --do-sample"):
            Sampling(max_new_tokens=1, **given)


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": 3, "sampling": {}}'])
def test_damaged_generation_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation.json").write_text(text)
    with pytest.raises(CaptureError, match=r"generation\.json is damaged"):
        Generation.read(tmp_path)
