"""A small layer of random values at every site, by which changes are known by hand; a layer's weights in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from types import MappingProxyType
from typing import Any, cast

import pytest
import torch

from minimax_tools.checkpoint.layer_tensors import LayerTensors
from minimax_tools.checkpoint.reader import CheckpointReader
from minimax_tools.model import weight_names
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.families.minimax_m2 import MINIMAX_M2
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.sites import Site
from minimax_tools.model.spec import ModelSpec
from minimax_tools.reference.evaluation import STAGES, Evaluation, ExpertValue, LayerInputs
from minimax_tools.reference.expert_pass import LayerWeights
from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

# The second prompt is padded in front.
MASK = torch.tensor([[1, 1, 1, 1, 1, 1], [0, 0, 1, 1, 1, 1]])
SPEC = ModelSpec(
    hidden_size=12,
    num_hidden_layers=12,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    rotary_dim=4,
    rope_theta=100.0,
    rms_norm_eps=1e-2,
    num_local_experts=12,
    num_experts_per_tok=3,
    intermediate_size=6,
    vocab_size=16,
    max_position_embeddings=64,
    tie_word_embeddings=False,
    graph=ModelGraph(),
    family=MINIMAX_M2,
    raw=MappingProxyType({}),
)
WIDTHS = {
    Site.Q_PROJ: 32,
    Site.Q_NORM: 32,
    Site.K_PROJ: 16,
    Site.K_NORM: 16,
    Site.V_PROJ: 16,
    Site.ATTN_CONTEXT: 32,
    Site.ROUTER_LOGITS: 12,
    Site.ROUTER_WEIGHTS: 3,
}


class Weights:
    """Weights of layer 2 of twelve but for its experts', as `LayerWeights` gives them; there is no layer 10."""

    layer = 2

    def __init__(self, seed: int = 1, others: tuple[str, ...] = ()) -> None:
        self._others = others
        shapes = {
            weight_names.INPUT_NORM: (12,),
            weight_names.POST_NORM: (12,),
            weight_names.Q_NORM: (32,),
            weight_names.K_NORM: (16,),
            weight_names.Q_PROJ: (32, 12),
            weight_names.K_PROJ: (16, 12),
            weight_names.V_PROJ: (16, 12),
            weight_names.O_PROJ: (12, 32),
            weight_names.GATE: (12, 12),
            weight_names.CORRECTION_BIAS: (12,),
        }
        generator = torch.Generator().manual_seed(seed)
        self._values = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}

    def kept_value(self, name: str) -> torch.Tensor:
        return self._values[name]

    def is_fp8(self, name: str) -> bool:
        return name not in self._others

    def without_fp8(self, *others: str) -> Weights:
        """Return these weights, some of them not stored in FP8."""
        return Weights(others=others)

    def has_layer(self, layer: int) -> bool:
        return layer != 10

    def of_layer(self, layer: int) -> Weights:
        return Weights(seed=100 + layer)


@pytest.fixture(scope="session")
def layer() -> Evaluation:
    """The layer; its real tokens are the chosen ones."""
    inputs = LayerInputs(
        graph=ModelGraph().layer(0),
        spec=SPEC,
        weights=cast("LayerWeights", Weights()),
        attention_mask=MASK,
        position_ids=(MASK.cumsum(1) - 1).clamp(min=0),
        decode_start=6,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = inputs.judged_tokens
    values: dict[Any, torch.Tensor] = {}
    for site in ModelGraph().sites:
        shape: tuple[int, ...] = (len(tokens), WIDTHS.get(site, 12))
        if site.order < Site.ATTN_CONTEXT.order:
            shape = (2, 6, WIDTHS.get(site, 12))
        if site.has_heads_dim:
            shape = (2, 4 if site is Site.Q_ROPE else 2, 6, 8)
        values[site] = torch.randn(shape, generator=generator)
    values[Site.ROUTER_EXPERTS] = torch.rand(len(tokens), 12, generator=generator).argsort(-1)[:, :3]
    values[ExpertValue.EXPERT_NUMBERS] = values[Site.ROUTER_EXPERTS]
    values[ExpertValue.EXPERT_OUTPUTS] = torch.randn(len(tokens), 3, 12, generator=generator)
    values[ExpertValue.ROUTED_SUM] = values[Site.MOE_DELTA]
    return Evaluation(inputs, STAGES, tokens=tokens, values=values)


@pytest.fixture(scope="session")
def float32_layer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., LayerTensors]]:
    """`float32_layer(MODEL_TYPE, layer=N)`: a layer of its toy, in float32, so that repairs round no weight."""
    with ExitStack() as opened:

        @cache
        def open_toy(model_type: str) -> CheckpointReader:
            folder = tmp_path_factory.mktemp(model_type) / "float32"
            model = SyntheticModel.toy(FAMILIES[model_type]).resized(num_hidden_layers=2)
            synthesize(folder, model=model, dtype=torch.float32, shard_size_bytes=None, seed=3)
            return opened.enter_context(CheckpointReader(folder))

        def open_layer(model_type: str, layer: int = 1) -> LayerTensors:
            reader = open_toy(model_type)
            return LayerTensors.open(reader, ModelSpec.from_folder(reader.folder), layer, torch.float32)

        yield open_layer


@pytest.fixture(scope="session")
def tensors(float32_layer: Callable[..., LayerTensors]) -> LayerTensors:
    """A layer of MiniMax-M2's toy in float32."""
    return float32_layer(MINIMAX_M2.model_type)
