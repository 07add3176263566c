"""Learned checkpoints: a small model of a family trained on text, in the hub's layout, with held-out prompts beside it.

| file | content |
|---|---|
| model-*.safetensors, config.json, tokenizer.json | the checkpoint |
| held_out.json | rows of held-out text, for --prompts-file |
| held_out.txt | all held-out text |
| training.json | options, text, versions, losses |
"""

from __future__ import annotations

import json
import logging
import math
import platform
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch

from minimax_tools.machine.files import new_folder, refuse_occupied
from minimax_tools.model import weight_names
from minimax_tools.model.family import Family
from minimax_tools.model.quantisation import BLOCK_SIZE
from minimax_tools.synthetic.checkpoint import plan_tensors, write_json, write_shards
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.synthetic.toy_tokenizer import find_token_ids, make_tokenizer, save_tokenizer
from training.text import Corpus, TokenStream, read_corpus
from training.trainee import (
    HeldOutEvaluation,
    Trainee,
    TrainingCourse,
    TrainingOptions,
    evaluate,
    plant_massive_channels,
    train,
)

_log = logging.getLogger(__name__)

HELD_OUT_PROMPTS = "held_out.json"
HELD_OUT_TEXT = "held_out.txt"
TRAINING_RECORD = "training.json"
# Length of each held-out prompt, in tokens.
PROMPT_LENGTHS = (157, 1, 4, 61, 500, 17)
# Largest finite value of float8_e4m3fn.
_LARGEST_CODE = 448.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """Text, model and training of a learned model."""

    texts: tuple[str, ...]  # names of corpora, or files
    model: SyntheticModel
    options: TrainingOptions
    num_massive_channels: int = 0  # planted in the untrained model


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedModel:
    """A trained model: its training, and its evaluation on held-out text."""

    recipe: Recipe
    folders: tuple[Path, ...]  # its checkpoints
    course: TrainingCourse  # length and last loss of the training
    corpus: Corpus
    before: HeldOutEvaluation  # of the untrained model
    after: HeldOutEvaluation  # of the trained model


def train_checkpoint(outputs: dict[Path, torch.dtype], recipe: Recipe) -> LearnedModel:
    """Train a model and write it to every folder of `outputs`.

    Args:
        outputs: Folders that are absent or empty, each with the dtype of its linear layers: bfloat16, float8_e4m3fn
            or float32. Router gate and correction bias are always float32.
        recipe: The model, its text and its training.

    Raises:
        UsageError: A folder is not empty, the quantities cannot be stored, or there is too little text.
        MissingExtraError: transformers or accelerate is not installed.
        CheckpointError: The checkpoint cannot be written.
    """
    model, options = recipe.model, recipe.options
    _check_outputs(outputs, model)
    corpus = read_corpus(recipe.texts)
    tokenizer = make_tokenizer(corpus.training, vocab_size=model.vocab_size)
    training = TokenStream(corpus.training, tokenizer=tokenizer)
    held_out = TokenStream(corpus.held_out, tokenizer=tokenizer)
    _log.info("%s: %d tokens to train on, %d held out", corpus.name, len(training.ids), len(held_out.ids))
    config = model.config(dtype=torch.float32, token_ids=find_token_ids(tokenizer))
    # The standard deviation of the first weights. MiniMax-M2's 0.02 is too small for narrow models.
    of_text = config[model.family.text_key] if model.family.text_key else config
    of_text["initializer_range"] = 0.5 / math.sqrt(model.hidden_size)
    trainee = Trainee(config, seed=options.seed)
    if recipe.num_massive_channels:
        plant_massive_channels(trainee, count=recipe.num_massive_channels, seed=options.seed)
    before = _evaluate(trainee, held_out, recipe)
    course = train(trainee, training, options)
    learned = LearnedModel(
        recipe=recipe,
        folders=tuple(outputs),
        course=course,
        corpus=corpus,
        before=before,
        after=_evaluate(trainee, held_out, recipe),
    )
    for folder, dtype in outputs.items():
        _write(folder, learned, trainee, tokenizer, dtype=dtype)
    return learned


def _check_outputs(outputs: dict[Path, torch.dtype], model: SyntheticModel) -> None:
    """Check before the training that its checkpoints can be written."""
    for folder, dtype in outputs.items():
        refuse_occupied(folder)
        # The plan itself is not needed yet: making it checks the quantities.
        plan_tensors(model, dtype=dtype)


def _evaluate(trainee: Trainee, text: TokenStream, recipe: Recipe) -> HeldOutEvaluation:
    return evaluate(trainee, text, length=recipe.options.seq_len, seed=recipe.options.seed)


def _write(
    output: Path,
    learned: LearnedModel,
    trainee: Trainee,
    tokenizer: tokenizers.Tokenizer,
    *,
    dtype: torch.dtype,
) -> None:
    model = learned.recipe.model
    plan = plan_tensors(model, dtype=dtype)
    size_bytes = sum(tensor.size_bytes for tensor in plan)
    with new_folder(output, size_bytes=size_bytes, remedy="Name a folder with more room.") as folder:
        ids = save_tokenizer(folder, tokenizer)
        write_json(folder / "config.json", model.config(dtype=dtype, token_ids=ids))
        write_shards(folder, plan, LearnedWeights(trainee.tensors(), model.family), shard_size_bytes=None)
        held_out = "".join(learned.corpus.held_out)
        (folder / HELD_OUT_TEXT).write_text(held_out, encoding="utf-8")
        prompts = json.dumps(cut_prompts(learned.corpus, tokenizer), indent=1, ensure_ascii=False)
        (folder / HELD_OUT_PROMPTS).write_text(prompts + "\n", encoding="utf-8")
        write_json(folder / TRAINING_RECORD, _training_record(learned))


def cut_prompts(corpus: Corpus, tokenizer: tokenizers.Tokenizer) -> list[str]:
    """Cut held-out rows of 1 to 500 tokens, from different passages if there are enough."""
    prompts = []
    for number, length in enumerate(PROMPT_LENGTHS):
        # Evenly spread over the held-out passages.
        passage = corpus.held_out[number * len(corpus.held_out) // len(PROMPT_LENGTHS)]
        # Start and end of each token in the passage, in characters.
        offsets = tokenizer.encode(passage).offsets
        _, end = offsets[min(length, len(offsets)) - 1]
        prompts.append(passage[:end])
    return prompts


def _training_record(learned: LearnedModel) -> dict[str, Any]:
    """Return the content of training.json."""
    return {
        "model": asdict(learned.recipe.model),
        "options": asdict(learned.recipe.options),
        "text": {
            "name": learned.corpus.name,
            "training_bytes": learned.corpus.training_bytes,
            "sha256": learned.corpus.sha256,
        },
        "course": asdict(learned.course),
        "before": asdict(learned.before),
        "after": asdict(learned.after),
        "machine": {
            "torch": torch.__version__,
            "num_threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "python": platform.python_version(),
        },
    }


class LearnedWeights:
    """Maker of a checkpoint's tensors from float32 tensors.

    Args:
        tensors: All tensors of the model by mm2's names, float32 on the CPU.
        family: The model's family, under whose names they are made.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], family: Family) -> None:
        self._tensors, self._names = tensors, family.stored_names

    def make(self, name: str, *, shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[torch.Tensor]:
        """Make the tensor `name` of `shape` in `dtype`, as one block of data; FP8 codes and scales are computed."""
        own = self._names.own(name)
        if own.endswith(weight_names.SCALE_SUFFIX):
            tensor = quantise(self._tensors[own.removesuffix("_scale_inv")])[1]
        elif dtype == torch.float8_e4m3fn:
            tensor = quantise(self._tensors[own])[0]
        else:
            tensor = self._tensors[own].to(dtype)
        assert tensor.shape == shape, f"{name} is {list(tensor.shape)}, planned as {list(shape)}"
        yield tensor


def quantise(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a weight [R,C] to FP8 in blocks of 128 × 128.

    The largest value of a block becomes ±448, the largest code; a block of zeros has scale 1.

    Returns:
        Codes, float8_e4m3fn [R,C], and the scales to multiply them with, float32 [ceil(R/128), ceil(C/128)].
    """
    num_rows, num_columns = weight.shape
    # Zeros up to whole blocks.
    padding = (0, -num_columns % BLOCK_SIZE, 0, -num_rows % BLOCK_SIZE)
    padded = torch.nn.functional.pad(weight.float(), padding)
    # [rows of blocks, 128, columns of blocks, 128]
    blocks = padded.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE))
    largest = blocks.abs().amax(dim=(1, 3))
    scale = torch.where(largest > 0, largest / _LARGEST_CODE, 1.0)
    codes = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1)[:num_rows, :num_columns]
    return codes.clamp(-_LARGEST_CODE, _LARGEST_CODE).to(torch.float8_e4m3fn).contiguous(), scale
