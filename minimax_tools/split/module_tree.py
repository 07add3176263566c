"""The Architecture of any causal language model that transformers knows, read from its tree of modules.

The tree is built without memory for weights. Its names are turned back into those of the hub, and the paths
that a checkpoint of the base model alone has are added.
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
    """How a checkpoint of the model that the folder's config.json describes names its tensors.

    Raises:
        CheckpointError: There is no config.json, transformers knows no causal language model of that kind
            (code that lies beside a checkpoint is never run), or its tree is no stack of decoder layers
            between embeddings and one final norm.
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
    except (KeyError, OSError, TypeError, ValueError, RuntimeError) as error:
        raise CheckpointError(
            f"transformers builds no causal language model from {folder / 'config.json'}",
            found=f"{type(error).__name__}: {error}",
            next_step="Use a transformers that knows the model, or give the Architecture itself.",
        ) from error
    return describe_tree(model)


def describe_tree(model: PreTrainedModel) -> Architecture:
    """The architecture of a model of transformers, on whatever device its parameters are.

    Raises:
        CheckpointError: As for `read_architecture`.
    """
    config = model.config
    num_layers = getattr(config.get_text_config(), "num_hidden_layers", None)
    paths = {module: path for path, module in model.named_modules()}
    embedding = paths.get(model.get_input_embeddings())
    head = paths.get(model.get_output_embeddings())
    if config.is_encoder_decoder or embedding is None or head is None or num_layers is None:
        raise _unfit(model, "it is no decoder with an embedding of token ids and a head")
    trunk = embedding.rpartition(".")[0]
    lists = [
        name
        for name, module in model.get_submodule(trunk).named_children()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    ]
    if len(lists) != 1:
        raise _unfit(model, f"{trunk or 'it'} has {len(lists)} lists of {num_layers} layers")
    roles: dict[str, list[str]] = {"embedding": [], "norm": []}
    for name, role in _roles(model, trunk, left_out={lists[0], embedding.rpartition(".")[2]}):
        roles[role].append(_join(trunk, name))
    if not roles["norm"]:
        raise _unfit(model, "there is no norm behind its layers")
    return Architecture(
        model_type=str(config.model_type),
        layers=_spellings(model, (_join(trunk, lists[0]),), inside="0"),
        token_embeddings=_spellings(model, (embedding,)),
        other_embeddings=_spellings(model, tuple(roles["embedding"])),
        final_norms=_spellings(model, tuple(roles["norm"])),
        lm_heads=_spellings(model, (head,)),
        num_layers=num_layers,
    )


def _build(config: PreTrainedConfig) -> PreTrainedModel:
    import transformers

    # The class that wrote the checkpoint names its tensors; one that sees pictures too is no AutoModelForCausalLM.
    for name in config.architectures or ():
        kind = getattr(transformers, str(name), None)
        # A config may name anything; only models are built of it.
        if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
            model: PreTrainedModel = kind(config)
            return model
    model = transformers.AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    return model


def _roles(model: PreTrainedModel, trunk: str, *, left_out: set[str]) -> Iterator[tuple[str, str]]:
    """Each stored child of the trunk beside the layers, and whether it is an embedding or the final norm."""
    children: list[tuple[str, Any]] = list(model.get_submodule(trunk).named_children())
    if trunk == "":
        head = model.get_output_embeddings()
        children = [(name, module) for name, module in children if module is not head]
    for name, module in children:
        if name in left_out or not module.state_dict():
            continue
        if isinstance(module, torch.nn.Embedding) or "emb" in name:
            yield name, "embedding"
        elif "norm" in type(module).__name__.lower():
            yield name, "norm"
        else:
            raise _unfit(model, f"{_join(trunk, name)} is neither an embedding nor a norm")


def _spellings(model: PreTrainedModel, paths: tuple[str, ...], *, inside: str = "") -> tuple[str, ...]:
    """Each path as the tree has it, as the hub's files have it, and as the base model's own files have it."""
    found: dict[str, None] = {}
    for path in paths:
        for spelling in (path, _hub_path(model, path, inside)):
            base = spelling.removeprefix(model.base_model_prefix + ".")
            found.update(dict.fromkeys((spelling, base)))
    return tuple(found)


def _hub_path(model: PreTrainedModel, path: str, inside: str) -> str:
    from transformers.core_model_loading import revert_weight_conversion

    # A norm's or an embedding's tensor, which is at most renamed on loading; the tail stays as it is.
    root = _join(path, inside)
    tensors = dict(model.get_submodule(root).state_dict())
    tail = min(tensors, key=lambda name: (tensors[name].dim(), name))
    (stored,) = revert_weight_conversion(model, {_join(root, tail): tensors[tail]})
    suffix = "." + _join(inside, tail)
    return str(stored).removesuffix(suffix) if str(stored).endswith(suffix) else path


def _join(*parts: str) -> str:
    return ".".join(part for part in parts if part)


def _unfit(model: PreTrainedModel, found: str) -> CheckpointError:
    return CheckpointError(
        f"the tree of {type(model).__name__} cannot be told apart into embeddings, layers, final norm and head",
        expected="a list of decoder layers beside the embedding and the final norm",
        found=found,
        next_step="Give the Architecture itself.",
    )
