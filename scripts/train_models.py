"""Train the models of BENCHMARKS.md, each in BF16 and in block FP8.

    python scripts/train_models.py                                all models, into mm2-models
    python scripts/train_models.py b tiny --output-dir models     some models
    python scripts/train_models.py tiny --steps 20 --text FILE    one with other options: text, length, sizes

A model takes one core for 5 to 20 minutes. The same torch version gives the same weights on the same kind of machine:
training has one thread, a fixed number of steps, and a seed per model. `tiny` is the model in tests/models/learned.
"""

from __future__ import annotations

import argparse
import logging
import shlex
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from training.learned import LearnedModel, Recipe, train_checkpoint
from training.text import CORPORA
from training.trainee import TrainingOptions

from minimax_tools.errors import Mm2Error, format_count
from minimax_tools.synthetic.toy_model import SyntheticModel

# Sizes of a model whose recipe names no others.
_DEFAULTS = {"num_hidden_layers": 5, "num_local_experts": 16, "intermediate_size": 64, "vocab_size": 262}
_SIZES = {field.name: str if field.name == "model_type" else int for field in fields(SyntheticModel)}
# The learning rate times the hidden size: wider models need smaller steps.
_LEARNING_RATE_OF_WIDTH = 0.5
# Options of each model; `--help` explains them.
RECIPES = {
    # Many heads, long text: the shape of the first report.
    "a": "--text prose --steps 798 --seed 0",
    # Widths that no other quantity has, 32 experts, a vocabulary with merges, source code.
    "b": "--text python-asyncio-and-email --steps 400 --seed 1 --hidden-size 384 --num-attention-heads 6 "
    "--num-hidden-layers 6 --num-local-experts 32 --intermediate-size 48 --vocab-size 512",
    # A wide residual stream with massive channels, few experts, the language of lawyers.
    "c": "--text licences --steps 250 --seed 2 --hidden-size 1024 --num-hidden-layers 4 --num-local-experts 8 "
    "--num-experts-per-tok 2 --intermediate-size 128 --massive-channels 3",
    # Trained longer than the others, until its experts differ; two experts to a token.
    "d": "--text python-standard-library --steps 2500 --seed 3 --num-attention-heads 4 --rotary-dim 64 "
    "--num-hidden-layers 4 --num-experts-per-tok 2 --vocab-size 512",
    # Eight experts to a token, as MiniMax-M2 itself has, out of many small ones.
    "e": "--text licences --steps 700 --seed 5 --hidden-size 384 --num-attention-heads 12 --num-key-value-heads 2 "
    "--head-dim 32 --rotary-dim 16 --num-hidden-layers 4 --num-local-experts 64 --num-experts-per-tok 8 "
    "--intermediate-size 32 --vocab-size 384",
    # Wide heads, one kv head for four query heads, and massive channels.
    "f": "--text prose --steps 500 --seed 6 --hidden-size 512 --num-attention-heads 4 --num-key-value-heads 1 "
    "--head-dim 128 --rotary-dim 64 --num-hidden-layers 6 --num-local-experts 24 --num-experts-per-tok 6 "
    "--intermediate-size 64 --vocab-size 448 --massive-channels 2",
    # Deep for its width, one expert in eight chosen, the largest vocabulary.
    "g": "--text python-asyncio-and-email --steps 600 --seed 7 --hidden-size 256 --num-attention-heads 8 "
    "--num-key-value-heads 4 --head-dim 32 --rotary-dim 32 --num-hidden-layers 8 --num-local-experts 24 "
    "--num-experts-per-tok 3 --intermediate-size 96 --vocab-size 640",
    # Many experts, three of them to a token, short training.
    "h": "--text prose --steps 400 --seed 8 --hidden-size 384 --num-attention-heads 12 --num-key-value-heads 4 "
    "--head-dim 32 --rotary-dim 16 --num-hidden-layers 5 --num-local-experts 48 --num-experts-per-tok 3 "
    "--intermediate-size 64 --vocab-size 512",
    # Narrow and deeper, half of its heads' dims rotated, five of many experts.
    "i": "--text python-standard-library --steps 900 --seed 9 --hidden-size 256 --num-attention-heads 8 "
    "--num-key-value-heads 2 --head-dim 64 --rotary-dim 32 --num-hidden-layers 6 --num-local-experts 40 "
    "--num-experts-per-tok 5 --intermediate-size 64 --vocab-size 576",
    # Small ones of other shapes and texts, on which right ports are judged by their logits alone.
    "j": "--text licences --steps 1500 --seed 11 --hidden-size 128 --num-attention-heads 4 --head-dim 32 "
    "--rotary-dim 16 --num-hidden-layers 4 --num-local-experts 16 --num-experts-per-tok 4 --vocab-size 320",
    "k": "--text python-asyncio-and-email --steps 700 --seed 12 --hidden-size 128 --num-attention-heads 4 "
    "--num-key-value-heads 1 --head-dim 32 --rotary-dim 24 --num-hidden-layers 5 --num-local-experts 32 "
    "--num-experts-per-tok 2 --intermediate-size 48 --vocab-size 384",
    "l": "--text python-standard-library --steps 600 --seed 13 --hidden-size 128 --num-attention-heads 4 "
    "--num-key-value-heads 2 --head-dim 32 --rotary-dim 32 --num-hidden-layers 6 --num-local-experts 8 "
    "--num-experts-per-tok 2 --vocab-size 352",
    "m": "--text prose --steps 700 --seed 14 --hidden-size 96 --num-attention-heads 4 --num-key-value-heads 2 "
    "--head-dim 32 --rotary-dim 16 --num-hidden-layers 3 --num-local-experts 24 --num-experts-per-tok 6 "
    "--intermediate-size 48 --vocab-size 300",
    # Other families: softmax for sigmoid, shared experts, a dense layer, SwiGLU-OAI.
    "qwen": "--model-type qwen3_moe --text python-standard-library --steps 900 --seed 21 --hidden-size 128 "
    "--num-attention-heads 4 --num-key-value-heads 2 --head-dim 32 --rotary-dim 32 --num-hidden-layers 4 "
    "--num-local-experts 16 --num-experts-per-tok 4 --intermediate-size 48 --vocab-size 352",
    "qwen_wide": "--model-type qwen3_moe --text prose --steps 500 --seed 22 --hidden-size 256 "
    "--num-attention-heads 8 --num-key-value-heads 1 --head-dim 64 --rotary-dim 64 --num-hidden-layers 5 "
    "--num-local-experts 32 --num-experts-per-tok 8 --intermediate-size 32 --vocab-size 448",
    "glm": "--model-type glm4_moe --text python-asyncio-and-email --steps 900 --seed 23 --hidden-size 128 "
    "--num-attention-heads 4 --num-key-value-heads 2 --head-dim 32 --rotary-dim 16 --num-hidden-layers 4 "
    "--num-local-experts 16 --num-experts-per-tok 4 --intermediate-size 48 --vocab-size 320",
    "glm_wide": "--model-type glm4_moe --text licences --steps 500 --seed 24 --hidden-size 256 "
    "--num-attention-heads 8 --num-key-value-heads 2 --head-dim 32 --rotary-dim 16 --num-hidden-layers 5 "
    "--num-local-experts 24 --num-experts-per-tok 6 --intermediate-size 64 --vocab-size 416",
    "m3": "--model-type minimax_m3_vl --text prose --steps 900 --seed 25 --hidden-size 128 "
    "--num-attention-heads 4 --num-key-value-heads 2 --head-dim 32 --rotary-dim 16 --num-hidden-layers 4 "
    "--num-local-experts 16 --num-experts-per-tok 4 --intermediate-size 48 --vocab-size 352",
    "m3_wide": "--model-type minimax_m3_vl --text python-standard-library --steps 500 --seed 26 "
    "--hidden-size 256 --num-attention-heads 8 --num-key-value-heads 1 --head-dim 32 --rotary-dim 16 "
    "--num-hidden-layers 5 --num-local-experts 32 --num-experts-per-tok 4 --intermediate-size 32 --vocab-size 480",
    # Small enough to be committed.
    "tiny": "--text prose --steps 4000 --seed 4 --hidden-size 128 --num-attention-heads 4 --head-dim 32 "
    "--rotary-dim 16 --num-hidden-layers 4 --num-local-experts 8 --num-experts-per-tok 2 --vocab-size 320",
}


def main() -> int:
    """Train the requested models; return 3 if one could not be trained, else 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[_recipe_parser()]
    )
    parser.add_argument("models", nargs="*", metavar="MODEL", help=f"{', '.join(RECIPES)} (default: all)")
    parser.add_argument(
        "--output-dir",
        type=Path,
        default=Path("mm2-models"),
        help="folder of learned_MODEL and learned_MODEL_fp8 (default: %(default)s)",
    )
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.models) - set(RECIPES))
    if unknown:
        parser.error(f"there is no model {', '.join(unknown)}; there are {', '.join(RECIPES)}")
    models = arguments.models or list(RECIPES)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    # Another number of threads changes the last bits of the weights.
    torch.set_num_threads(1)
    try:
        for name in models:
            output = arguments.output_dir / f"learned_{name}"
            outputs = {output: torch.bfloat16, Path(f"{output}_fp8"): torch.float8_e4m3fn}
            learned = train_checkpoint(outputs, read_recipe(RECIPES[name], **vars(arguments)))
            print("\n".join(_describe(learned)), flush=True)
    except Mm2Error as error:
        print(f"Error: {error}", file=sys.stderr)
        return 3
    return 0


def _recipe_parser() -> argparse.ArgumentParser:
    """Return a parser of a recipe's options; options that are not given leave no value."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, argument_default=argparse.SUPPRESS)
    group = parser.add_argument_group("options of a model, instead of its recipe's")
    group.add_argument("--text", metavar="NAME|FILE", help=f"{', '.join(CORPORA)}, or a UTF-8 file")
    group.add_argument("--steps", type=int, help="number of training steps")
    group.add_argument("--seed", type=int, help="seed of weights and rows")
    group.add_argument("--massive-channels", type=int, help="channels of the stream that start massive")
    for size, kind in _SIZES.items():
        group.add_argument(f"--{size.replace('_', '-')}", type=kind, help="as in config.json of a MiniMax-M2")
    return parser


def read_recipe(line: str, **given: Any) -> Recipe:
    """Read a line of `RECIPES`; options that are `given` replace its own.

    Raises:
        UsageError: The sizes describe no model of the family.
    """
    chosen = {**_DEFAULTS, **vars(_recipe_parser().parse_args(shlex.split(line))), **given}
    model = SyntheticModel(**{size: chosen[size] for size in _SIZES if size in chosen})
    return Recipe(
        texts=(chosen["text"],),
        model=model,
        options=TrainingOptions(
            num_steps=chosen["steps"],
            learning_rate=_LEARNING_RATE_OF_WIDTH / model.hidden_size,
            seed=chosen["seed"],
        ),
        num_massive_channels=chosen.get("massive_channels", 0),
    )


def _describe(learned: LearnedModel) -> list[str]:
    """Return lines on the training, and on held-out text."""
    course, before, after = learned.course, learned.before, learned.after
    return [
        f"{', '.join(str(folder) for folder in learned.folders)}: "
        f"{format_count(course.num_steps, 'step')}, {course.num_tokens} tokens, {course.duration_s:.0f} s",
        f"loss {course.loss:.3f} nats per token over the last steps",
        f"held-out text: {after.bits_per_byte:.3f} bits per byte ({before.bits_per_byte:.2f} before training)",
        f"with the experts of another token: {after.bits_per_byte_random_experts:.3f} bits per byte",
    ]


if __name__ == "__main__":
    sys.exit(main())
