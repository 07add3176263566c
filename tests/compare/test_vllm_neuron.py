"""Dumps of vLLM Neuron as its models write them, judged without a map: what their tensors are is proved."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import Site
from neuron.cli import main as mm2_test

Command = Callable[..., click.testing.Result]

PASS = "prefill_s128_0"
# Both prompts, and two decoded tokens of each.
PASSES = [[(0, 0, 46), (1, 0, 31)], [(0, 46, 47), (1, 31, 32)], [(0, 47, 48), (1, 32, 33)]]
NUM_SITES = 4 * 17 + 3
# Sites that the usual modules and the proofs give.
COMPARED = 51
# Sites whose tensors are divided by heads, or hold no tokens' values.
NO_HIDDEN = ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm", "gate", "lm_head")


@pytest.fixture
def write(write: Any) -> Callable[..., Path]:
    """Writes a run as vLLM Neuron does."""
    return partial(write, "vllm-neuron")


SUM = "output is the stream before the layer + attention + experts"
# Sites that are not known, by what is done to the embedding.
LOST = {"padded": 0, "of the model's width": 1, "not held": 2}


def files(folder: Path, pattern: str = "*") -> Iterator[Path]:
    """Yield the files of the modules that fit the pattern."""
    found = sorted(folder.rglob(f"{pattern}/rank*.pt"))
    assert found
    return iter(found)


def change(folder: Path, pattern: str, how: Callable[[torch.Tensor], torch.Tensor]) -> None:
    for path in files(folder, pattern):
        torch.save(how(torch.load(path)).contiguous(), path)


def remove(folder: Path, pattern: str) -> None:
    for path in list(folder.glob(f"dp*/*/{pattern}")):
        shutil.rmtree(path)


def blamed(record: dict[str, Any]) -> list[tuple[int | None, str]]:
    """Return the layer and the last site of each blame: behind it, mm2 cannot tell the experts' choice from them."""
    return [(blame["layer"], blame["sites"][-1]) for blame in record["blame"]]


def told(record: dict[str, Any], words: str) -> bool:
    return any(words in note for note in record["notes"])


class TestStream:
    def test_what_a_layer_returns_is_proved_to_be_its_output(self, write: Any, reads_as: Any) -> None:
        reading = reads_as(write())
        assert reading.num_sites == COMPARED
        assert reading.told("proved in layers 0-3: model.layers.{layer} is the layer's output")
        assert reading.told("the stream before the layer + attention + experts, bit for bit")

    @pytest.mark.parametrize("norms", [True, False])
    def test_else_the_sum_of_the_deltas_is_the_output(self, norms: bool, write: Any, reads_as: Any) -> None:
        folder = write("swapped")
        remove(folder, "model.layers.[0-3]")
        if not norms:
            # The last layer's output is then proved by nothing.
            remove(folder, "model.norm")
        reading = reads_as(folder, "swapped")
        assert reading.num_sites == COMPARED - (0 if norms else 2)
        layers = "layers 0-3" if norms else "layers 0-2"
        assert reading.told(f"proved in {layers}: {SUM}")
        assert reading.told("nothing tells the output of layer 3: capture model.layers.N") is not norms

    def test_addend_that_a_layer_returns_is_not_taken_for_its_output(self, write: Any, reads_as: Any) -> None:
        """A model that adds the residual in the next norm: its layers return the experts' delta and the residual."""
        folder = write()
        for path in files(folder, "model.layers.[0-3].block_sparse_moe"):
            shutil.copy(path, path.parent.parent / path.parent.name.removesuffix(".block_sparse_moe"))
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED
        assert reading.told(f"proved in layers 0-3: {SUM}")

    def test_tensor_that_nothing_proves_asks_for_a_map(self, write: Any, compare: Any) -> None:
        folder = write()
        change(folder, "model.layers.[0-3]", lambda held: torch.randn_like(held, dtype=torch.float32))
        remove(folder, "*norm")
        exit_code, record = compare(folder)
        assert exit_code == 3
        assert told(record, 'say so in a map: sites: {output: "model.layers.{layer}"}')
        assert not [site for site in record["sites"] if site["site"] == "output" and site["status"] == "pass"]


class TestRows:
    def test_rows_divided_among_ranks_are_joined(self, write: Any, reads_as: Any) -> None:
        """Sequence parallelism: in a prefill, each rank has the tokens of its part of the bucket."""
        folder = write(num_ranks=2)
        for path in files(folder):
            if not path.parent.name.endswith(NO_HIDDEN):
                part = torch.load(path).chunk(2)[int(path.stem.removeprefix("rank"))]
                torch.save(part.clone(), path)
        assert reads_as(folder).num_sites == COMPARED

    def test_ranks_rows_in_another_order_are_no_right_port(self, write: Any, compare: Any) -> None:
        folder = write(num_ranks=2)
        for path in files(folder, "model.layers.2.block_sparse_moe"):
            part = torch.load(path).chunk(2)[1 - int(path.stem.removeprefix("rank"))]
            torch.save(part.clone(), path)
        exit_code, _ = compare(folder)
        assert exit_code != 0

    def test_rows_of_all_replicas_are_cut(self, dumps: Any, runs: Any, reads_as: Any, tmp_path: Path) -> None:
        """Data parallelism: experts see the tokens of both replicas, each of which has one prompt, named alike."""
        folder = tmp_path / "dump"
        folder.mkdir()
        for row in (0, 1):
            chunk = [[(row, 0, (48, 33)[row])]]
            dumps.write_vllm_neuron(tmp_path / str(row), runs["swapped"], passes=chunk, names=("0", "0"))
            (tmp_path / str(row) / "dp0").rename(folder / f"dp{row}")
        for name in [path.parent.relative_to(folder / "dp0") for path in files(folder / "dp0", "*moe")]:
            both = torch.cat([torch.load(folder / f"dp{row}" / name / "rank0.pt") for row in (0, 1)])
            for row in (0, 1):
                torch.save(both, folder / f"dp{row}" / name / "rank0.pt")
        assert reads_as(folder, "swapped").num_sites == COMPARED

    def test_whole_prompts_computed_anew_are_read_from_their_longest_pass(
        self, dumps: Any, runs: Any, reads_as: Any, tmp_path: Path
    ) -> None:
        """The side that transformers computes: without a cache, and decode passes as long as the text so far."""
        passes = [[(0, 0, 46)], [(0, 0, 47)], [(0, 0, 48)], [(1, 0, 32)], [(1, 0, 33)]]
        dumps.write_vllm_neuron(tmp_path / "dump", runs["swapped"], passes=passes)
        for number, path in enumerate(sorted((tmp_path / "dump" / "dp0").iterdir())):
            length = (46, 47, 48, 32, 33)[number]
            change(path, "*", lambda held, length=length: held[:length])  # type: ignore[misc]
            kind = "prefill_s" if length in (46, 32) else "decode_b"
            meta = json.loads((path / f"{path.name}_meta.json").read_text())
            (path / f"{path.name}_meta.json").unlink()
            name = f"{kind}{length}_0"
            (path / f"{name}_meta.json").write_text(json.dumps(meta | {"positions": list(range(length))}))
            path.rename(path.parent / name)
        reading = reads_as(tmp_path / "dump", "swapped")
        assert reading.num_sites == COMPARED
        assert reading.told("prefill_s32_0, prefill_s46_0, decode_b47_0: not read, because a longer pass")

    def test_sum_over_ranks_is_read_from_attention(self, write: Any, reads_as: Any) -> None:
        folder = write("swapped", num_ranks=2)
        for path in files(folder, "*.o_proj"):
            attention = path.parent.with_name(path.parent.name.removesuffix(".o_proj"))
            attention.mkdir(exist_ok=True)
            torch.save(torch.load(path), attention / path.name)
            torch.save(torch.load(path) * (0.25 if path.stem == "rank0" else 0.75), path)
        assert reads_as(folder, "swapped").num_sites == COMPARED

    def test_other_widths_in_other_passes_are_refused(self, write: Any, reads_as: Any) -> None:
        folder = write(passes=PASSES)
        decoding = folder / "dp0" / "decode_b64_0"
        change(decoding, "model.layers.1.block_sparse_moe", lambda held: held[:, :-1])
        words = "moe_delta of layer 1 has other widths in other passes: expected one width, found 255, 256"
        with pytest.raises(CaptureError, match=words):
            reads_as(folder)

    @pytest.mark.parametrize("embedding", LOST)
    def test_channels_of_zeros_are_cut(self, embedding: str, write: Any, reads_as: Any, compare: Any) -> None:
        def pad(held: torch.Tensor) -> torch.Tensor:
            return torch.nn.functional.pad(held, (0, 32)) if held.shape[-1] == 256 else held

        folder = write()
        if embedding == "not held":
            remove(folder, "model.embed_tokens")
        for path in files(folder):
            is_whole = path.parent.name == "model.embed_tokens" and embedding != "padded"
            if not is_whole and not path.parent.name.endswith(NO_HIDDEN):
                torch.save(pad(torch.load(path)), path)
        # Without it, neither itself nor the stream behind the first attention is known.
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED - LOST[embedding]
        assert reading.told("proved: the hidden size is padded to 288; the last 32 channels are zero")
        if embedding == "padded":
            # Values there are the port's mistake.
            change(folder, "model.layers.2.block_sparse_moe", lambda held: held + held.abs().amax())
            exit_code, record = compare(folder)
            assert (exit_code, blamed(record)) == (1, [(2, "moe_delta")])

    def test_parts_of_the_vocabulary_are_joined(self, write: Any, reads_as: Any) -> None:
        folder = write(num_ranks=2)
        for path in files(folder, "lm_head"):
            torch.save(torch.load(path).chunk(2, dim=-1)[int(path.stem.removeprefix("rank"))].clone(), path)
        assert reads_as(folder).num_sites == COMPARED
        swapped = [torch.load(path) for path in files(folder, "lm_head")]
        for path, part in zip(files(folder, "lm_head"), reversed(swapped), strict=True):
            torch.save(part, path)
        with pytest.raises(AssertionError, match="logits"):
            reads_as(folder)


@pytest.fixture
def add_requests(dumps: Any, runs: Any) -> Callable[..., None]:
    """Puts passes of other requests beside those of a dump."""

    def add(folder: Path, run: str, passes: Any, names: tuple[str, str], *, shift: int = 0) -> None:
        dumps.write_vllm_neuron(folder / "warm", runs[run], passes=passes, names=names)
        change(folder / "warm", "*embed_tokens", lambda held: held.roll(shift, -1))
        for number, path in enumerate(sorted((folder / "warm" / "dp0").iterdir())):
            name = f"prefill_s128_{number + 7}"
            (path / f"{path.name}_meta.json").rename(path / f"{name}_meta.json")
            path.rename(folder / "dp0" / name)
        shutil.rmtree(folder / "warm")

    return add


class TestPasses:
    def test_empty_passes_and_other_requests_are_left_out(
        self, add_requests: Any, write: Any, reads_as: Any
    ) -> None:
        """A warm-up request of a prompt's length, one whose passes are not all held, and metadata alone."""
        folder = write()
        # The tokens of the warm-up are others: its embedding is not the prompts'.
        add_requests(folder, "swapped", [[(0, 5, 33)], [(1, 0, 33), (0, 0, 15)]], ("8", "9"), shift=1)
        empty = folder / "dp0" / "decode_b2_0"
        empty.mkdir()
        (empty / "decode_b2_0_meta.json").write_text(json.dumps({"req_ids": [], "positions": [0, 0]}))
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED
        assert reading.told("1 pass holds no tensor, and is left out")

    def test_other_requests_are_left_out_of_a_golden_too(
        self, add_requests: Any, write: Any, compare: Any
    ) -> None:
        reference, folder = write(name="reference"), write("swapped")
        add_requests(folder, "right", [[(0, 0, 15)]], ("9", "9"))
        exit_code, record = compare(folder, reference=reference)
        assert (exit_code, record["compared"]) == (1, COMPARED)
        assert [blame["layer"] for blame in record["blame"]] == [1]

    def test_logits_of_a_prefills_last_tokens_are_read(self, write: Any, reads_as: Any) -> None:
        """Decoding is padded to a bucket that is longer than the prompts together."""
        folder = write(passes=PASSES)
        for name in ("model.norm", "lm_head"):
            change(folder / "dp0" / "prefill_s128_0", name, lambda held: held[[45, 45 + 31]])
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED
        assert reading.told("logits: held of 6 tokens to sample from alone, which are judged")
        change(folder / "dp0" / "decode_b64_1", "lm_head", lambda held: held.roll(1, -1))
        with pytest.raises(AssertionError, match="logits"):
            reads_as(folder)

    def test_target_model_of_speculative_decoding_is_read(self, write: Any, reads_as: Any) -> None:
        folder = write(name="both/target").parent
        write("swapped", name="both/draft")
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED
        assert reading.told("target/ is read; draft/ is another model's")
        assert reads_as(folder / "draft", "swapped").num_sites == COMPARED


class TestCapturedByHand:
    @staticmethod
    def capture(folder: Path, run: Any, *, site: Site, layers: int = 4) -> None:
        """Write what `capture_tensor` calls of one name in each layer leave: the first without a number."""
        for layer in range(layers):
            values = run.read(layer, site).transpose(1, 2)  # [B,S,N,D]
            tokens = torch.cat([values[row, :length] for row, length in enumerate((48, 33))])
            module = folder / "dp0" / PASS / (f"manual.{site}_{layer}" if layer else f"manual.{site}")
            module.mkdir()
            padding = tokens.new_zeros((128 - len(tokens), *tokens.shape[1:]))
            torch.save(torch.cat((tokens, padding)), module / "rank0.pt")

    def test_tensor_named_as_a_site_is_that(self, runs: Any, write: Any, reads_as: Any, compare: Any) -> None:
        folder = write()
        self.capture(folder, runs["right"], site=Site.Q_ROPE)
        assert reads_as(folder).num_sites == COMPARED + 4
        change(folder, "manual.q_rope_2", lambda held: held.roll(1, -1))
        exit_code, record = compare(folder)
        assert exit_code == 1
        assert [(blame["layer"], blame["sites"]) for blame in record["blame"]] == [(2, ["q_rope"])]

    def test_other_numbers_of_calls_are_no_layers(self, runs: Any, write: Any, reads_as: Any) -> None:
        folder = write()
        self.capture(folder, runs["right"], site=Site.Q_ROPE, layers=3)
        reading = reads_as(folder)
        assert reading.num_sites == COMPARED
        assert reading.told("modules map to no site: manual.q_rope")


def test_show_prints_what_was_proved(write: Any, command: Command) -> None:
    shown = " ".join(command(mm2_test, "show", write()).stdout.split())
    assert "model.layers.{layer}:output 0-3 128x256 bfloat16 1 1 output" in shown
    assert "proved in layers 0-3: model.layers.{layer} is the layer's output" in shown
