from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_reference.golden.generation import generate
from gpu_reference.golden.golden import Golden, open_golden
from gpu_reference.golden.sampling import Sampling
from minimax_tools.capture.passes import GENERATION_NAME, Generation
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.errors import CaptureError, UsageError
from minimax_tools.json_codec import encode
from minimax_tools.model.inputs import Inputs
from minimax_tools.model.spec import ModelSpec
from minimax_tools.model.weight_names import CORRECTION_BIAS, GATE, layer_prefix
from minimax_tools.text.input_request import InputRequest
from minimax_tools.text.prompts import build_inputs

GREEDY = Sampling(max_new_tokens=8)


@pytest.fixture(scope="module")
def opened(ask: Any) -> Iterator[Golden]:
    with open_golden(ask()) as golden:
        yield golden


def batch(folder: Path, **options: Any) -> Inputs:
    return build_inputs(InputRequest(**options), folder=folder, spec=ModelSpec.from_folder(folder))


def new_ids(generated: Generation) -> list[list[int]]:
    return [list(row.generated_ids) for row in generated.rows]


def test_greedy_generation_is_transformers_own(opened: Golden, toy: Path, toy_bf16: Path) -> None:
    from transformers import MiniMaxM2ForCausalLM

    model = MiniMaxM2ForCausalLM.from_pretrained(toy_bf16, dtype=torch.bfloat16).eval()
    with CheckpointReader(toy_bf16) as reader:
        for index, layer in enumerate(model.model.layers):
            gate, bias = (reader.read(layer_prefix(index) + name) for name in (GATE, CORRECTION_BIAS))
            layer.mlp.gate.weight, layer.mlp.e_score_correction_bias = torch.nn.Parameter(gate), bias
    inputs = batch(toy, seq_lens=(12,))
    expected = model.generate(
        inputs.input_ids, max_new_tokens=8, do_sample=False, pad_token_id=0, use_mtp=False
    )
    assert new_ids(generate(opened.model, inputs, GREEDY, folder=toy)) == [expected[0, 12:].tolist()]


def test_generation_counts_on_from_the_rows_last_position(opened: Golden, toy: Path) -> None:
    inputs = batch(toy, seq_lens=(12,), start_positions=(4090,))
    expected = opened.model.generate(
        inputs.input_ids,
        position_ids=inputs.position_ids,
        max_new_tokens=8,
        do_sample=False,
        pad_token_id=0,
        use_mtp=False,
    )
    assert new_ids(generate(opened.model, inputs, GREEDY, folder=toy)) == [expected[0, 12:].tolist()]


def test_generation_ends_with_the_models_positions(opened: Golden, toy: Path) -> None:
    last = ModelSpec.from_folder(toy).max_position_embeddings - 1
    inputs = batch(toy, seq_lens=(4, 4), start_positions=(last - 3, last - 5))
    assert [len(row) for row in new_ids(generate(opened.model, inputs, GREEDY, folder=toy))] == [1, 3]


def test_likeliest_tokens_of_every_step_are_those_of_the_logits(opened: Golden, toy: Path, ask: Any) -> None:
    logits = opened.forward()
    inputs = ask().inputs
    generated = generate(opened.model, inputs, GREEDY, folder=toy)
    for row, length in enumerate(inputs.lengths):
        found = generated.rows[row]
        assert [tokens[0].token for tokens in found.likeliest] == list(found.generated_ids)
        first = logits[row, length - 1].float()
        for one in found.likeliest[0]:
            # The batch was padded and the row was not: that much BF16 leaves between them.
            assert one.behind == pytest.approx(float(first.max() - first[one.token]), abs=0.2)
        assert [one.behind for one in found.likeliest[0]] == sorted(one.behind for one in found.likeliest[0])
    drawn = generate(opened.model, inputs, Sampling(max_new_tokens=2, do_sample=True), folder=toy)
    assert all(row.likeliest == () for row in drawn.rows)


@pytest.mark.parametrize("side", ["left", "right"])
def test_rows_do_not_depend_on_their_neighbours(opened: Golden, toy: Path, side: str) -> None:
    sampling = Sampling(max_new_tokens=6, do_sample=True, seed=3)
    together = batch(toy, input_ids=("5,6,7,8,9", "40,41"), padding_side=side)
    alone = batch(toy, input_ids=("40,41",))
    generated = generate(opened.model, together, sampling, folder=toy)
    assert [row.prompt_ids for row in generated.rows] == [(5, 6, 7, 8, 9), (40, 41)]
    assert new_ids(generated)[1:] == new_ids(generate(opened.model, alone, sampling, folder=toy))


def test_sampling_repeats_with_its_seed_and_differs_with_another(opened: Golden, toy: Path) -> None:
    inputs = batch(toy, seq_lens=(12,))
    first, again, other = (
        new_ids(
            generate(opened.model, inputs, Sampling(max_new_tokens=8, do_sample=True, seed=seed), folder=toy)
        )
        for seed in (0, 0, 1)
    )
    assert first == again
    assert first != other


@pytest.mark.parametrize(
    ("option", "name"),
    [({"temperature": 0.5}, "--temperature"), ({"top_k": 5}, "--top-k"), ({"top_p": 0.9}, "--top-p")],
)
def test_sampling_option_without_sampling_is_refused(option: dict[str, Any], name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} has no effect on greedy generation. Add --do-sample"):
        Sampling(max_new_tokens=1, **option)


def test_generation_is_stored_with_its_sampling(opened: Golden, toy: Path, tmp_path: Path) -> None:
    generated = generate(opened.model, batch(toy, seq_lens=(4,)), GREEDY, folder=toy)
    opened.capture(tmp_path / "capture", extra={GENERATION_NAME: encode(generated)})
    stored = Generation.read(tmp_path / "capture")
    assert stored == generated
    assert stored.sampling["max_new_tokens"] == 8


@pytest.mark.parametrize("text", ["{", "{}", '{"rows": 3, "sampling": {}}'])
def test_damaged_generation_is_an_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation.json").write_text(text)
    with pytest.raises(CaptureError, match=r"generation\.json is damaged"):
        Generation.read(tmp_path)
