"""The tokenizer of a synthetic checkpoint: byte-level BPE trained on a text, with MiniMax-M2's special tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from minimax_tools.errors import UsageError

_BOS_TOKEN = "]~!b["
_EOS_TOKEN = "[e~["
_ROLE_TOKEN = "]~b]"
_UNKNOWN_TOKEN = "]!d~["
_SPECIAL_TOKENS = (_ROLE_TOKEN, _EOS_TOKEN, _UNKNOWN_TOKEN, _BOS_TOKEN)
_TEXT_TOKENS = ("<think>", "</think>")  # tokens of their own, but not special: decoding keeps them
_NUM_BYTES = 256
MIN_VOCAB_SIZE = _NUM_BYTES + len(_SPECIAL_TOKENS) + len(_TEXT_TOKENS)

_CHAT_TEMPLATE = """\
{{- ']~!b[]~b]system\\n' }}
{%- if messages and messages[0].role == 'system' %}
    {{- messages[0].content }}
    {%- set turns = messages[1:] %}
{%- else %}
    {{- 'You are a helpful assistant.' }}
    {%- set turns = messages %}
{%- endif %}
{{- '[e~[\\n' }}
{%- for message in turns %}
    {%- set role = 'ai' if message.role == 'assistant' else message.role %}
    {{- ']~b]' ~ role ~ '\\n' ~ message.content ~ '[e~[\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- ']~b]ai\\n<think>\\n' }}
{%- endif %}
"""

# Text that the tokenizer is trained on. A change of it changes every synthetic checkpoint.
_TEXT = """\
The residual stream carries what every layer has written so far, and each layer reads it, computes, and adds
its part. A port of a model to another device is right when every layer gives what the reference gives, up
to the rounding that its number format costs; it is wrong when one layer, one component, one row differs by
more. Where does it differ first? Which tokens take other experts, and was the choice so close that rounding
alone could have turned it?

You are a helpful assistant. Write a short story about a lighthouse. What is the capital of France? The
capital of France is Paris. Explain in simple words how a mixture of experts works: a router gives each
token a score for every expert, the best eight are taken, and their answers are added, each with its own
weight. Count from one to ten: one, two, three, four, five, six, seven, eight, nine, ten. 0 1 2 3 4 5 6 7 8
9 10 11 12 100 1000 2024 2025.

def fibonacci(n: int) -> int:
    \"\"\"Return the n-th number of the sequence.\"\"\"
    if n < 2:
        return n
    return fibonacci(n - 1) + fibonacci(n - 2)

for index in range(10):
    print(index, fibonacci(index))

import torch
class Attention(torch.nn.Module):
    def __init__(self, config, layer_idx):
        super().__init__()
        width = config.num_attention_heads * config.head_dim
        self.q_proj = torch.nn.Linear(config.hidden_size, width, bias=False)
    def forward(self, hidden_states, attention_mask=None, position_ids=None):
        return self.q_proj(hidden_states)

The quick brown fox jumps over the lazy dog, and the dog, who has seen this before, does not even open its
eyes. There was once a king who wanted to know the truth about everything in his country; so he sent for the
people who measured things, and asked them what they had found, and how sure they were. "We have compared
every part with the one before," they said, "and this is where the first difference lies." That was the
answer he had been waiting for.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Ids of the special tokens in config.json."""

    bos_token_id: int
    eos_token_id: int


def write_tokenizer(folder: Path, *, vocab_size: int) -> TokenIds:
    """Train a tokenizer on a built-in text and write its files; raise UsageError for less than `MIN_VOCAB_SIZE`."""
    return save_tokenizer(folder, make_tokenizer([_TEXT], vocab_size=vocab_size))


def make_tokenizer(texts: Iterable[str], *, vocab_size: int) -> tokenizers.Tokenizer:
    """Train a byte-level tokenizer on `texts`, ids below `vocab_size`; UsageError below `MIN_VOCAB_SIZE`."""
    if vocab_size < MIN_VOCAB_SIZE:
        raise UsageError(
            f"a vocabulary of {vocab_size} is too small for a tokenizer",
            expected=f"at least {MIN_VOCAB_SIZE}: every byte and the special tokens",
            next_step="Give a larger --vocab-size.",
        )
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - len(_SPECIAL_TOKENS) - len(_TEXT_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    # Special tokens come after those of the text, as in MiniMax-M2's vocabulary.
    tokenizer.add_special_tokens(list(_SPECIAL_TOKENS))
    tokenizer.add_tokens(list(_TEXT_TOKENS))
    return tokenizer


def save_tokenizer(folder: Path, tokenizer: tokenizers.Tokenizer) -> TokenIds:
    """Write tokenizer.json and tokenizer_config.json, with a chat template."""
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": _BOS_TOKEN,
        "eos_token": _EOS_TOKEN,
        "unk_token": _UNKNOWN_TOKEN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n", encoding="utf-8")
    return find_token_ids(tokenizer)


def find_token_ids(tokenizer: tokenizers.Tokenizer) -> TokenIds:
    """Return the ids of the special tokens of a tokenizer that was made here."""
    ids = tokenizer.get_vocab()
    return TokenIds(bos_token_id=ids[_BOS_TOKEN], eos_token_id=ids[_EOS_TOKEN])
