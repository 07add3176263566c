"""Sites outside the layers: how they are opened, and mistakes planted there, which are named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import click.testing
import pytest
import torch
from torch.nn import functional

from compare.catalogue.outside import MODEL_CATALOGUE, ModelInputs, ModelWeights
from compare.diagnosis.cli import main as mm2_diagnose
from compare.diagnosis.outside import ModelCases, SiteCase, search_site
from compare.sides.golden_weights import CheckpointWeights
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.run import full_run
from minimax_tools.model.sites import ModelSite, Site
from minimax_tools.model.spec import ModelSpec

Command = Callable[..., click.testing.Result]
Open = Callable[..., SiteCase | str]
Diagnose = Callable[..., click.testing.Result]

RUN = full_run(4, sites_level="layer")
EMBEDDING, NORM, LOGITS = ModelSite.EMBEDDING, ModelSite.FINAL_NORM, ModelSite.LOGITS


@dataclass(frozen=True, kw_only=True)
class Model:
    """Parts outside the layers of the golden's model, in float32."""

    spec: ModelSpec
    embedding: torch.Tensor
    norm: torch.Tensor
    head: torch.Tensor
    layer_norm: torch.Tensor  # a norm of layer 2
    ids: torch.Tensor  # [B,S]
    states: torch.Tensor  # the last layer's output [B,S,H]
    normed: torch.Tensor

    @classmethod
    def of(cls, toy: Path, source: Capture) -> Model:
        names = {
            "embedding": weight_names.EMBEDDING,
            "norm": weight_names.FINAL_NORM,
            "head": weight_names.LM_HEAD,
            "layer_norm": "model.layers.2.post_attention_layernorm.weight",
        }
        with CheckpointReader(toy) as reader:
            weights = {key: reader.read_weight(name, torch.bfloat16).float() for key, name in names.items()}
        return cls(
            spec=ModelSpec.from_folder(toy),
            ids=source.read_inputs().input_ids,
            states=source.read(3, Site.OUTPUT).float(),
            normed=source.read(None, NORM).float(),
            **weights,
        )

    def normalise(self, states: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The right norm with any weight."""
        return states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps) * weight


Plant = Callable[[Model], torch.Tensor]


def summed_by_rank_0(model: Model) -> torch.Tensor:
    size = model.spec.vocab_size // 2
    summed = model.embedding[model.ids % size] + model.embedding[model.ids % size + size]
    return summed * (model.ids < size)[..., None]


def of_rank_1(model: Model) -> torch.Tensor:
    return model.embedding[model.ids] * (model.ids // (model.spec.vocab_size // 2) == 1)[..., None]


def normed_per_rank(model: Model) -> torch.Tensor:
    parts = model.states.unflatten(-1, (4, -1))
    return model.normalise(parts, model.norm.unflatten(0, (4, -1))).flatten(-2)


def normed_twice(model: Model) -> torch.Tensor:
    return model.normalise(model.normalise(model.states, model.norm).bfloat16().float(), model.norm)


def to_fp8(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.float8_e4m3fn).float()


def scores(model: Model) -> torch.Tensor:
    return model.normed @ model.head.T


def strided(model: Model) -> torch.Tensor:
    """Table of which each rank holds every fourth row where a block was meant."""
    rows = torch.arange(model.spec.vocab_size).unflatten(0, (-1, 4)).T.flatten()
    return model.embedding[rows[model.ids]]


def gathered_strided(model: Model) -> torch.Tensor:
    """Table of which each rank holds a block where every fourth row was meant."""
    rows = torch.arange(model.spec.vocab_size).unflatten(0, (-1, 4)).T.flatten()
    return model.embedding[rows.argsort()[model.ids]]


def centred(model: Model) -> torch.Tensor:
    return functional.layer_norm(model.states, model.norm.shape, model.norm, eps=model.spec.rms_norm_eps)


def not_gathered(model: Model) -> torch.Tensor:
    right = scores(model)
    of_rank_1 = torch.arange(model.spec.vocab_size) // (model.spec.vocab_size // 2) == 1
    return right * of_rank_1


HALVES, FP8 = {"tp_degree": 2}, {"dtype": "float8_e4m3fn"}
OF_LAYER_2 = {"weight": "2.post_attention_layernorm"}
EMBEDDINGS: list[tuple[str, Plant, dict[str, Any]]] = [
    ("shard_of_rank_0", lambda m: m.embedding[m.ids % (m.spec.vocab_size // 4)], {"tp_degree": 4}),
    ("offset_of_rank_0", summed_by_rank_0, HALVES),
    ("not_reduced", of_rank_1, {"tp_degree": 2, "rank": 1}),
    (
        "shards_exchanged",
        lambda m: torch.cat(m.embedding.chunk(8)[::-1])[m.ids],
        {"tp_degree": 8, "order": "reversed"},
    ),
    ("shards_exchanged", strided, {"tp_degree": 4, "order": "strided"}),
    ("shards_exchanged", gathered_strided, {"tp_degree": 4, "order": "gathered strided"}),
    ("rows_shifted", lambda m: m.embedding[(m.ids + 1) % m.spec.vocab_size], {"by": 1}),
    ("columns_of_rank_0", lambda m: m.embedding[m.ids].chunk(2, dim=-1)[0].repeat(1, 1, 2), HALVES),
    (
        "columns_not_gathered",
        lambda m: m.embedding[m.ids] * (torch.arange(m.spec.hidden_size) >= m.spec.hidden_size // 2),
        {"tp_degree": 2, "rank": 1},
    ),
    ("scaled", lambda m: m.embedding[m.ids] * 16, {"factor": 16.0}),
    ("is_head", lambda m: m.head[m.ids], {}),
    ("low_precision", lambda m: to_fp8(m.embedding[m.ids]), FP8),
    ("of_token_before", lambda m: m.embedding[m.ids.roll(1, 1)], {}),
]
NORMS: list[tuple[str, Plant, dict[str, Any]]] = [
    ("one_plus_weight", lambda m: m.normalise(m.states, m.norm + 1.0), {}),
    ("missing", lambda m: m.states, {}),
    ("unweighted", lambda m: m.normalise(m.states, torch.ones_like(m.norm)), {}),
    ("of_a_layer", lambda m: m.normalise(m.states, m.layer_norm), OF_LAYER_2),
    ("per_rank", normed_per_rank, {"tp_degree": 4}),
    ("weight_alone", lambda m: m.states * m.norm, {}),
    ("weight_of_rank_0", lambda m: m.normalise(m.states, m.norm.chunk(2)[0].repeat(2)), HALVES),
    ("twice", normed_twice, {}),
    ("centred", centred, {}),
    ("scaled", lambda m: 3 * m.normed, {"factor": pytest.approx(3.0, rel=1e-3)}),
]
HEADS: list[tuple[str, Plant, dict[str, Any]]] = [
    ("shard_of_rank_0", lambda m: (m.normed @ m.head.chunk(2)[0].T).repeat(1, 1, 2), HALVES),
    (
        "shards_exchanged",
        lambda m: m.normed @ torch.cat(m.head.chunk(4)[::-1]).T,
        {"tp_degree": 4, "order": "reversed"},
    ),
    ("not_gathered", not_gathered, {"tp_degree": 2, "rank": 1}),
    ("is_embedding", lambda m: m.normed @ m.embedding.T, {}),
    ("rows_shifted", lambda m: scores(m).roll(2, -1), {"by": -2}),
    (
        "rows_exchanged",
        lambda m: scores(m).unflatten(-1, (-1, 2)).flip(-1).flatten(-2),
        {"rows": "neighbours"},
    ),
    ("rows_exchanged", lambda m: scores(m).flip(-1), {"rows": "all reversed"}),
    ("transposed", lambda m: m.normed @ m.head.reshape(m.head.shape[::-1]), {}),
    ("without_norm", lambda m: m.states @ m.head.T, {}),
    ("normed_twice", lambda m: m.normalise(m.normed, m.norm).bfloat16().float() @ m.head.T, {}),
    ("low_precision", lambda m: m.normed @ to_fp8(m.head).T, FP8),
    ("of_token_before", lambda m: m.normed.roll(1, 1) @ m.head.T, {}),
    ("zero", lambda m: 0.0 * scores(m), {}),
    ("scaled", lambda m: 0.7 * scores(m), {"factor": pytest.approx(0.7, rel=1e-3)}),
]


def put(values: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change of a golden's tensor into other values of its dtype."""
    return lambda golden: values.to(golden.dtype)


@pytest.fixture(scope="module")
def model(toy: Path, golden: Path) -> Model:
    return Model.of(toy, Capture.open(golden))


@pytest.fixture
def open_site(golden: Path, toy: Path, copyist: Any) -> Iterator[Open]:
    """Opens a site of the golden's own run, changed at some places."""
    source = Capture.open(golden)
    with ExitStack() as stack, torch.no_grad():
        weights = stack.enter_context(CheckpointWeights(model=str(toy)).open_layer(3, source))

        def open_site(site: ModelSite, changes: Any = None, **parts: Any) -> SiteCase | str:
            target = Capture.open(copyist.device_run(changes, run=replace(RUN, **parts)))
            batch = Batch.of(source, target)
            return ModelCases(source, target, batch=batch, last_layer=3, weights=weights).open(site)

        yield open_site


def opened(found: SiteCase | str) -> SiteCase:
    assert isinstance(found, SiteCase), found
    return found


@pytest.mark.parametrize(
    ("site", "name", "plant", "parameters"),
    [
        *((EMBEDDING, f"embedding_{name}", plant, parameters) for name, plant, parameters in EMBEDDINGS),
        *((NORM, f"final_norm_{name}", plant, parameters) for name, plant, parameters in NORMS),
        *((LOGITS, f"head_{name}", plant, parameters) for name, plant, parameters in HEADS),
    ],
)
def test_planted_mistake_is_named(
    site: ModelSite, name: str, plant: Plant, parameters: dict[str, Any], model: Model, open_site: Open
) -> None:
    case = opened(open_site(site, {(None, site): put(plant(model))}))
    found = search_site(case, list(MODEL_CATALOGUE.values()), is_blamed=True)
    assert (found.named[0].mistake, dict(found.named[0].parameters)) == (name, parameters)
    assert len(found.named) == 1 or site is not NORM


def test_prediction_of_what_does_not_show_or_is_not_held(model: Model, open_site: Open) -> None:
    inputs = opened(open_site(LOGITS)).inputs
    assert inputs.states is not None
    assert inputs.normed is not None

    def predict(name: str, inputs: ModelInputs = inputs, **parameters: Any) -> torch.Tensor | None:
        return MODEL_CATALOGUE[name].predict(inputs, None, **parameters)

    found = predict("final_norm_eps", eps=0.5)
    expected = inputs.states / (inputs.states.square().mean(-1, keepdim=True) + 0.5).sqrt() * model.norm
    torch.testing.assert_close(found, expected)
    # The last row without a neighbour stays.
    size = model.spec.vocab_size - 1
    odd = replace(
        inputs, spec=replace(model.spec, vocab_size=size), columns=torch.tensor([size - 3, size - 1])
    )
    found = predict("head_rows_exchanged", odd, rows="neighbours")
    torch.testing.assert_close(found, inputs.normed @ model.head[[size - 2, size - 1]].T)
    tied = replace(inputs, weights=cast("ModelWeights", SimpleNamespace(has_head=False)))
    assert predict("head_is_embedding", tied) is predict("embedding_is_head", tied) is None
    assert predict("head_without_norm", replace(inputs, states=None)) is None


@pytest.mark.parametrize("site", list(ModelSite))
def test_golden_is_right_at_each_site(open_site: Open, site: ModelSite) -> None:
    found = opened(open_site(site))
    # Of the embedding nothing is rounded.
    rho = 0.0 if site is EMBEDDING else 1.0
    assert found.noise.rho(found.port, found.correct) == pytest.approx(rho, abs=0.1)
    assert (found.notes, found.is_through_norm) == ((), False)
    # All of so few tokens are judged.
    assert len(found.port) == 81
    # The first token of each prompt has none before.
    assert found.inputs.previous.tolist() == [-1, *range(47), -1, *range(48, 80)]


def test_norm_that_is_not_held_is_computed(open_site: Open) -> None:
    held = opened(open_site(LOGITS))
    through = opened(open_site(LOGITS, model_sites=(LOGITS,)))
    assert through.is_through_norm
    assert held.inputs.normed is not None
    assert through.inputs.normed is not None
    torch.testing.assert_close(through.inputs.normed, held.inputs.normed, rtol=1e-2, atol=1e-3)


def lost(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 3, 0] = torch.nan
    return tensor


def test_lost_tokens_are_left_out_and_noted(open_site: Open) -> None:
    found = opened(open_site(NORM, {(None, NORM): lost}))
    assert len(found.port) == 80
    assert found.notes == (
        "1 tokens hold NaN or Inf and were left out: no mistake of the catalogue makes any",
    )
    # A lost input is not the site's own fault.
    found = opened(open_site(NORM, {(3, Site.OUTPUT): lost}))
    assert (len(found.port), found.notes) == (80, ())


def test_reason_tells_why_a_site_cannot_be_judged(open_site: Open) -> None:
    wrong = {(None, NORM): lambda tensor: tensor[..., :8]}
    assert str(open_site(NORM, wrong)).startswith("shape: expected ")
    assert open_site(NORM, {(3, Site.OUTPUT): None}) == "its input is not held"
    everything = {(None, NORM): lambda tensor: tensor * torch.nan}
    assert open_site(NORM, everything) == "no token of it is held and finite"


class TestCommand:
    @pytest.fixture
    def diagnose(self, toy: Path, golden: Path, copyist: Any, command: Command) -> Diagnose:
        """Diagnoses a run with other values at some places."""

        def run(changes: dict[tuple[int | None, Any], torch.Tensor], *options: str) -> click.testing.Result:
            target = copyist.device_run({place: put(values) for place, values in changes.items()}, run=RUN)
            paths = ("--model", toy, "--golden", golden, "--run", target, "--quiet")
            return command(mm2_diagnose, *paths, *options)

        return run

    def test_wrong_embedding_is_named(self, model: Model, diagnose: Diagnose) -> None:
        _, plant, parameters = EMBEDDINGS[0]
        # Layer 0 does not fit what it was handed either: without these words, hundreds of its mistakes are tried.
        names = [name for name, mistake in MODEL_CATALOGUE.items() if mistake.words.fits(ModelGraph())]
        tried = [word for name in names for word in ("--mistake", name)]
        result = diagnose({(None, EMBEDDING): plant(model), (0, Site.INPUT): plant(model)}, *tried, "--json")
        record = json.loads(result.stdout)
        (found,) = record["diagnosis"]
        assert (result.exit_code, found["layer"], found["mistake"]) == (1, None, "embedding_shard_of_rank_0")
        assert found["parameters"] == parameters
        assert not [one for one in record["unexplained_blame"] if one["layer"] is None]

    def test_head_is_right_behind_a_wrong_norm(self, model: Model, diagnose: Diagnose) -> None:
        normed = model.states.bfloat16().float()
        result = diagnose({(None, NORM): normed, (None, LOGITS): normed @ model.head.T}, "--json")
        record = json.loads(result.stdout)
        assert [(one["layer"], one["mistake"]) for one in record["diagnosis"]] == [
            (None, "final_norm_missing")
        ]
        right = {site["site"]: site["is_right"] for site in record["sites"]}
        assert right == {"embedding": True, "final_norm": False, "logits": True}
        assert (result.exit_code, record["unexplained_blame"]) == (1, [])

    def test_mistakes_are_chosen(self, model: Model, diagnose: Diagnose) -> None:
        wrong = {(None, LOGITS): model.normed @ model.embedding.T}
        for mistake, found in (("head_zero", []), ("head_is_embedding", ["head_is_embedding"])):
            record = json.loads(diagnose(wrong, "--mistake", mistake, "--json").stdout)
            assert [one["mistake"] for one in record["diagnosis"]] == found

    def test_unknown_head_is_said_to_be_unexplained(self, model: Model, diagnose: Diagnose) -> None:
        other = 0.02 * torch.randn(model.head.shape, generator=torch.Generator().manual_seed(3))
        result = diagnose({(None, LOGITS): model.normed @ other.T})
        assert result.exit_code == 1
        assert "logits: no known mistake explains it" in result.stdout
        assert "Original: logits = final_norm @ lm_head.weightᵀ" in result.stdout

    def test_right_port_has_nothing_to_explain(self, model: Model, diagnose: Diagnose) -> None:
        """A right port that rounds elsewhere: the norm once, and the head in float64."""
        normed = model.normalise(model.states.double(), model.norm.double()).float()
        result = diagnose({(None, NORM): normed, (None, LOGITS): normed.bfloat16().float() @ model.head.T})
        assert result.exit_code == 0
        assert "nothing differs: there is nothing to diagnose" in result.stdout
