"""Mistakes outside the layers, planted in what a port gives there, and named by `mm2-diagnose`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch

from compare.catalogue.outside import MODEL_CATALOGUE
from compare.cli import main as mm2_compare
from compare.diagnosis.cli import main as mm2_diagnose
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec

Command = Callable[..., click.testing.Result]
Table = Callable[[torch.Tensor], torch.Tensor]

NUM_LAYERS = 4


class Port:
    """A whole-model run that repeats the golden, but for the embedding or the head.

    What lies behind a mistake is computed from it, as a port would, and rounded to BF16.
    """

    def __init__(self, copyist: Any, toy: Path) -> None:
        self._copyist = copyist
        self.spec = ModelSpec.from_folder(toy)
        with CheckpointReader(toy) as reader:
            read = {name: reader.read_weight(name, torch.bfloat16).float() for name in _NAMES}
        self.embedding, self.norm, self.head = read.values()
        self.layer_norm = self._layer_norm(toy)
        self.ids = copyist.source.read_inputs().input_ids
        self.states = copyist.source.read(NUM_LAYERS - 1, Site.OUTPUT).float()

    @staticmethod
    def _layer_norm(toy: Path) -> torch.Tensor:
        with CheckpointReader(toy) as reader:
            return reader.read_weight(
                "model.layers.2.post_attention_layernorm.weight", torch.bfloat16
            ).float()

    def embed(self, values: torch.Tensor) -> Path:
        """A run with this embedding, [B,S,H]."""
        wrong = {(None, ModelSite.EMBEDDING): values, (0, Site.INPUT): values}
        return self._write(wrong)

    def norm_by(self, normed: torch.Tensor) -> Path:
        """A run with this final norm, [B,S,H]."""
        return self._write(
            {
                (None, ModelSite.FINAL_NORM): normed,
                (None, ModelSite.LOGITS): normed.bfloat16().float() @ self.head.T,
            }
        )

    def score_by(self, head: Table) -> Path:
        """A run whose logits are `head` of the right final norm [B,S,H]."""
        normed = self._copyist.source.read(None, ModelSite.FINAL_NORM).float()
        return self._write({(None, ModelSite.LOGITS): head(normed)})

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The right norm with any weight."""
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps) * weight

    def _write(self, values: dict[tuple[int | None, Any], torch.Tensor]) -> Path:
        def put(tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
            return lambda golden: tensor.to(golden.dtype)

        run = full_run(NUM_LAYERS, sites_level="layer")
        path: Path = self._copyist.device_run({key: put(value) for key, value in values.items()}, run=run)
        return path


_NAMES = (weight_names.EMBEDDING, weight_names.FINAL_NORM, weight_names.LM_HEAD)


@pytest.fixture
def port(copyist: Any, toy: Path) -> Port:
    return Port(copyist, toy)


@pytest.fixture
def diagnose(toy: Path, golden: Path, command: Command) -> Callable[..., tuple[int, dict[str, Any]]]:
    """Diagnoses a run: exit code and JSON."""

    def run(target: Path, *options: str) -> tuple[int, dict[str, Any]]:
        paths = ("--golden", golden, "--run", target, "--json", "--quiet")
        result = command(mm2_diagnose, "--model", toy, *paths, *options)
        record: dict[str, Any] = json.loads(result.stdout)
        return result.exit_code, record

    return run


Diagnose = Callable[..., tuple[int, dict[str, Any]]]


def named(record: dict[str, Any]) -> list[tuple[Any, str]]:
    return [(one["layer"], one["mistake"]) for one in record["diagnosis"]]


def rank_0(port: Port) -> torch.Tensor:
    return port.embedding[port.ids % (port.spec.vocab_size // 4)]


def offset(port: Port) -> torch.Tensor:
    size = port.spec.vocab_size // 2
    summed = port.embedding[port.ids % size] + port.embedding[port.ids % size + size]
    return summed * (port.ids < size)[..., None]


EMBEDDINGS: dict[str, tuple[Callable[[Port], torch.Tensor], dict[str, Any]]] = {
    "embedding_shard_of_rank_0": (rank_0, {"tp_degree": 4}),
    "embedding_offset_of_rank_0": (offset, {"tp_degree": 2}),
    "embedding_not_reduced": (
        lambda port: port.embedding[port.ids] * (port.ids // (port.spec.vocab_size // 2) == 1)[..., None],
        {"tp_degree": 2, "rank": 1},
    ),
    "embedding_shards_exchanged": (
        lambda port: torch.cat(port.embedding.chunk(8)[::-1])[port.ids],
        {"tp_degree": 8, "order": "reversed"},
    ),
    "embedding_rows_shifted": (
        lambda port: port.embedding[(port.ids + 1) % port.spec.vocab_size],
        {"by": 1},
    ),
    "embedding_columns_of_rank_0": (
        lambda port: port.embedding[port.ids][..., : port.spec.hidden_size // 2].repeat(1, 1, 2),
        {"tp_degree": 2},
    ),
    "embedding_scaled": (
        lambda port: port.embedding[port.ids] * port.spec.hidden_size**0.5,
        {"factor": 16.0},
    ),
    "embedding_is_head": (lambda port: port.head[port.ids], {}),
    "embedding_low_precision": (
        lambda port: port.embedding[port.ids].to(torch.float8_e4m3fn).float(),
        {"dtype": "float8_e4m3fn"},
    ),
    "embedding_of_token_before": (lambda port: port.embedding[port.ids.roll(1, 1)], {}),
}


# Layer 0 does not fit what it was handed either: without these words, hundreds of its mistakes are tried.
OUTSIDE = tuple(word for name in MODEL_CATALOGUE for word in ("--mistake", name))


@pytest.mark.parametrize(
    "tried", [pytest.param(OUTSIDE, id="outside"), pytest.param((), id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    "name",
    [
        name if number % 3 == 0 else pytest.param(name, marks=pytest.mark.slow)
        for number, name in enumerate(EMBEDDINGS)
    ],
)
def test_embedding_is_named(name: str, tried: tuple[str, ...], port: Port, diagnose: Diagnose) -> None:
    make, parameters = EMBEDDINGS[name]
    exit_code, record = diagnose(port.embed(make(port)), *tried)
    assert exit_code == 1
    first = record["diagnosis"][0]
    assert (first["layer"], first["mistake"]) == (None, name)
    assert first["parameters"] == parameters
    assert not [one for one in record["unexplained_blame"] if one["layer"] is None]


def per_rank(port: Port) -> torch.Tensor:
    parts = port.states.unflatten(-1, (4, -1))
    return port.normalise(parts, port.norm.unflatten(0, (4, -1))).flatten(-2)


NORMS: dict[str, tuple[Callable[[Port], torch.Tensor], dict[str, Any]]] = {
    "final_norm_one_plus_weight": (lambda port: port.normalise(port.states, port.norm + 1.0), {}),
    "final_norm_missing": (lambda port: port.states, {}),
    "final_norm_unweighted": (lambda port: port.normalise(port.states, torch.ones_like(port.norm)), {}),
    "final_norm_of_a_layer": (
        lambda port: port.normalise(port.states, port.layer_norm),
        {"weight": "2.post_attention_layernorm"},
    ),
    "final_norm_per_rank": (per_rank, {"tp_degree": 4}),
    "final_norm_weight_alone": (lambda port: port.states * port.norm, {}),
    "final_norm_twice": (
        lambda port: port.normalise(port.normalise(port.states, port.norm).bfloat16().float(), port.norm),
        {},
    ),
}


@pytest.mark.parametrize("name", NORMS)
def test_final_norm_is_named(name: str, port: Port, diagnose: Diagnose) -> None:
    make, parameters = NORMS[name]
    exit_code, record = diagnose(port.norm_by(make(port)))
    assert exit_code == 1
    assert named(record) == [(None, name)]
    assert record["diagnosis"][0]["parameters"] == parameters
    # The head is right by what it was fed, and so is the embedding.
    right = {site["site"]: site["is_right"] for site in record["sites"]}
    assert right == {"embedding": True, "final_norm": False, "logits": True}
    assert record["unexplained_blame"] == []


HEADS: dict[str, tuple[Callable[[Port, torch.Tensor], torch.Tensor], dict[str, Any]]] = {
    "head_shard_of_rank_0": (
        lambda port, normed: (normed @ port.head.chunk(2)[0].T).repeat(1, 1, 2),
        {"tp_degree": 2},
    ),
    "head_shards_exchanged": (
        lambda port, normed: normed @ torch.cat(port.head.chunk(4)[::-1]).T,
        {"tp_degree": 4, "order": "reversed"},
    ),
    "head_is_embedding": (lambda port, normed: normed @ port.embedding.T, {}),
    "head_rows_shifted": (lambda port, normed: (normed @ port.head.T).roll(2, -1), {"by": -2}),
    "head_rows_exchanged": (
        lambda port, normed: (normed @ port.head.T).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
        {"rows": "neighbours"},
    ),
    "head_transposed": (lambda port, normed: normed @ port.head.reshape(port.head.shape[::-1]), {}),
    "head_without_norm": (lambda port, normed: port.states @ port.head.T, {}),
    "head_low_precision": (
        lambda port, normed: normed @ port.head.to(torch.float8_e4m3fn).float().T,
        {"dtype": "float8_e4m3fn"},
    ),
    "head_of_token_before": (lambda port, normed: normed.roll(1, 1) @ port.head.T, {}),
    "head_zero": (lambda port, normed: 0.0 * (normed @ port.head.T), {}),
}


@pytest.mark.parametrize("name", HEADS)
def test_head_is_named(name: str, port: Port, diagnose: Diagnose) -> None:
    make, parameters = HEADS[name]
    exit_code, record = diagnose(port.score_by(lambda normed: make(port, normed)))
    assert exit_code == 1
    assert named(record)[0] == (None, name)
    assert record["diagnosis"][0]["parameters"] == parameters
    assert record["unexplained_blame"] == []


@pytest.mark.parametrize("site", ["embedding", "final_norm", "logits"])
def test_comparison_blames_the_site_that_is_named(
    site: str, port: Port, golden: Path, command: Command
) -> None:
    target = {
        "embedding": lambda: port.embed(rank_0(port)),
        "final_norm": lambda: port.norm_by(port.states),
        "logits": lambda: port.score_by(lambda normed: normed @ port.embedding.T),
    }[site]()
    result = command(mm2_compare, "--golden", golden, "--run", target, "--json", "--quiet")
    blame = json.loads(result.stdout)["blame"]
    assert result.exit_code == 1
    assert (blame[0]["layer"], blame[0]["sites"]) == (None, [site])


def test_scale_of_the_head_is_fitted(port: Port, diagnose: Diagnose) -> None:
    _, record = diagnose(port.score_by(lambda normed: 0.7 * (normed @ port.head.T)))
    assert named(record) == [(None, "head_scaled")]
    assert record["diagnosis"][0]["parameters"]["factor"] == pytest.approx(0.7, rel=1e-3)


def test_unknown_head_is_said_to_be_unexplained(
    port: Port, diagnose: Diagnose, toy: Path, golden: Path, command: Command
) -> None:
    generator = torch.Generator().manual_seed(3)
    other = 0.02 * torch.randn(port.head.shape, generator=generator)
    target = port.score_by(lambda normed: normed @ other.T)
    exit_code, record = diagnose(target)
    assert (exit_code, record["diagnosis"]) == (1, [])
    assert [(one["layer"], one["sites"]) for one in record["unexplained_blame"]] == [(None, ["logits"])]
    text = command(mm2_diagnose, "--model", toy, "--golden", golden, "--run", target, "--quiet").stdout
    assert "logits: no known mistake explains it" in text
    assert "Original: logits = final_norm @ lm_head.weightᵀ" in text
    assert "nothing differs" not in text


def test_right_port_has_nothing_to_explain(
    port: Port, diagnose: Diagnose, toy: Path, golden: Path, command: Command
) -> None:
    """A right port that rounds elsewhere: the norm once, and the head in float64."""
    normed = port.normalise(port.states.double(), port.norm.double()).float()
    target = port.norm_by(normed)
    exit_code, record = diagnose(target)
    assert (exit_code, record["diagnosis"]) == (0, [])
    assert all(site["is_right"] and site["num_hypotheses"] == 0 for site in record["sites"])
    text = command(mm2_diagnose, "--model", toy, "--golden", golden, "--run", target, "--quiet").stdout
    assert "nothing differs: there is nothing to diagnose" in text


def test_mistakes_outside_the_layers_are_chosen(port: Port, diagnose: Diagnose) -> None:
    target = port.score_by(lambda normed: normed @ port.embedding.T)
    for mistake, found in (("head_zero", []), ("head_is_embedding", [(None, "head_is_embedding")])):
        _, record = diagnose(target, "--mistake", mistake)
        assert named(record) == found


@pytest.mark.parametrize("pattern", ["layer_2", "layer_[12]"])
def test_sites_outside_are_left_out_if_some_layers_are_chosen(
    pattern: str, port: Port, diagnose: Diagnose
) -> None:
    target = port.score_by(lambda normed: normed @ port.embedding.T)
    exit_code, record = diagnose(target, "--layer-pattern", pattern, "--mistake", "head_is_embedding")
    assert (exit_code, record["sites"], record["diagnosis"]) == (0, [], [])
