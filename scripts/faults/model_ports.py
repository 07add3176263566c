"""Planted whole ports: each with one mistake, and right ones of many styles that must never be flagged.

A line names the port, the sites of which one must be blamed, and the names of mm2's catalogues that are right answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from minimax_tools.errors import UsageError
from minimax_tools.text_enum import TextEnum

# The folder of the ports. They read as a user's file does: no annotations, and imports from the file beside it.
PORTS = Path(__file__).parents[1] / "whole_ports"
# Environment variables that `layers.py:WrongLayer` there reads: a mistake as it prints itself, and a layer's number.
MISTAKE_VARIABLE, LAYER_VARIABLE = "MM2_PLANTED_MISTAKE", "MM2_PLANTED_LAYER"


class FirstPass(TextEnum):
    """The pass at which a mistake first shows."""

    PREFILL = "prefill"
    DECODE = "decode"  # the prefill is right
    CHUNKS = "chunks"  # prefill and steps are right, a pass of several tokens behind a cache is not
    REPEATED = "repeated"  # both are right, a second run of the same prompts is not
    NONE = "none"  # no number of the run is wrong


@dataclass(frozen=True, slots=True)
class ModelPlant:
    """A whole port that `mm2-test model` judges."""

    port: str  # its file in the folder of the ports, and its name there, as `ends.py:HeadTied`
    _: KW_ONLY
    first: FirstPass = FirstPass.NONE  # pass at which it first shows
    layers: tuple[int, ...] = ()  # layers that may be blamed; empty outside the layers
    sites: tuple[str, ...] = ()  # sites of which at least one must be blamed
    names: tuple[str, ...] = ()  # names of mm2's catalogues that are right answers; empty for a right port
    num_ranks: int = 1
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables of its run
    # Backends on which it can run: what torch traced for the CPU runs there alone.
    backends: tuple[str, ...] = ("cpu", "xla-cpu")

    @property
    def name(self) -> str:
        """The mistake, or the style of a right port, as `head_tied`."""
        return re.sub(
            "(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", self.port.partition(":")[2]
        ).lower()

    @property
    def is_right(self) -> bool:
        """True for a right port, which must never be flagged."""
        return not self.names

    @property
    def target(self) -> str:
        """The value of `--target`."""
        return f"{PORTS / self.port}"


_ATTENTION = ("cache", "attn_context", "attn_delta", "output", "q_rope", "k_rope")
_CHUNK = ("attn_context", "k_rope", "output")
# Backends of what torch traced for the CPU, or compiles there.
_CPU = ("cpu",)


def _first_in(first: FirstPass) -> Callable[..., ModelPlant]:
    """Return what builds a mistake that first shows in a pass."""

    def build(port: str, sites: tuple[str, ...], *names: str, **others: Any) -> ModelPlant:
        return ModelPlant(port, first=first, sites=sites, names=names, **others)

    return build


_prefill, _decode, _chunks, _repeated, _never = map(
    _first_in,
    (FirstPass.PREFILL, FirstPass.DECODE, FirstPass.CHUNKS, FirstPass.REPEATED, FirstPass.NONE),
)

MODEL_MISTAKES = (
    _prefill("ends.py:HeadTied", ("logits",), "head_is_embedding"),
    _prefill("ends.py:HeadTransposed", ("logits",), "head_transposed"),
    _prefill("ends.py:HeadRowsExchanged", ("logits",), "head_rows_exchanged"),
    _prefill("ends.py:VocabularyShardsExchanged", ("logits",), "head_shards_exchanged"),
    _prefill("ends.py:PaddedLogitsLive", ("padded_logits", "logits"), "padded_logits_live"),
    _prefill("ends.py:VocabularyOfRank0", ("logits",), "head_shard_of_rank_0"),
    _prefill("ends.py:EmbeddingScaled", ("embedding",), "embedding_scaled"),
    _prefill("ends.py:EmbeddingLowPrecision", ("embedding",), "embedding_low_precision"),
    _prefill("ends.py:FinalNormMissing", ("final_norm", "logits"), "final_norm_missing", "head_without_norm"),
    _prefill("ends.py:FinalNormPlusOne", ("final_norm",), "final_norm_one_plus_weight"),
    _prefill("ends.py:FinalNormOfALayer", ("final_norm",), "final_norm_of_a_layer"),
    _decode("caches.py:CacheOneRowOff", _ATTENTION, "cache_one_row_off", layers=(0,)),
    _decode("caches.py:CacheOneRowEarly", _ATTENTION, "cache_one_row_off", layers=(0,)),
    _decode("caches.py:CacheSharedByLayers", _ATTENTION, "cache_of_another_layer", layers=(1,)),
    _decode("caches.py:CacheFp8WithoutScale", _ATTENTION, "cache_fp8_without_scale", layers=(0,)),
    _decode("caches.py:CacheFp8E5m2", _ATTENTION, "cache_fp8_without_scale", layers=(0,)),
    _decode("caches.py:CacheHeadsExchanged", _ATTENTION, "cache_heads_exchanged", layers=(0,)),
    _decode("caches.py:CacheBehindMask", _ATTENTION, "decode_mask_short", layers=(0,)),
    _decode("caches.py:CacheFp8BehindMask", _ATTENTION, "decode_mask_short", layers=(0,)),
    _decode("caches.py:CacheHiddenOneRowOff", _ATTENTION, "cache_one_row_off", layers=(0,)),
    _decode("caches.py:CacheHiddenShared", _ATTENTION, "cache_of_another_layer", layers=(1,)),
    _repeated("caches.py:CacheStale", ("repeated_run",), "cache_stale"),
    _repeated("passes.py:AnglesByShape", ("repeated_run",), "kept_by_shape"),
    _repeated("implementations.py:BlackBoxAnglesByShape", ("repeated_run",), "kept_by_shape", backends=_CPU),
    _repeated("implementations.py:BlackBoxEightTokens", ("repeated_run",), "depends_on_row", backends=_CPU),
    _repeated(
        "implementations.py:BlackBoxPageShared", ("repeated_run",), "depends_on_neighbours", backends=_CPU
    ),
    _decode("caches.py:CacheEightTokens", ("cache",), "cache_of_other_tokens", layers=(0,)),
    _decode("caches.py:CachePageShared", ("cache",), "cache_of_other_tokens", layers=(0,)),
    _chunks("chunks.py:PrefixHidden", _CHUNK, "decode_past_missing", layers=(0,)),
    _chunks("chunks.py:MaskFromTheFirstKey", _CHUNK, "chunk_order_wrong", layers=(0,)),
    _chunks("chunks.py:KeysEarly", _CHUNK, "decode_positions_off", layers=(0,)),
    _chunks("implementations.py:BlackBoxPrefixHidden", ("logits",), "", backends=_CPU),
    _chunks("chunks.py:EdgeKeysEarly", _CHUNK, "decode_positions_off", layers=(0,)),
    _decode("caches.py:PositionsRestartedAtDecode", _ATTENTION, "decode_positions_restarted", layers=(0,)),
    _decode("caches.py:PositionsOffAtDecode", _ATTENTION, "decode_positions_off", layers=(0,)),
    _decode("passes.py:BucketMask", _ATTENTION, "decode_padding_visible", layers=(0,)),
    _decode("passes.py:PaddingVisible", _ATTENTION, "decode_padding_visible", layers=(0,)),
    _prefill("passes.py:WrongRowSampled", ("chosen_token",), "padding_sampled"),
    _prefill("passes.py:RowBeforeSampled", ("chosen_token",), "earlier_row_sampled"),
    _prefill("passes.py:ShardOffsetLost", ("chosen_token",), "token_shard_offset"),
    _prefill("passes.py:ShardsUneven", ("chosen_token",), "token_shard_offset"),
    _prefill("passes.py:WrongRowReturned", ("logits",), "padding_sampled"),
    _prefill("passes.py:LayerSkipped", ("layer_order",), "layer_skipped", layers=(2,)),
    _prefill("passes.py:LayerTwice", ("layer_order",), "layer_twice", layers=(1,)),
    _prefill("passes.py:LayersOutOfOrder", ("layer_order",), "layers_out_of_order", layers=(1, 2)),
    _prefill("passes.py:LastLayerLeftOut", ("layer_order",), "layer_left_out", layers=(3,)),
    _prefill("passes.py:FirstLayerLeftOut", ("layer_order",), "layer_left_out", layers=(0,)),
    _prefill("passes.py:StageLosesResidual", ("input",), "residual_lost", layers=(2,)),
    _prefill("passes.py:NormLosesResidual", ("final_norm_input",), "residual_lost"),
    _prefill("passes.py:TokensTransposed", ("input",), "tokens_exchanged", layers=(2,)),
    _prefill("passes.py:IdsTransposed", ("embedding",), "embedding_tokens_exchanged"),
    _prefill("passes.py:LogitsOfOtherRows", ("logits",), "head_tokens_exchanged"),
    _prefill("ends.py:EmbeddingOfEightBits", ("embedding",), "embedding_low_precision"),
    _prefill(
        "passes.py:WeightsOfAnotherLayer",
        ("input_norm", "q_proj", "output"),
        "weights_of_another_layer",
        layers=(2,),
    ),
    _never("passes.py:ClassOfTheCpu", ("classes",), "class_of_the_cpu", variables={"NXD_CPU_MODE": "1"}),
    _prefill(
        "implementations.py:TensorParallelShardsExchanged", ("logits",), "head_shards_exchanged", num_ranks=2
    ),
)
RIGHT_MODELS = (
    ModelPlant("../examples/model_port.py:Model"),
    ModelPlant("caches.py:OwnCache"),
    ModelPlant("caches.py:CacheEmptied"),
    ModelPlant("caches.py:CacheHidden"),
    ModelPlant("caches.py:CacheFp8WithScales"),
    ModelPlant("caches.py:CacheForgets"),
    ModelPlant("chunks.py:TakesNone"),
    ModelPlant("passes.py:DrawnTokens"),
    ModelPlant("passes.py:Handing"),
    ModelPlant("implementations.py:BlackBox", backends=_CPU),
    ModelPlant("caches.py:CacheTransposed"),
    ModelPlant("caches.py:CacheOtherLayout"),
    ModelPlant("caches.py:KeysBeforeRope"),
    ModelPlant("passes.py:Bucketed"),
    ModelPlant("passes.py:BucketShown"),
    ModelPlant("passes.py:Sampling"),
    ModelPlant("passes.py:LastLogits"),
    ModelPlant("passes.py:InOrder"),
    ModelPlant("ends.py:PaddedLogitsMasked"),
    ModelPlant("implementations.py:TransformersSdpa", backends=_CPU),
    ModelPlant("implementations.py:TransformersEager", backends=_CPU),
    ModelPlant("implementations.py:TransformersStaticCache", backends=_CPU),
    ModelPlant("implementations.py:compiled_eager", backends=_CPU),
    ModelPlant("implementations.py:compiled_aot_eager", backends=_CPU),
    ModelPlant("implementations.py:TracedBlackBox", backends=_CPU),
    ModelPlant("implementations.py:TransformersBlackBox", backends=_CPU),
    ModelPlant("implementations.py:TensorParallel", num_ranks=2),
)


def choose_model_ports(names: Iterable[str]) -> tuple[ModelPlant, ...]:
    """Choose whole ports by name; all if no name is given.

    Raises:
        UsageError: No port has one of the names.
    """
    ports, wanted = (*MODEL_MISTAKES, *RIGHT_MODELS), set(names)
    unknown = wanted - {port.name for port in ports}
    if unknown:
        raise UsageError(
            f"no whole port is called {', '.join(sorted(unknown))}",
            expected=", ".join(port.name for port in ports),
        )
    return tuple(port for port in ports if not wanted or port.name in wanted)
