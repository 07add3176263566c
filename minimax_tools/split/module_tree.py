"""Tensor names of any causal language model that transformers knows, read from its tree of modules.

The tree is built on the meta device, without weights. Each path gets up to four spellings: that of the tree, that of
the hub's files, and both without the base model's prefix, as in files saved from the base model alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from minimax_tools.errors import CheckpointError
from minimax_tools.model.architecture import Architecture
from minimax_tools.reference.modules import require_golden_extra

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel


def read_architecture(folder: Path) -> Architecture:
    """Read the tensor names of the model that the folder's config.json describes.

    Code that lies beside a checkpoint is never run.

    Raises:
        CheckpointError: config.json is missing, transformers does not know the model, or its tree is not a stack
            of decoder layers between embeddings and a final norm.
        MissingExtraError: transformers is not installed.
    """
    require_golden_extra("reading a model's tree of modules")
    from transformers import AutoConfig

    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} holds no config.json", next_step="Fetch it beside the weights.")
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        with torch.device("meta"):
            model = _build(config)
    except Exception as error:
        # A config that fits no model fails in any class: AttributeError, ImportError, ZeroDivisionError.
        raise CheckpointError(
            f"transformers builds no causal language model from {folder / 'config.json'}",
            found=f"{type(error).__name__}: {error}",
            next_step="Use a transformers that knows the model, or give an Architecture.",
        ) from error
    return _describe_tree(model)


def _describe_tree(model: PreTrainedModel) -> Architecture:
    config = model.config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    paths = {module: path for path, module in model.named_modules()}
    embedding = paths.get(model.get_input_embeddings())
    head = paths.get(model.get_output_embeddings())
    if config.is_encoder_decoder or embedding is None or head is None or num_layers is None:
        raise _unfit(model, "a model that is not a decoder with a token embedding and a head")
    # The module that holds the embedding also holds the layers and the final norm.
    trunk = embedding.rpartition(".")[0]
    layer_lists = [
        name
        for name, module in model.get_submodule(trunk).named_children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if len(layer_lists) != 1:
        raise _unfit(model, f"{len(layer_lists)} lists of {num_layers} layers in {trunk or 'the model'}")
    roles: dict[str, list[str]] = {"embedding": [], "norm": []}
    for name, role in _roles(model, trunk, left_out={layer_lists[0], embedding.rpartition(".")[2]}):
        roles[role].append(_join(trunk, name))
    if not roles["norm"]:
        raise _unfit(model, "no norm after its layers")
    return Architecture(
        model_type=str(config.model_type),
        layers=_spellings(model, (_join(trunk, layer_lists[0]),)),
        token_embeddings=_spellings(model, (embedding,)),
        other_embeddings=_spellings(model, tuple(roles["embedding"])),
        final_norms=_spellings(model, tuple(roles["norm"])),
        lm_heads=_spellings(model, (head,)),
        num_layers=num_layers,
    )


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    import transformers

    # config.json names the class that was saved, so the tree of this class fits the stored tensors.
    # AutoModelForCausalLM may build another class: for a model of images and text its part for text alone.
    for name in config.architectures or ():
        model_class = getattr(transformers, str(name), None)
        # A config may name any object of transformers; only models are built.
        if isinstance(model_class, type) and issubclass(model_class, transformers.PreTrainedModel):
            model: PreTrainedModel = model_class(config)
            return model
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def _roles(model: PreTrainedModel, trunk: str, *, left_out: set[str]) -> Iterator[tuple[str, str]]:
    """Yield (name, "embedding" or "norm") of each child of the trunk that holds tensors.

    `left_out` are the names of the layers and of the token embedding; the head is left out too.
    """
    children: list[tuple[str, Any]] = list(model.get_submodule(trunk).named_children())
    if trunk == "":
        head = model.get_output_embeddings()
        children = [(name, module) for name, module in children if module is not head]
    for name, module in children:
        if name in left_out or not module.state_dict():
            continue
        # The name decides before the class: BLOOM's `word_embeddings_layernorm` is part of the embedding.
        if isinstance(module, torch.nn.Embedding) or "emb" in name:
            yield name, "embedding"
        elif "norm" in type(module).__name__.lower():
            yield name, "norm"
        else:
            raise _unfit(model, f"{_join(trunk, name)}, neither an embedding nor a norm")


def _spellings(model: PreTrainedModel, paths: tuple[str, ...]) -> tuple[str, ...]:
    """Return all spellings of each path."""
    spellings: list[str] = []
    for path in paths:
        for spelling in (path, _hub_path(model, path)):
            spellings += [spelling, spelling.removeprefix(model.base_model_prefix + ".")]
    # Each once, in order.
    return tuple(dict.fromkeys(spellings))


def _hub_path(model: PreTrainedModel, path: str) -> str:
    """Return the path of a module in the hub's files, found by the stored name of one of its tensors.

    For `model.language_model.layers` that is `0.input_layernorm.weight`, stored by the hub as
    `language_model.model.layers.0.input_layernorm.weight`: the path is what precedes it.
    """
    from transformers.core_model_loading import revert_weight_conversion

    # On loading transformers fuses matrices. A tensor of the fewest dims, such as a norm's, is at most renamed.
    tensors = dict(model.get_submodule(path).state_dict())
    inner_name = min(tensors, key=lambda name: (tensors[name].dim(), name))
    # One tensor goes in, and one comes out, by its stored name.
    stored = revert_weight_conversion(model, {f"{path}.{inner_name}": tensors[inner_name]})
    stored_name = str(next(iter(stored)))
    # If even the name inside the module is another on the hub, the hub's path is unknown: the tree's is used.
    suffix = f".{inner_name}"
    return stored_name.removesuffix(suffix) if stored_name.endswith(suffix) else path


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _unfit(model: PreTrainedModel, found: str) -> CheckpointError:
    return CheckpointError(
        f"the tree of {type(model).__name__} cannot be divided into embeddings, layers, final norm and head",
        expected="a list of decoder layers beside the embedding and the final norm",
        found=found,
        next_step="Give an Architecture (see minimax_tools.model.architecture).",
    )
