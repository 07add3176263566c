"""Planted whole ports: each with one mistake, and right ones of many styles that must never be flagged."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

from faults.model_plant import FirstPass, ModelPlant
from minimax_tools.errors import UsageError

_prefill = partial(ModelPlant, first=FirstPass.PREFILL)
_decode = partial(ModelPlant, first=FirstPass.DECODE)
_chunks = partial(ModelPlant, first=FirstPass.CHUNKS, layers=(0,), sites=("attn_context", "k_rope", "output"))
_stream = partial(ModelPlant, first=FirstPass.PREFILL, layers=(2,), sites=("input",))
_repeated = partial(ModelPlant, first=FirstPass.REPEATED, sites=("repeated_run",))
_ATTENTION = ("cache", "attn_context", "attn_delta", "output", "q_rope", "k_rope")

MODEL_MISTAKES: tuple[ModelPlant, ...] = (
    _prefill(name="head_tied", port="ends.py:HeadTied", sites=("logits",), names=("head_is_embedding",)),
    _prefill(
        name="head_transposed", port="ends.py:HeadTransposed", sites=("logits",), names=("head_transposed",)
    ),
    _prefill(
        name="head_rows_exchanged",
        port="ends.py:HeadRowsExchanged",
        sites=("logits",),
        names=("head_rows_exchanged",),
    ),
    _prefill(
        name="vocabulary_shards_exchanged",
        port="ends.py:VocabularyShardsExchanged",
        sites=("logits",),
        names=("head_shards_exchanged",),
    ),
    _prefill(
        name="padded_logits_live",
        port="ends.py:PaddedLogitsLive",
        sites=("padded_logits", "logits"),
        names=("padded_logits_live",),
    ),
    _prefill(
        name="vocabulary_of_rank_0",
        port="ends.py:VocabularyOfRank0",
        sites=("logits",),
        names=("head_shard_of_rank_0",),
    ),
    _prefill(
        name="embedding_scaled",
        port="ends.py:EmbeddingScaled",
        sites=("embedding",),
        names=("embedding_scaled",),
    ),
    _prefill(
        name="embedding_low_precision",
        port="ends.py:EmbeddingLowPrecision",
        sites=("embedding",),
        names=("embedding_low_precision",),
    ),
    _prefill(
        name="final_norm_missing",
        port="ends.py:FinalNormMissing",
        sites=("final_norm", "logits"),
        names=("final_norm_missing", "head_without_norm"),
    ),
    _prefill(
        name="final_norm_plus_one",
        port="ends.py:FinalNormPlusOne",
        sites=("final_norm",),
        names=("final_norm_one_plus_weight",),
    ),
    _prefill(
        name="final_norm_of_a_layer",
        port="ends.py:FinalNormOfALayer",
        sites=("final_norm",),
        names=("final_norm_of_a_layer",),
    ),
    _decode(
        name="cache_one_row_off",
        port="caches.py:CacheOneRowOff",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_one_row_off",),
    ),
    _decode(
        name="cache_one_row_early",
        port="caches.py:CacheOneRowEarly",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_one_row_off",),
    ),
    _decode(
        name="cache_shared_by_layers",
        port="caches.py:CacheSharedByLayers",
        layers=(1,),
        sites=_ATTENTION,
        names=("cache_of_another_layer",),
    ),
    _decode(
        name="cache_fp8_without_scale",
        port="caches.py:CacheFp8WithoutScale",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_fp8_without_scale",),
    ),
    _decode(
        name="cache_fp8_e5m2",
        port="caches.py:CacheFp8E5m2",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_fp8_without_scale",),
    ),
    _decode(
        name="cache_heads_exchanged",
        port="caches.py:CacheHeadsExchanged",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_heads_exchanged",),
    ),
    _decode(
        name="cache_behind_mask",
        port="caches.py:CacheBehindMask",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_mask_short",),
    ),
    _decode(
        name="cache_fp8_behind_mask",
        port="caches.py:CacheFp8BehindMask",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_mask_short",),
    ),
    _decode(
        name="cache_hidden_one_row_off",
        port="caches.py:CacheHiddenOneRowOff",
        layers=(0,),
        sites=_ATTENTION,
        names=("cache_one_row_off",),
    ),
    _decode(
        name="cache_hidden_shared",
        port="caches.py:CacheHiddenShared",
        layers=(1,),
        sites=_ATTENTION,
        names=("cache_of_another_layer",),
    ),
    ModelPlant(
        name="cache_stale",
        port="caches.py:CacheStale",
        first=FirstPass.REPEATED,
        sites=("repeated_run",),
        names=("cache_stale",),
    ),
    _repeated(name="angles_by_shape", port="passes.py:AnglesByShape", names=("kept_by_shape",)),
    _repeated(
        name="box_angles_by_shape",
        port="implementations.py:BlackBoxAnglesByShape",
        names=("kept_by_shape",),
        backends=("cpu",),
    ),
    _repeated(
        name="box_eight_tokens",
        port="implementations.py:BlackBoxEightTokens",
        names=("depends_on_row",),
        backends=("cpu",),
    ),
    _repeated(
        name="box_page_shared",
        port="implementations.py:BlackBoxPageShared",
        names=("depends_on_neighbours",),
        backends=("cpu",),
    ),
    _decode(
        name="cache_eight_tokens",
        port="caches.py:CacheEightTokens",
        layers=(0,),
        sites=("cache",),
        names=("cache_of_other_tokens",),
    ),
    _decode(
        name="cache_page_shared",
        port="caches.py:CachePageShared",
        layers=(0,),
        sites=("cache",),
        names=("cache_of_other_tokens",),
    ),
    _chunks(name="chunk_prefix_hidden", port="chunks.py:PrefixHidden", names=("decode_past_missing",)),
    _chunks(
        name="chunk_mask_from_the_first_key",
        port="chunks.py:MaskFromTheFirstKey",
        names=("chunk_order_wrong",),
    ),
    _chunks(name="chunk_keys_early", port="chunks.py:KeysEarly", names=("decode_positions_off",)),
    ModelPlant(
        name="box_prefix_hidden",
        port="implementations.py:BlackBoxPrefixHidden",
        first=FirstPass.CHUNKS,
        sites=("logits",),
        names=("",),
        backends=("cpu",),
    ),
    _chunks(name="chunk_edge_keys_early", port="chunks.py:EdgeKeysEarly", names=("decode_positions_off",)),
    _decode(
        name="positions_restarted_at_decode",
        port="caches.py:PositionsRestartedAtDecode",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_positions_restarted",),
    ),
    _decode(
        name="positions_off_at_decode",
        port="caches.py:PositionsOffAtDecode",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_positions_off",),
    ),
    _decode(
        name="bucket_mask",
        port="passes.py:BucketMask",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_padding_visible",),
    ),
    _decode(
        name="padding_visible",
        port="passes.py:PaddingVisible",
        layers=(0,),
        sites=_ATTENTION,
        names=("decode_padding_visible",),
    ),
    _prefill(
        name="wrong_row_sampled",
        port="passes.py:WrongRowSampled",
        sites=("chosen_token",),
        names=("padding_sampled",),
    ),
    _prefill(
        name="row_before_sampled",
        port="passes.py:RowBeforeSampled",
        sites=("chosen_token",),
        names=("earlier_row_sampled",),
    ),
    _prefill(
        name="shard_offset_lost",
        port="passes.py:ShardOffsetLost",
        sites=("chosen_token",),
        names=("token_shard_offset",),
    ),
    _prefill(
        name="shards_uneven",
        port="passes.py:ShardsUneven",
        sites=("chosen_token",),
        names=("token_shard_offset",),
    ),
    _prefill(
        name="wrong_row_returned",
        port="passes.py:WrongRowReturned",
        sites=("logits",),
        names=("padding_sampled",),
    ),
    _prefill(
        name="layer_skipped",
        port="passes.py:LayerSkipped",
        layers=(2,),
        sites=("layer_order",),
        names=("layer_skipped",),
    ),
    _prefill(
        name="layer_twice",
        port="passes.py:LayerTwice",
        layers=(1,),
        sites=("layer_order",),
        names=("layer_twice",),
    ),
    _prefill(
        name="layers_out_of_order",
        port="passes.py:LayersOutOfOrder",
        layers=(1, 2),
        sites=("layer_order",),
        names=("layers_out_of_order",),
    ),
    _prefill(
        name="last_layer_left_out",
        port="passes.py:LastLayerLeftOut",
        layers=(3,),
        sites=("layer_order",),
        names=("layer_left_out",),
    ),
    _prefill(
        name="first_layer_left_out",
        port="passes.py:FirstLayerLeftOut",
        layers=(0,),
        sites=("layer_order",),
        names=("layer_left_out",),
    ),
    _stream(name="stage_loses_residual", port="passes.py:StageLosesResidual", names=("residual_lost",)),
    _prefill(
        name="norm_loses_residual",
        port="passes.py:NormLosesResidual",
        sites=("final_norm_input",),
        names=("residual_lost",),
    ),
    _stream(name="tokens_transposed", port="passes.py:TokensTransposed", names=("tokens_exchanged",)),
    _prefill(
        name="ids_transposed",
        port="passes.py:IdsTransposed",
        sites=("embedding",),
        names=("embedding_tokens_exchanged",),
    ),
    _prefill(
        name="logits_of_other_rows",
        port="passes.py:LogitsOfOtherRows",
        sites=("logits",),
        names=("head_tokens_exchanged",),
    ),
    _prefill(
        name="embedding_of_eight_bits",
        port="ends.py:EmbeddingOfEightBits",
        sites=("embedding",),
        names=("embedding_low_precision",),
    ),
    _prefill(
        name="weights_of_another_layer",
        port="passes.py:WeightsOfAnotherLayer",
        layers=(2,),
        sites=("input_norm", "q_proj", "output"),
        names=("weights_of_another_layer",),
    ),
    ModelPlant(
        name="class_of_the_cpu",
        port="passes.py:ClassOfTheCpu",
        sites=("classes",),
        names=("class_of_the_cpu",),
        variables={"NXD_CPU_MODE": "1"},
    ),
    _prefill(
        name="ranks_shards_exchanged",
        port="implementations.py:TensorParallelShardsExchanged",
        sites=("logits",),
        names=("head_shards_exchanged",),
        num_ranks=2,
    ),
)
RIGHT_MODELS: tuple[ModelPlant, ...] = (
    ModelPlant(name="example", port="../examples/model_port.py:Model"),
    ModelPlant(name="own_cache", port="caches.py:OwnCache"),
    ModelPlant(name="cache_emptied", port="caches.py:CacheEmptied"),
    ModelPlant(name="cache_hidden", port="caches.py:CacheHidden"),
    ModelPlant(name="cache_fp8_with_scales", port="caches.py:CacheFp8WithScales"),
    ModelPlant(name="cache_forgets", port="caches.py:CacheForgets"),
    ModelPlant(name="takes_no_chunks", port="chunks.py:TakesNone"),
    ModelPlant(name="drawn_tokens", port="passes.py:DrawnTokens"),
    ModelPlant(name="handing", port="passes.py:Handing"),
    ModelPlant(name="black_box", port="implementations.py:BlackBox", backends=("cpu",)),
    ModelPlant(name="cache_transposed", port="caches.py:CacheTransposed"),
    ModelPlant(name="cache_other_layout", port="caches.py:CacheOtherLayout"),
    ModelPlant(name="keys_before_rope", port="caches.py:KeysBeforeRope"),
    ModelPlant(name="bucketed", port="passes.py:Bucketed"),
    ModelPlant(name="bucket_shown", port="passes.py:BucketShown"),
    ModelPlant(name="sampling", port="passes.py:Sampling"),
    ModelPlant(name="last_logits", port="passes.py:LastLogits"),
    ModelPlant(name="in_order", port="passes.py:InOrder"),
    ModelPlant(name="padded_logits_masked", port="ends.py:PaddedLogitsMasked"),
    ModelPlant(name="transformers_sdpa", port="implementations.py:TransformersSdpa", backends=("cpu",)),
    ModelPlant(name="transformers_eager", port="implementations.py:TransformersEager", backends=("cpu",)),
    ModelPlant(
        name="transformers_static_cache",
        port="implementations.py:TransformersStaticCache",
        backends=("cpu",),
    ),
    ModelPlant(name="compiled_eager", port="implementations.py:compiled_eager", backends=("cpu",)),
    ModelPlant(name="compiled_aot_eager", port="implementations.py:compiled_aot_eager", backends=("cpu",)),
    ModelPlant(name="traced_black_box", port="implementations.py:TracedBlackBox", backends=("cpu",)),
    ModelPlant(
        name="transformers_black_box", port="implementations.py:TransformersBlackBox", backends=("cpu",)
    ),
    ModelPlant(name="tensor_parallel", port="implementations.py:TensorParallel", num_ranks=2),
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
