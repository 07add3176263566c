"""Files beside weights, dumps and prompts, to be damaged: a tokenizer's, a split model's, SGLang's facts, answers."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from minimax_tools.machine.json_file import parse_json
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory
from minimax_tools.split.part_folder import DESCRIPTION_FILE
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel
from minimax_tools.text.lm_eval_samples import read_lm_eval_samples
from minimax_tools.text.tokenizer import TOKENIZER_NAME, encode_texts, read_end_tokens
from neuron.cli import main as mm2_test
from torture.hostile_file import HostileFile, reading
from torture.hostile_world import HostileWorld
from torture.mutations import Leniency

_MODEL = SyntheticModel(
    num_hidden_layers=3,
    hidden_size=16,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    rotary_dim=4,
    num_local_experts=4,
    intermediate_size=8,
    vocab_size=300,
)
_MOST_DRAWN = 400
_GENERATED = {
    "doc_id": 3,
    "target": "42",
    "arguments": {"gen_args_0": {"arg_0": "6 x 7 =", "arg_1": {"until": ["\n"]}}},
    "resps": [[" 41"]],
    "filter": "strict-match",
    "metrics": ["exact_match"],
    "exact_match": 0.0,
}
_CHOSEN = {
    "doc_id": 0,
    "target": 1,
    "arguments": [["Answer:", " A"], ["Answer:", " B"]],
    "resps": [[["-2.5", "False"]], [["-0.5", "True"]]],
    "metrics": ["acc"],
    "acc": 1.0,
}


def model_files(world: HostileWorld, folder: Path) -> Iterator[HostileFile]:
    """Yield the files, written into an empty folder; SGLang's are the world's."""
    model = folder / "model"
    synthesize(model, model=_MODEL, dtype=torch.bfloat16, shard_size_bytes=1_000_000, seed=0)
    yield from _tokenizer(model)
    yield from _split(model, folder)
    yield from _samples(folder)
    yield _sglang(world)


def _tokenizer(model: Path) -> Iterator[HostileFile]:
    reader = reading(lambda: encode_texts(model, ["a b"], chat=True))
    # What its values must be is for the library to say.
    yield HostileFile(
        name="tokenizer", path=model / TOKENIZER_NAME, command=reader, may_pass=True, most_drawn=_MOST_DRAWN
    )
    yield HostileFile(
        name="tokenizer's config",
        path=model / "tokenizer_config.json",
        command=reader,
        leniency=Leniency(
            unread=("tokenizer_class", "clean_up_tokenization_spaces", "model_max_length", "add_*"),
            optional=("*_token",),
            nullable=("*_token",),
            also=(("*_token", "dict"), ("chat_template", "list")),
        ),
    )
    path = model / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": [200, 201], "temperature": 1.0}))
    yield HostileFile(
        name="generation's config",
        path=path,
        command=reading(lambda: read_end_tokens(model)),
        leniency=Leniency(
            unread=("temperature",),
            optional=("eos_token_id",),
            nullable=("eos_token_id",),
            also=(("eos_token_id", "int"),),
        ),
    )


def _split(model: Path, folder: Path) -> Iterator[HostileFile]:
    bottom, *_ = ModelFactory.create_split_models("minimax_m2", str(model), 1, 2, low_memory=True)
    part, seed = folder / "part", folder / "seed.pt"
    bottom.save(part)
    yield HostileFile(
        name="description of a component",
        path=part / DESCRIPTION_FILE,
        command=reading(lambda: SplitModel.load(part)),
        leniency=Leniency(
            unread=("model_type", "versions"),
            optional=("attn_implementation", "experts_implementation"),
            nullable=("attn_implementation", "experts_implementation"),
        ),
    )
    torch.save(bottom.model.state_dict(), seed)
    path = folder / "seed_metadata.json"
    config = json.loads(bottom.model.config.to_json_string(use_diff=False))
    path.write_text(json.dumps({"component": "bottom", "start_layer": 0, "end_layer": 1, "config": config}))
    yield HostileFile(
        name="metadata of a seed",
        path=path,
        command=reading(lambda: SplitModel.load(seed)),
        # transformers has defaults for most, and judges the rest.
        leniency=Leniency(unread=("config.*",)),
        most_drawn=_MOST_DRAWN,
    )


def _samples(folder: Path) -> Iterator[HostileFile]:
    generated, chosen = folder / "generated.jsonl", folder / "chosen.jsonl"
    for path, record in ((generated, _GENERATED), (chosen, _CHOSEN)):
        path.write_text(json.dumps(record))
    # A task has any target and metrics; a metric that is no number judges nothing.
    unread = ("filter", "target", "exact_match", "acc", "arguments.gen_args_0.arg_1")
    yield HostileFile(
        name="answers",
        path=generated,
        command=reading(lambda: read_lm_eval_samples(generated)),
        leniency=Leniency(
            unread=unread,
            optional=("doc_id", "metrics"),
            also=(("doc_id", "str"), ("resps.0", "str"), ("arguments", "list")),
        ),
    )
    yield HostileFile(
        name="choices",
        path=chosen,
        command=reading(lambda: read_lm_eval_samples(chosen)),
        leniency=Leniency(
            unread=unread,
            optional=("doc_id", "metrics"),
            also=(("doc_id", "str"), ("resps.*.*.0", "float"), ("resps.*.*.0", "int")),
        ),
    )


def _sglang(world: HostileWorld) -> HostileFile:
    (path,) = world.dump("sglang").glob("*.pt")
    content = torch.load(path)

    def pack(text: bytes) -> bytes:
        try:
            meta: Any = parse_json(text)
        except ValueError:
            return text  # nor is that a pickle
        file = io.BytesIO()
        torch.save({**content, "meta": meta}, file)
        return file.getvalue()

    return HostileFile(
        name="facts of SGLang",
        path=path,
        command=mm2_test,
        words=("show", world.dump("sglang"), "--quiet"),
        pack=pack,
        unpack=lambda stored: json.dumps(torch.load(io.BytesIO(stored))["meta"]).encode(),
        leniency=Leniency(
            unread=("world_size",),  # what the parallel groups say goes before it
            optional=("*",),
            nullable=("sglang_parallel_info",),
        ),
    )
