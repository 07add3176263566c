"""Folders of vLLM Neuron's dumps: layers, replicas, requests and ranks in the names and rows of their passes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.dumps.assembly import batch_mask, lay_out
from minimax_tools.dumps.capture import DumpCapture
from minimax_tools.dumps.found_sites import RankRows
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.schedule import PassRecord
from minimax_tools.dumps.vllm_neuron import read_dump, recognises
from minimax_tools.errors import CaptureError
from minimax_tools.model.sites import ModelSite, Site

T, H = 8, 16
MLP = "model.layers.0.mlp"
Write = Callable[..., None]
MakeSide = Callable[..., Any]


class TestNames:
    """Layers, replicas and models in the names of passes and modules."""

    @pytest.fixture
    def write(self, write_pass: Write) -> Write:
        """Writes one pass of a request's tokens into a replica's folder."""

        def write(replica: Path, *modules: str, request: str = "0") -> None:
            held = dict.fromkeys(modules, torch.zeros(T, 2))
            write_pass(replica / f"prefill_s{T}_0", held, positions=range(T), requests=[request])

        return write

    def test_calls_are_counted_from_the_first_layer_that_is_held(self, tmp_path: Path, write: Write) -> None:
        modules = ("model.layers.5.mlp", "model.layers.6.mlp", "manual.q_rope", "manual.q_rope_1")
        write(tmp_path / "dp0", *modules)
        files = {piece.module: piece.file for piece in read_dump(tmp_path).pieces}
        named = {name for name in files if name.startswith("manual")}
        assert named == {"manual.layers.5.q_rope", "manual.layers.6.q_rope"}
        assert "manual.q_rope_1/" in files["manual.layers.6.q_rope"]

    @pytest.mark.parametrize(
        ("names", "requests"), [(("0", "0"), ("dp0/0", "dp1/0")), (("r0", "r1"), ("r0", "r1"))]
    )
    def test_requests_of_two_replicas_are_told_apart(
        self, names: tuple[str, ...], requests: tuple[str, ...], tmp_path: Path, write: Write
    ) -> None:
        for replica, name in enumerate(names):
            write(tmp_path / f"dp{replica}", MLP, request=name)
        assert tuple(record.requests[0] for record in read_dump(tmp_path).records) == requests

    def test_passes_beside_the_target_models_folder_are_named(self, tmp_path: Path, write: Write) -> None:
        for folder in ("target/dp0", "dp0"):
            write(tmp_path / folder, MLP)
        assert recognises(tmp_path)
        dump = read_dump(tmp_path)
        assert [piece.file.split("/")[0] for piece in dump.pieces] == ["target"]
        assert dump.notes == ("target/ is read", "not read: passes beside target/, 1")


class TestRequests:
    """Requests of a dump that are the other side's prompts."""

    FOLDER = "dp0/prefill_s64_0"

    @pytest.fixture
    def write(self, tmp_path: Path, write_pass: Write) -> Callable[..., torch.Tensor]:
        """Writes a pass of requests of these lengths, one after another; returns the embedding [64,H]."""

        def write(*lengths: int) -> torch.Tensor:
            embedding = torch.randn(64, H, generator=torch.Generator().manual_seed(0))
            positions = [position for length in lengths for position in range(length)]
            positions += [0] * (64 - len(positions))
            requests = [str(number) for number in range(len(lengths))]
            held = {"model.embed_tokens": embedding, MLP: embedding * 2}
            write_pass(tmp_path / self.FOLDER, held, positions=positions, requests=requests)
            return embedding

        return write

    @pytest.fixture
    def side(self, other_side: MakeSide) -> MakeSide:
        """Makes a side of prompts of these lengths, given the embeddings [T,H] of their tokens."""

        def make(embedding: torch.Tensor, lengths: tuple[int, ...]) -> Any:
            mask = batch_mask(lengths)
            return other_side(mask=mask, embedding=lay_out(embedding, mask))

        return make

    def test_embeddings_tell_the_requests_among_others(
        self, tmp_path: Path, write: Any, side: MakeSide
    ) -> None:
        embedding = write(12, 9, 9)
        wanted = torch.cat((embedding[21:30], embedding[:12]))
        capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(side(wanted, (9, 12)))
        read = capture.read(0, Site.MOE_DELTA)
        assert torch.equal(read[0, :9], embedding[21:30] * 2)
        assert torch.equal(read[1], embedding[:12] * 2)

    def test_equal_prompts_have_a_request_each(self, tmp_path: Path, write: Any, side: MakeSide) -> None:
        embedding = write(12, 9, 9)
        held = embedding.clone()
        held[21:30] = held[12:21]
        torch.save(held, tmp_path / self.FOLDER / "model.embed_tokens/rank0.pt")
        wanted = held[12:21].repeat(2, 1)
        capture = DumpCapture.open(tmp_path, NameMap()).laid_out_as(side(wanted, (9, 9)))
        assert torch.equal(capture.read(0, Site.MOE_DELTA), embedding[12:30].unflatten(0, (2, 9)) * 2)

    def test_embeddings_are_read_only_if_lengths_do_not_tell(
        self, tmp_path: Path, write: Any, side: MakeSide
    ) -> None:
        embedding = write(12, 9)
        capture = DumpCapture.open(tmp_path, NameMap())
        (tmp_path / self.FOLDER / "model.embed_tokens/rank0.pt").unlink()
        wanted = torch.cat((embedding[12:21], embedding[:12]))
        laid_out = capture.laid_out_as(side(wanted, (9, 12)))
        assert torch.equal(laid_out.read(0, Site.MOE_DELTA)[1], embedding[:12] * 2)
        # A prompt of 9 tokens may be the first 9 of the longer request.
        with pytest.raises(CaptureError, match=r"embed_tokens/rank0\.pt"):
            capture.laid_out_as(side(wanted[:9], (9,)))


class TestLogitsOfTheLastToken:
    """Logits that a pass holds of the tokens to sample from alone."""

    LOGITS = torch.arange(16.0)[None]

    @pytest.fixture
    def open_beside(self, tmp_path: Path, write_pass: Write, other_side: MakeSide) -> MakeSide:
        """Opens a pass of one request with the logits of its last token, beside a prompt that may be shorter."""

        def open_beside(num_prompt: int) -> Any:
            embedding = torch.randn(T, H, generator=torch.Generator().manual_seed(0))
            held = {"model.embed_tokens": embedding, "lm_head": self.LOGITS}
            write_pass(tmp_path / "dp0" / f"prefill_s{T}_0", held, positions=range(T))
            side = other_side(mask=batch_mask((num_prompt,)), embedding=embedding[None, :num_prompt])
            return DumpCapture.open(tmp_path, NameMap()).laid_out_as(side)

        return open_beside

    def test_are_held_of_the_prompts_last_token(self, open_beside: MakeSide) -> None:
        capture = open_beside(T)
        assert capture.held_tokens(ModelSite.LOGITS).nonzero().tolist() == [[0, T - 1]]
        assert torch.equal(capture.read(None, ModelSite.LOGITS)[0, -1], self.LOGITS[0])

    def test_behind_the_prompt_are_not_taken_for_the_prompts(self, open_beside: MakeSide) -> None:
        capture = open_beside(T - 3)
        assert ModelSite.LOGITS not in capture.model_sites()
        assert any("logits: held of some tokens alone, nothing tells which" in note for note in capture.notes)


class TestRowsOfRanks:
    """Tokens of the rows that ranks and data-parallel replicas hold."""

    @staticmethod
    def record(*, replica: tuple[int, int] = (0, 1)) -> PassRecord:
        return PassRecord(step="0", requests=("a",), positions=tuple(range(T)), replica=replica)

    @pytest.mark.parametrize(
        ("shape", "num_ranks", "are_divided"),
        [
            ((T, H), 2, False),
            ((T // 2, H), 2, True),
            ((1, T // 2, H), 2, True),
            ((T // 2, 3, H), 2, True),
            ((T // 2, H), 1, False),
            ((T // 2 - 1, H), 2, False),
        ],
    )
    def test_rows_times_ranks_tell_divided_tokens(
        self, shape: tuple[int, ...], num_ranks: int, are_divided: bool
    ) -> None:
        assert RankRows.of(shape, self.record(), num_ranks=num_ranks).are_divided is are_divided

    @pytest.mark.parametrize("is_batch", [False, True])
    def test_own_rows_are_cut_out_of_all_replicas(self, is_batch: bool) -> None:
        tokens, record = torch.arange(3 * T * H).reshape(3 * T, H), self.record(replica=(1, 3))
        tensor = tokens[None] if is_batch else tokens
        rows = RankRows.of(tuple(tensor.shape), record, num_ranks=1)
        assert torch.equal(rows.take(tensor).reshape(T, H), tokens[T : 2 * T])
        # Another number of rows than all replicas have tells nothing.
        assert RankRows.of((2 * T, H), record, num_ranks=1) == RankRows()

    @pytest.mark.parametrize("is_batch", [False, True])
    def test_divided_rows_are_joined_in_the_order_of_ranks(
        self, is_batch: bool, tmp_path: Path, write_pass: Write
    ) -> None:
        tokens = torch.randn(T, H)
        parts = [part[None] if is_batch else part for part in tokens.chunk(4)]
        write_pass(tmp_path / "dp0" / f"prefill_s{T}_0", {MLP: parts}, positions=range(T))
        assert torch.equal(DumpCapture.open(tmp_path, NameMap()).read(0, Site.MOE_DELTA)[0], tokens)
