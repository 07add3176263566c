"""Whole runs: tiny models of every architecture, split both ways, against transformers' own whole model."""

from __future__ import annotations

import io
import json
import logging
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from minimax_tools.errors import BackendError, CheckpointError, UsageError
from minimax_tools.machine.memory import MemoryBudgetError
from minimax_tools.split.components import SplitModel
from minimax_tools.split.factory import ModelFactory, logging_to_stderr

ARCHITECTURES = ("minimax_m2", "llama", "qwen2", "qwen3", "qwen3_moe", "olmoe", "mixtral", "gpt2")
OTHERS = ("bloom", "cohere", "falcon", "gemma2", "gpt_neox", "gpt_oss", "mistral", "opt", "phi")
Q_PROJ, UP_PROJ, NORM, EXPERT = (
    f"model.layers.2.{name}.weight"
    for name in ("self_attn.q_proj", "mlp.up_proj", "input_layernorm", "block_sparse_moe.experts.7.w3")
)
MISSING = {"bottom": "cpu", "trunk": "cpu", "top": f"cuda:{torch.cuda.device_count()}"}
Parts = tuple[SplitModel, SplitModel, SplitModel]


def split(made: Any, folder: Path | None = None, **options: Any) -> Parts:
    """The components of a made model, or of one like it in another folder."""
    return ModelFactory.create_split_models(made.model_type, str(folder or made.folder), 1, 3, **options)


@pytest.fixture(scope="module")
def split_once(make: Callable[..., Any]) -> Callable[..., tuple[Any, Parts]]:
    """A tiny model and its components, made once per kind."""
    done: dict[tuple[Any, ...], tuple[Any, Parts]] = {}

    def run(model_type: str, **kind: Any) -> tuple[Any, Parts]:
        key = (model_type, *kind.items())
        if key not in done:
            made = make(model_type, **kind)
            done[key] = (made, split(made))
        return done[key]

    return run


@pytest.mark.parametrize("model_type", ARCHITECTURES)
def test_chained_logits_are_the_whole_models_bit_for_bit(
    split_once: Any,
    chain: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    model_type: str,
) -> None:
    made, parts = split_once(model_type)
    assert len(list(made.folder.glob("*.safetensors"))) > 1
    logits = chain(parts, input_ids, attention_mask)
    assert logits.dtype == torch.bfloat16
    assert torch.equal(logits, made.logits(input_ids, attention_mask))


@pytest.mark.parametrize("model_type", OTHERS)
def test_other_architectures_that_pass_the_proof_chain_to_the_whole_models_logits(
    model_type: str, make: Any, chain: Any, input_ids: torch.Tensor
) -> None:
    made = make(model_type)
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[1, 6:] = 0
    assert torch.equal(chain(split(made), input_ids, mask), made.logits(input_ids, mask))


def test_buffers_that_no_checkpoint_holds_are_computed(make: Any) -> None:
    made = make("llama", rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4})
    found, expected = (dict(model.named_buffers()) for model in (split(made)[1].model, made.model))
    assert found.keys() == expected.keys() != set()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_transformers_keeps_in_float32_stays_so(make: Any) -> None:
    trunk = split(make("deepseek_v3"))[1]
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    assert trunk.model.state_dict()[name].dtype == torch.float32


@pytest.mark.parametrize("model_type", ["minimax_m2", "gpt2", "qwen3_moe"])
@pytest.mark.parametrize("shard_size", ["60KB", "1GB"], ids=["sharded", "one-file"])
def test_pickled_checkpoints_give_the_same_logits(
    split_once: Any, chain: Any, input_ids: torch.Tensor, model_type: str, shard_size: str
) -> None:
    made, parts = split_once(model_type, pickled=True, shard_size=shard_size)
    assert not list(made.folder.glob("*.safetensors"))
    assert torch.equal(chain(parts, input_ids, None), made.logits(input_ids, None))


def test_model_in_one_file_is_split_too_and_a_component_may_have_one_layer(
    make: Any, chain: Any, input_ids: torch.Tensor
) -> None:
    made = make("llama", shard_size="1GB")
    parts = ModelFactory.create_split_models("llama", str(made.folder), 1, 2)
    assert [len(part.part.span) for part in parts] == [1, 1, 2]
    assert torch.equal(chain(parts, input_ids, None), made.logits(input_ids, None))


def test_buffers_of_older_checkpoints_are_let_be_and_weights_of_integers_are_not(
    make: Any, chain: Any, input_ids: torch.Tensor, tmp_path: Path
) -> None:
    made = make("gpt2", pickled=True, shard_size="1GB")
    folder = copy(made.folder, tmp_path)
    tensors = torch.load(folder / "pytorch_model.bin")
    for layer in range(4):
        tensors[f"transformer.h.{layer}.attn.bias"] = torch.ones(1, 1, 64, 64, dtype=torch.uint8)
        tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
    torch.save(tensors, folder / "pytorch_model.bin")
    assert torch.equal(chain(split(made, folder), input_ids, None), made.logits(input_ids, None))
    name = "transformer.h.1.mlp.c_fc.weight"
    torch.save({**tensors, name: tensors[name].to(torch.int8)}, folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=name):
        split(made, folder)


def test_components_hold_their_layers_and_nothing_of_the_others(split_once: Any) -> None:
    made, (bottom, trunk, top) = split_once("minimax_m2")
    names = [set(part.model.state_dict()) for part in (bottom, trunk, top)]
    assert set().union(*names) == set(made.model.state_dict())
    assert not names[0] & names[1]
    assert not names[1] & names[2]
    assert "model.embed_tokens.weight" in names[0]
    assert {"model.norm.weight", "lm_head.weight"} <= names[2]
    assert {name.split(".")[2] for name in names[1]} == {"1", "2"}


def test_tied_head_is_a_weight_of_its_own_on_top(split_once: Any) -> None:
    _, (bottom, _, top) = split_once("gpt2")
    embedding = bottom.model.get_parameter("transformer.wte.weight")
    head = top.model.get_parameter("lm_head.weight")
    assert torch.equal(embedding, head)
    assert embedding.data_ptr() != head.data_ptr()


def test_router_of_minimax_m2_stays_float32_as_stored(split_once: Any) -> None:
    made, parts = split_once("minimax_m2")
    for part in parts:
        for layer in part.part.layers:
            for leaf in ("gate.weight", "e_score_correction_bias"):
                name = f"model.layers.{layer}.mlp.{leaf}"
                tensor = part.model.state_dict()[name]
                assert tensor.dtype == torch.float32
                assert torch.equal(tensor, made.model.state_dict()[name])


@pytest.mark.parametrize(
    "chosen",
    [{"dtype": torch.float32}, {"attn_implementation": "eager", "experts_implementation": "eager"}],
    ids=["dtype", "implementations"],
)
def test_dtype_and_implementations_are_those_asked_for(
    chosen: dict[str, Any], make: Any, chain: Any, input_ids: torch.Tensor
) -> None:
    from transformers import AutoModelForCausalLM

    made = make("mixtral")
    parts = split(made, **chosen)
    whole = AutoModelForCausalLM.from_pretrained(made.folder, **chosen)
    with torch.no_grad():
        expected = whole(input_ids).logits
    logits = chain(parts, input_ids, None)
    assert logits.dtype == chosen.get("dtype", torch.bfloat16)
    assert torch.equal(logits, expected)
    for part in parts:
        assert part.model.config._attn_implementation == chosen.get("attn_implementation", "sdpa")


def test_dtype_comes_from_the_weights_where_the_config_has_none(make: Any, tmp_path: Path) -> None:
    folder = copy(make("llama").folder, tmp_path)
    edit_config(folder, lambda config: config.pop("dtype", None))
    assert [part.dtype for part in split(make("llama"), folder)] == [torch.bfloat16] * 3


@pytest.fixture(scope="module")
def whole_toy(toy: Path, load_with_float32_router: Any) -> Any:
    """transformers' model of mm2's synthetic checkpoint, its router as stored."""
    from transformers import FineGrainedFP8Config

    return load_with_float32_router(toy, quantization_config=FineGrainedFP8Config(dequantize=True))


@pytest.fixture(scope="module")
def toy_parts(toy: Path) -> Parts:
    return ModelFactory.create_split_models("minimax_m2", str(toy), 1, 3)


class TestFp8:
    def test_chained_logits_are_the_golden_models(
        self,
        whole_toy: Any,
        toy_parts: Parts,
        chain: Any,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None,
    ) -> None:
        with torch.no_grad():
            expected = whole_toy(input_ids, attention_mask=attention_mask).logits
        assert torch.equal(chain(toy_parts, input_ids, attention_mask), expected)

    def test_what_is_saved_is_not_fp8_any_more(self, toy_parts: Parts, tmp_path: Path) -> None:
        toy_parts[1].save(tmp_path / "trunk")
        assert "quantization_config" not in json.loads((tmp_path / "trunk" / "config.json").read_text())
        assert equal_states(SplitModel.load(tmp_path / "trunk"), toy_parts[1])


class TestShards:
    def test_only_shards_of_the_component_are_needed(self, make: Any, tmp_path: Path) -> None:
        made = make("minimax_m2")
        weight_map = json.loads((made.folder / "model.safetensors.index.json").read_text())["weight_map"]
        folder = copy(made.folder, tmp_path)
        others = {file for name, file in weight_map.items() if not name.startswith("model.layers.3.")}
        only_top = set(weight_map.values()) - others
        assert only_top
        for file in only_top:
            (folder / file).unlink()
        # Bottom and trunk are loaded, and saved, before a shard of top is missed.
        with pytest.raises(CheckpointError, match=sorted(only_top)[0]):
            split(made, folder, auto_save=True, storage_path=tmp_path / "saved")
        assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == ["bottom", "trunk"]

    def test_damaged_shard_is_named(self, make: Any, tmp_path: Path) -> None:
        folder = copy(make("llama").folder, tmp_path)
        shard = sorted(folder.glob("*.safetensors"))[0]
        shard.write_bytes(shard.read_bytes()[:-8])
        with pytest.raises(CheckpointError, match=shard.name):
            split(make("llama"), folder)

    @pytest.mark.parametrize(
        ("model_type", "name", "other", "change", "found"),
        [
            ("mixtral", Q_PROJ, None, None, f"{Q_PROJ}: found nothing"),
            ("mixtral", EXPERT, None, None, "gate_up_proj: its stored matrices do not"),
            ("qwen3", UP_PROJ, UP_PROJ, lambda weight: weight.T.contiguous(), "up_proj|mismatch"),
            ("qwen3", Q_PROJ, "model.layers.1.x.weight", torch.clone, "x.weight: the model has no place"),
            ("qwen3", NORM, NORM.removeprefix("model."), torch.clone, "is there under two names"),
        ],
        ids=["missing", "missing expert", "shape", "left over", "two spellings"],
    )
    def test_tensor_that_does_not_fit_is_named(
        self,
        model_type: str,
        name: str,
        other: str | None,
        change: Any,
        found: str,
        make: Any,
        tmp_path: Path,
    ) -> None:
        def edit(tensors: dict[str, torch.Tensor]) -> None:
            if name in tensors and other is not None:
                tensors[other] = change(tensors[name])
            elif name in tensors:
                del tensors[name]

        folder = copy(make(model_type).folder, tmp_path)
        rewrite(folder, edit)
        with pytest.raises(CheckpointError, match=found):
            split(make(model_type), folder)


class TestArguments:
    def test_other_model_type_is_refused(self, make: Any) -> None:
        with pytest.raises(UsageError, match="model_type is 'qwen2'.*expected 'llama', found 'qwen2'"):
            ModelFactory.create_split_models("qwen2", str(make("llama").folder), 1, 3)

    @pytest.mark.parametrize(
        ("options", "error", "message"),
        [
            ({"device_map": MISSING}, BackendError, f"there is no {MISSING['top']}, which top"),
            ({"auto_save": True}, UsageError, "auto_save needs storage_path"),
            ({"memory_budget": "1MB"}, MemoryBudgetError, "would break the memory budget"),
            ({"memory_budget": "12"}, UsageError, "memory_budget is '12'"),
            ({"dtype": torch.float8_e4m3fn}, UsageError, "dtype is torch.float8_e4m3fn"),
        ],
        ids=["device", "auto_save without a folder", "budget", "no budget", "dtype"],
    )
    def test_argument_that_cannot_be_used_is_refused(
        self, options: dict[str, Any], error: type[Exception], message: str, make: Any
    ) -> None:
        with pytest.raises(error, match=message):
            split(make("llama"), **options)

    def test_folder_that_holds_something_else_is_refused_before_loading(
        self, make: Any, tmp_path: Path
    ) -> None:
        (tmp_path / "top").mkdir()
        (tmp_path / "top" / "thesis.txt").write_text("dear")
        with pytest.raises(UsageError, match="top holds something else"):
            split(make("llama"), storage_path=tmp_path, auto_save=True)
        assert [path.name for path in tmp_path.iterdir()] == ["top"]

    def test_nothing_is_saved_unless_asked(self, make: Any, tmp_path: Path) -> None:
        split(make("llama"), storage_path=tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_folder_that_is_not_there_is_named(self, make: Any, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="nowhere"):
            split(make("llama"), tmp_path / "nowhere")

    def test_other_quantisation_is_refused(self, make: Any, tmp_path: Path) -> None:
        folder = copy(make("llama").folder, tmp_path)
        other = {"quant_method": "gptq", "bits": 4}
        edit_config(folder, lambda config: config.update(quantization_config=other))
        with pytest.raises(CheckpointError, match="quant_method 'gptq'"):
            split(make("llama"), folder)


class TestSaving:
    def test_saved_components_load_by_folder_and_by_the_old_names(
        self, make: Any, chain: Any, input_ids: torch.Tensor, tmp_path: Path
    ) -> None:
        made = make("gpt2")
        split(made, storage_path=tmp_path, auto_save=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["bottom", "top", "trunk"]
        for suffix in ("", ".pt"):
            parts = [SplitModel.load(tmp_path / f"{role}{suffix}") for role in ("bottom", "trunk", "top")]
            assert torch.equal(chain(parts, input_ids, None), made.logits(input_ids, None))


class TestTelling:
    def test_verbose_tells_what_the_transcript_shows(
        self, make: Any, capfd: pytest.CaptureFixture[str]
    ) -> None:
        split(make("minimax_m2"), verbose=True)
        out, err = capfd.readouterr()
        assert out == ""
        for text in (
            "Loading component: bottom (layer 0 + embedding)",
            "Loading component: trunk (layers 1-2)",
            "Loading component: top (layer 3 + final norm + lm_head)",
            "Loading parameters: ",
            "Memory: Bottom loaded\n  RAM: ",
            "Memory: Top loaded",
            "  GPU: 0.00 GB (+0.00 GB)",
            "=== Memory Usage Summary ===",
        ):
            assert text in err
        assert "Shards: " in err

    @pytest.mark.parametrize("verbose", [True, False])
    def test_bars_show_in_a_terminal_while_components_load(
        self,
        make: Any,
        capfd: pytest.CaptureFixture[str],
        monkeypatch: pytest.MonkeyPatch,
        verbose: bool,
    ) -> None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
        split(make("minimax_m2"), verbose=verbose)
        assert capfd.readouterr().err.count("Loading weights: 100%") == (3 if verbose else 0)

    def test_nothing_is_told_unless_asked(self, make: Any, capfd: pytest.CaptureFixture[str]) -> None:
        split(make("llama"))
        assert capfd.readouterr() == ("", "")


def copy(folder: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(folder, tmp_path / "copy"))


def edit_config(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config)
    path.write_text(json.dumps(config))


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Change the tensors of every shard, and the index with them."""
    weight_map = {}
    for shard in sorted(folder.glob("*.safetensors")):
        tensors = load_file(shard)
        change(tensors)
        save_file(tensors, shard, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(tensors, shard.name))
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def equal_states(first: SplitModel, second: SplitModel) -> bool:
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    return ours.keys() == theirs.keys() and all(
        ours[name].dtype == theirs[name].dtype and torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_messages_show_on_stderr_while_the_block_lasts(capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("minimax_tools.split.tests")
    with logging_to_stderr(True):
        logger.info("loading")
    logger.info("over")
    assert capsys.readouterr() == ("", "loading\n")


def test_what_is_shown_already_is_not_shown_twice(capsys: pytest.CaptureFixture[str]) -> None:
    package, stream = logging.getLogger("minimax_tools"), io.StringIO()
    package.handlers[:] = [logging.StreamHandler(stream)]
    package.setLevel(logging.INFO)
    with logging_to_stderr(True):
        package.info("loading")
    assert stream.getvalue() == "loading\n"
    assert capsys.readouterr() == ("", "")


# What the top alone holds.
TOP = ("model.layers.3.", "model.norm.", "lm_head.")
# Splits a hub's model: huggingface_hub reads its variables when it is imported.
_SPLIT = """
import sys
import torch
from minimax_tools.split.factory import ModelFactory

parts = ModelFactory.create_split_models("minimax_m2", "owner/tiny", 1, 3, verbose=True)
states = torch.load(sys.argv[1] + "/ids.pt")
with torch.no_grad():
    for part in parts:
        states = part(states)
torch.save(states, sys.argv[1] + "/logits.pt")
"""


def test_shards_are_fetched_component_by_component_each_once(
    hub: Any, make: Callable[..., Any], input_ids: torch.Tensor, tmp_path: Path, forked_python: Any
) -> None:
    made = make("minimax_m2")
    hub.add("owner/tiny", made.folder)
    torch.save(input_ids, tmp_path / "ids.pt")
    done = forked_python(
        _SPLIT, tmp_path, HF_ENDPOINT=hub.endpoint, HF_HOME=str(tmp_path / "home"), HF_HUB_OFFLINE="0"
    )
    assert done.returncode == 0, done.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt"), made.logits(input_ids, None))
    shards = sorted(path.name for path in made.folder.glob("*.safetensors"))
    asked = [one.file for one in hub.asked("GET") if one.file in shards]
    assert sorted(asked) == shards
    assert done.stderr.index("Loading component: bottom") < done.stderr.index("Memory: Bottom loaded")
    only_top = {
        shard for shard in shards if all(name.startswith(TOP) for name in load_file(made.folder / shard))
    }
    assert only_top
    assert set(asked[-len(only_top) :]) == only_top
    assert f"Shards: {len(shards)} of" not in done.stderr
