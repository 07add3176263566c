"""The quantities of a model in config.json, checked when they are read; and the JSON files of a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

from minimax_tools.errors import CheckpointError, UnsupportedModelError, shorten
from minimax_tools.machine.json_file import read_json
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import Family, find_graph_faults, refuse_faults
from minimax_tools.model.graph import ModelGraph
from minimax_tools.model.quantisation import find_quantisation_faults, refuse_side_format
from minimax_tools.model.rope import find_rope_faults, read_rope_theta, read_rotary_dim, warn_of_rotary_width
from minimax_tools.model.stored_names import StoredNames

CONFIG_FILE = "config.json"
# Sizes under the names of the architectures that mm2 knows; a size beyond these limits is no model's.
_SIZES = (
    "hidden_size", "n_embd", "num_hidden_layers", "n_layer", "num_attention_heads", "n_head", "num_key_value_heads",
    "head_dim", "intermediate_size", "n_inner", "vocab_size", "num_local_experts", "num_experts",
    "num_experts_per_tok", "max_position_embeddings", "rotary_dim",
)  # fmt: skip
MAX_SIZE = 1 << 48
_MAX_LAYERS = 1 << 20
_LAYERS = ("num_hidden_layers", "n_layer")


def require_sizes(config: Mapping[str, Any], path: Path) -> None:
    """Raise CheckpointError for sizes of any model's config.json that are none; absent and null ones are not judged."""
    faults = []
    for key in _SIZES:
        size, most = config.get(key), _MAX_LAYERS if key in _LAYERS else MAX_SIZE
        # A bool is an int in Python.
        if size is not None and not (type(size) is int and 0 < size <= most):
            faults.append(f"{key} is {shorten(repr(size))}")
    if faults:
        raise CheckpointError(
            f"{path} describes no model",
            expected="sizes that are whole numbers from 1",
            found="; ".join(faults),
            next_step="Fetch the file again.",
        )


def read_checkpoint_config(folder: Path) -> dict[str, Any]:
    """Read the config.json of a checkpoint's folder; raise CheckpointError if there is none, or it cannot be read."""
    path = folder / CONFIG_FILE
    if path.exists():
        return read_config_file(path)
    refuse_gguf(folder)
    raise CheckpointError(
        f"no checkpoint at {folder}",
        expected="a folder with config.json and safetensors shards",
        found="no config.json" if folder.is_dir() else "no such folder",
        next_step="Give --model a folder or a hub id, or make a small one: mm2-split synthesize.",
    )


def refuse_gguf(folder: Path) -> None:
    """Raise UnsupportedModelError if a folder holds GGUF, in place of what was looked for."""
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        raise UnsupportedModelError(
            f"{folder} holds GGUF, which mm2 does not read",
            expected="config.json and safetensors shards",
            found=files[0],
            next_step="Give --model the checkpoint that it was made of.",
        )


def read_config_file(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object; raise CheckpointError if it cannot be read, or holds something else."""
    try:
        config = read_json(path)
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read", found=str(error), next_step="Fetch the file again."
        ) from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} holds no JSON object", next_step="Fetch the file again.")
    return config


# Positive integers that are copied from config.json; the other fields are derived.
_COPIED_FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "num_local_experts",
    "num_experts_per_tok",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The quantities of a model, under the names of MiniMax-M2's config.json, and the graph that it computes.

    `raw` is config.json, or what it says of the text model; all other fields are read from it. `intermediate_size` is
    an expert's width.

    Raises:
        CheckpointError: A size is not a positive integer, or two sizes contradict each other.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rotary_dim: int
    rope_theta: float
    rms_norm_eps: float
    num_local_experts: int
    num_experts_per_tok: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    tie_word_embeddings: bool
    graph: ModelGraph
    family: Family = field(repr=False, compare=False)
    raw: Mapping[str, Any] = field(repr=False, compare=False)

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in (*_COPIED_FIELDS, "head_dim", "rotary_dim")}
        faults = [
            f"{name} is {shorten(repr(size))}"
            for name, size in sizes.items()
            if type(size) is not int or not 0 < size <= MAX_SIZE
        ]
        # Only valid sizes can be divided and compared.
        faults = faults or self._contradictions()
        if faults:
            raise CheckpointError(f"config.json describes no {self.family.title}", found="; ".join(faults))

    def _contradictions(self) -> list[str]:
        faults = []
        if self.num_attention_heads % self.num_key_value_heads:
            faults.append(
                f"{self.num_attention_heads} heads do not divide by {self.num_key_value_heads} kv heads"
            )
        if self.rotary_dim > self.head_dim or self.rotary_dim % 2:
            faults.append(f"rotary_dim {self.rotary_dim} is odd or wider than head_dim {self.head_dim}")
        if self.num_experts_per_tok > self.num_local_experts:
            faults.append(f"{self.num_experts_per_tok} experts per token of {self.num_local_experts}")
        return faults

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelSpec:
        """Read `config.json` in `folder`.

        What config.json leaves open is logged as a warning.

        Raises:
            CheckpointError: The file is missing, is not JSON, or describes another architecture.
            UnsupportedModelError: It, or a file beside it, names another format of weights.
        """
        folder = Path(folder)
        config = read_checkpoint_config(folder)
        spec = cls.from_config(config, where=folder / CONFIG_FILE)
        refuse_side_format(folder, config)
        spec.warn_of_rotary_width(where=folder / CONFIG_FILE)
        return spec

    @classmethod
    def from_config(cls, config: Mapping[str, Any], *, where: Path | str = CONFIG_FILE) -> ModelSpec:
        """Build the spec from the keys of a config.json; errors name the file `where`.

        Raises:
            UnsupportedModelError: A key describes another computation or weight format than mm2 knows.
            CheckpointError: A key is missing or has a value that no model of the family has.
        """
        family = find_family(config, where=where)
        config = family.text_config(config)
        try:
            head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
            faults = (
                *find_graph_faults(family, config),
                *find_rope_faults(config, head_dim=head_dim),
                *find_quantisation_faults(config),
            )
            refuse_faults(faults, where=where)
            return cls(
                **{name: config[family.size_key(name)] for name in _COPIED_FIELDS},
                head_dim=head_dim,
                rotary_dim=read_rotary_dim(
                    config, head_dim=head_dim, default_factor=family.default_rotary_factor
                ),
                rope_theta=read_rope_theta(config),
                rms_norm_eps=float(config["rms_norm_eps"]),
                tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
                graph=family.read_graph(config),
                family=family,
                raw=MappingProxyType(dict(config)),
            )
        except KeyError as error:
            raise CheckpointError(
                f"{where} has no {error.args[0]!r}", next_step="Fetch the file again."
            ) from error
        except (TypeError, ValueError, AttributeError) as error:
            raise CheckpointError(
                f"{where} cannot be understood", found=str(error), next_step="Fetch the file again."
            ) from error

    @property
    def is_fp8(self) -> bool:
        """Decide whether config.json names a quantisation. It is FP8 in blocks: others are refused."""
        return bool(self.raw.get("quantization_config"))

    @property
    def query_width(self) -> int:
        """Width of q_proj's output: heads × head_dim."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_width(self) -> int:
        """Width of k_proj's and v_proj's output: kv heads × head_dim."""
        return self.num_key_value_heads * self.head_dim

    def digest(self) -> str:
        """Compute sha256 over `quantities`. It is equal for an FP8 and a BF16 copy of one model."""
        return hashlib.sha256(json.dumps(self.quantities(), sort_keys=True).encode()).hexdigest()

    def quantities(self) -> dict[str, int | float | bool]:
        """Return every size by name, and each option of the graph that is not MiniMax-M2's."""
        return self.sizes() | self.graph.other_options()

    def sizes(self) -> dict[str, int | float | bool]:
        """Return every size by its name here."""
        return {
            entry.name: getattr(self, entry.name)
            for entry in fields(self)
            if entry.name not in ("graph", "family", "raw")
        }

    def resized(self, **sizes: int) -> ModelSpec:
        """Return the model with other sizes, by their names here; the widths of all MLPs keep their proportions."""
        keys = {self.family.size_key(name): size for name, size in sizes.items()}
        if "intermediate_size" in sizes:
            keys |= {
                key: self.raw[key] * sizes["intermediate_size"] // self.intermediate_size
                for key in self.family.width_keys
                if self.raw.get(key)
            }
        return ModelSpec.from_config({**self.raw, "head_dim": self.head_dim, **keys})

    def warn_of_rotary_width(self, *, where: Path | str) -> None:
        """Log a warning if a config.json, the file `where`, has lost its rotary width."""
        if self.family.names_rotary_width:
            warn_of_rotary_width(self.raw, where=where)


def stored_names_in(folder: Path) -> StoredNames:
    """Return the names under which a checkpoint's folder stores its tensors: mm2's if the family is unknown."""
    try:
        family = FAMILIES.get(str(read_config_file(folder / CONFIG_FILE).get("model_type")))
    except CheckpointError:
        # Who needs config.json reads it, and says what is wrong with it.
        family = None
    return StoredNames() if family is None else family.stored_names


def find_family(config: Mapping[str, Any], *, where: Path | str) -> Family:
    """Find the family of a config.json; raise CheckpointError, which names the file `where`, for another model's."""
    found = config.get("model_type")
    family = FAMILIES.get(found) if isinstance(found, str) else None
    if family is None:
        known = "; ".join(f"{family.title} ({family.originals})" for family in FAMILIES.values())
        raise CheckpointError(
            f"{where} describes another model",
            expected="model_type " + " or ".join(repr(name) for name in FAMILIES),
            found=repr(found),
            next_step=f"mm2 knows these families only, and copies of their models: {known}.",
        )
    return family
