"""Family: models that compute one graph, as a description; and the keys of config.json that describe another.

Neutral values of such keys, which change nothing, pass. So do keys of heads that predict further tokens (`use_mtp`,
`num_mtp_modules`): the originals set them and ship no such tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minimax_tools.errors import UnsupportedModelError, list_names
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.stored_names import StoredNames


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFault:
    """A key of config.json with a value that mm2 does not compute or read."""

    key: str  # with its parent, such as `rope_parameters.rope_type`
    expected: str
    found: str
    next_step: str

    def __str__(self) -> str:
        return f"{self.key} is {self.found} instead of {self.expected}"


def refuse_faults(faults: Sequence[ConfigFault], *, where: Path | str) -> None:
    """Raise one UnsupportedModelError that names all faults of the file `where`; without faults, do nothing."""
    if not faults:
        return
    first, *others = faults
    next_step = " ".join(dict.fromkeys(fault.next_step for fault in faults))
    if not others:
        raise UnsupportedModelError(
            f"{where} sets {first.key}", expected=first.expected, found=first.found, next_step=next_step
        )
    raise UnsupportedModelError(
        f"{where} describes a model that mm2 does not compute",
        found="; ".join(map(str, faults)),
        next_step=next_step,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of models: how its config.json, its checkpoints and transformers' module of it are read."""

    model_type: str  # its name in config.json
    title: str  # its name in sentences
    originals: str  # the models of it that are published, in words
    text_key: str | None = None  # key of config.json that holds the text model; None if all of it does
    # Settings that every model of it has; config.json may leave them out. Other values describe another computation.
    fixed_values: Mapping[str, Any] = field(default_factory=dict)
    # Keys of `NEUTRAL_VALUES` that it reads: any value of them is its own.
    read_keys: frozenset[str] = frozenset()
    read_graph: Callable[[Mapping[str, Any]], ModelGraph]  # from the content of config.json
    # The key of config.json of each size that is not named as `ModelSpec` names it.
    size_keys: Mapping[str, str] = field(default_factory=dict)
    # Keys of config.json of the widths of shared and dense MLPs, as far as they are no multiple of an expert's.
    width_keys: tuple[str, ...] = ()
    default_rotary_factor: float = 1.0  # share of a head's dims that are rotated, if config.json names none
    # Whether all its models name how many dims of a head are rotated; a copy that does not has lost the key.
    names_rotary_width: bool = False
    stored_names: StoredNames = field(default_factory=StoredNames)
    originals_are_fp8: bool = False  # whether its originals store their linear layers in FP8; else in BF16
    # Names in transformers' decoder layer of what it does not fuse; None if they are the stored ones.
    own_module_names: StoredNames | None = None
    fuses_gate_up: bool = False  # whether gate and up of shared and dense MLPs are one parameter there
    transformers_prefix: str  # of the names of transformers' classes, such as `MiniMaxM2`
    # For synthetic models:
    preset: str  # name of the preset of true sizes
    preset_words: str  # the published model that has these sizes, in words
    toy_preset: str  # name of the toy's
    true_sizes: Mapping[str, int]  # of a published model, named as `ModelSpec` names them
    # What its config.json holds beside sizes and token ids, from the sizes.
    other_keys: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    toy_sizes: Mapping[str, int] = field(default_factory=dict)  # those that differ from the common toy's
    derived_sizes: frozenset[str] = frozenset()  # sizes that no key of config.json holds

    def text_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of the text model in a config.json; others that it lacks are kept, such as dtypes."""
        text = config.get(self.text_key) if self.text_key else None
        if not isinstance(text, Mapping):
            return dict(config)
        outer = {key: value for key, value in config.items() if not isinstance(value, Mapping)}
        quantised = {key: config[key] for key in ("quantization_config",) if key in config}
        return {**quantised, **outer, **text, "model_type": self.model_type}

    @property
    def module_names(self) -> StoredNames:
        """Names in transformers' decoder layer of what it does not fuse."""
        return self.own_module_names or self.stored_names

    def size_key(self, name: str) -> str:
        """Return the key of config.json that holds a size, named as `ModelSpec` names it."""
        return self.size_keys.get(name, name)

    def retell(self, text: str) -> str:
        """Return a text that is written of MiniMax-M2 as one of this family: its title, its names of tensors."""
        return self.stored_names.retell(text.replace("MiniMax-M2", self.title))


_ZERO = (0,)
_ONE = (1,)
# Values that change nothing of what the other keys describe, by key; null does too.
NEUTRAL_VALUES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        # Experts that every token takes, and layers without routed experts.
        "shared_intermediate_size": _ZERO,
        "n_shared_experts": _ZERO,
        "num_shared_experts": _ZERO,
        "first_k_dense_replace": _ZERO,
        "mlp_only_layers": ([],),
        "decoder_sparse_step": _ONE,
        # Attention to the nearest positions only.
        "sliding_window": _ZERO,
        "attn_window_size": (0, -1),
        # Routing in groups of experts, and what is done to the routing weights.
        "n_group": (0, 1),
        "num_expert_group": (0, 1),
        "topk_group": (0, 1),
        "routed_scaling_factor": _ONE,
        "norm_topk_prob": (True,),
        # Factors of the residual stream and of what is added to it, under MiniMax's and transformers' names.
        **{
            f"layernorm_{part}_{factor}": _ONE
            for part in ("full_attention", "linear_attention", "mlp")
            for factor in ("alpha", "beta")
        },
        **{
            f"{part}_{factor}_factor": _ONE
            for part in ("full_attn", "linear_attn", "mlp")
            for factor in ("alpha", "beta")
        },
        # Residuals taken behind the norm.
        "postnorm": (False,),
        "attention_bias": (False,),
        "mlp_bias": (False,),
    }
)
# Lists with one kind of attention per layer, and their name of softmax attention over all earlier positions.
_FULL_ATTENTION: Mapping[str, object] = MappingProxyType(
    {"attn_type_list": 1, "decoder_attention_types": 1, "layer_types": "full_attention"}
)
_NUM_LAYERS_SHOWN = 6


def find_graph_faults(family: Family, config: Mapping[str, Any]) -> list[ConfigFault]:
    """Find the keys of a config.json of the family that describe another graph than the family's."""
    next_step = (
        f"mm2 knows {family.title}'s graph only. If the model's code does not read this key, remove it from a copy of "
        "config.json."
    )
    return [
        ConfigFault(key=key, expected=expected, found=found, next_step=next_step)
        for key, expected, found in (
            *_find_other_values(family, config),
            *_find_other_attention(family, config),
        )
    ]


def _find_other_values(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for key, value in family.fixed_values.items():
        if config.get(key, value) != value:
            yield key, repr(value), repr(config[key])
    for key, neutral in NEUTRAL_VALUES.items():
        found = config.get(key)
        if key not in family.read_keys and found is not None and found not in neutral:
            yield key, " or ".join(map(repr, neutral)), repr(found)


def _find_other_attention(family: Family, config: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    num_layers = config.get("num_hidden_layers")
    for key, full in _FULL_ATTENTION.items():
        kinds = config.get(key)
        if kinds is None or key in family.read_keys:
            continue
        expected = f"{full!r} (softmax attention) for each of {num_layers} layers"
        if not isinstance(kinds, list):
            yield key, expected, repr(kinds)
        elif len(kinds) != num_layers:
            yield key, expected, f"{len(kinds)} entries"
        elif others := _describe_other_kinds(kinds, full):
            yield key, expected, others


def _describe_other_kinds(kinds: list[object], full: object) -> str:
    """Describe the entries that are not `full`, as "0 in layers 3, 7"; the empty text if there are none."""
    layers: dict[str, list[str]] = {}
    for layer, kind in enumerate(kinds):
        if kind != full:
            layers.setdefault(repr(kind), []).append(str(layer))
    return "; ".join(
        f"{kind} in {'layer' if len(numbers) == 1 else 'layers'} {list_names(numbers, most=_NUM_LAYERS_SHOWN)}"
        for kind, numbers in layers.items()
    )
