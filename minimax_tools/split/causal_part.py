"""A causal language model of transformers, its config, and parts of it, with stand-ins for other parts' modules.

Every part keeps transformers' forward, so its layers keep their numbers and compute as in the whole model. transformers
itself fills it from stored tensors: it knows which names and shapes the files of each model have.

To find where a model may be cut, it runs with stand-ins for its layers and for all modules that hold tensors. Hidden
states must come out bit for bit as they went in. The order of the calls tells which modules come before the layers.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import nn

from minimax_tools.errors import CheckpointError, Mm2Error, list_faults
from minimax_tools.model.architecture import ARCHITECTURES
from minimax_tools.model.families import FAMILIES
from minimax_tools.model.family import find_graph_faults, refuse_faults
from minimax_tools.model.quantisation import find_other_format, find_quantisation_faults, refuse_side_format
from minimax_tools.model.spec import CONFIG_FILE, read_config_file
from minimax_tools.model.weight_names import float32_names
from minimax_tools.reference.modules import family_of_config, loading_arguments
from minimax_tools.split.parts import Part

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    # For annotations in modules that do not import transformers.
    CausalConfig: TypeAlias = PreTrainedConfig

# Buffers that older checkpoints store and today's models compute.
_COMPUTED = re.compile(r"rotary_emb\.inv_freq$|\.attn\.masked_bias$")
_IN_ORDER = "HF_DEACTIVATE_ASYNC_LOAD"
_QUANTISED_STEP = "Use a copy that is not quantised, or one in FP8."


@dataclass(frozen=True, slots=True, kw_only=True)
class Implementation:
    """Dtype and kernels of a model; None means transformers' choice."""

    dtype: torch.dtype  # dtype of weights and activations; the router of a MiniMax-M2 stays float32
    attn: str | None = None  # attention implementation of transformers
    experts: str | None = None  # experts implementation of transformers

    def arguments(self) -> dict[str, Any]:
        """Return the arguments for transformers' `from_config` and `from_pretrained`."""
        given = {"attn_implementation": self.attn, "experts_implementation": self.experts}
        return {"dtype": self.dtype, **{name: value for name, value in given.items() if value is not None}}


def read_causal_config(folder: Path) -> PreTrainedConfig:
    """Read the config of a checkpoint's folder with transformers; of a model with further parts, its text model's.

    Raises:
        CheckpointError: config.json is missing, transformers does not know the model, or the weights are quantised
            in a way that mm2 cannot dequantise.
    """
    from transformers import AutoConfig

    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        raise CheckpointError(
            f"{folder / CONFIG_FILE} cannot be used",
            found=f"{type(error).__name__}: {error}",
            next_step="Check the path. Models that need code from their repository are not run.",
        ) from error
    family = FAMILIES.get(config.model_type)
    if family is not None and family.text_key is not None:
        config = config.get_text_config()
    _refuse_unread(folder, config)
    return config


def _refuse_unread(folder: Path, config: PreTrainedConfig) -> None:
    """Raise UnsupportedModelError if a config.json names a format or a graph that would be read wrongly, unnoticed.

    transformers computes every kind of RoPE, and what the keys of its own config of the model describe. It ignores
    other keys, such as those of the hub's code.
    """
    path = folder / CONFIG_FILE
    values = read_config_file(path)
    family = FAMILIES.get(str(values.get("model_type")))
    if family is not None:
        known = type(config)().to_dict()
        values = family.text_config(values)
        faults = [fault for fault in find_graph_faults(family, values) if fault.key not in known]
        refuse_faults([*faults, *find_quantisation_faults(values)], where=path)
    other = find_other_format(values)
    if other is not None:
        refuse_faults([replace(other, next_step=_QUANTISED_STEP)], where=path)
    refuse_side_format(folder, values)


def make_causal_config(values: Mapping[str, Any], *, where: Path) -> PreTrainedConfig:
    """Make transformers' config from the values of a config.json; errors name their source `where`.

    Raises:
        CheckpointError: transformers does not know the model.
    """
    from transformers import AutoConfig

    others = {name: value for name, value in values.items() if name != "model_type"}
    try:
        config: PreTrainedConfig = AutoConfig.for_model(str(values.get("model_type")), **others)
    except Exception as error:
        raise CheckpointError(
            f"the config in {where} cannot be used", found=f"{type(error).__name__}: {error}"
        ) from error
    return config


class PassThrough(nn.Module):
    """Stand-in for a layer of another part: returns its hidden states unchanged.

    Args:
        layer: The layer that is replaced.
        in_tuple: Whether the model's loop over layers expects each to return a tuple.
    """

    def __init__(self, layer: nn.Module, *, in_tuple: bool) -> None:
        super().__init__()
        self._in_tuple = in_tuple
        # The model's loop over layers may read plain attributes, such as `attention_type`.
        for name, value in vars(layer).items():
            if isinstance(value, (str, int)) and not name.startswith("_"):
                setattr(self, name, value)

    def forward(
        self, hidden_states: torch.Tensor, *_: Any, **__: Any
    ) -> torch.Tensor | tuple[torch.Tensor, None]:
        """Return `hidden_states` [B,S,H]."""
        return (hidden_states, None) if self._in_tuple else hidden_states


class AddsNothing(nn.Module):
    """Stand-in for an embedding of another part that is added to the hidden states, such as that of positions."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Return -0.0: adding it changes no number, while adding +0.0 turns -0.0 into +0.0."""
        return torch.tensor(-0.0)


class Elsewhere(nn.Module):
    """Stand-in for a module of another part that is never called."""

    def forward(self, *_: Any, **__: Any) -> torch.Tensor:
        """Raise RuntimeError."""
        raise RuntimeError("this module belongs to another part of the split model")


@dataclass(frozen=True, slots=True, kw_only=True)
class Anatomy:
    """Modules of a model by their place: layers, modules around the layers, head."""

    model: PreTrainedModel
    decoder: nn.Module  # module that runs the layers
    layers: nn.ModuleList  # list of layers that the decoder iterates over
    # Other modules of the decoder that hold tensors or apply dropout, by name.
    around: Mapping[str, nn.Module]
    embedding: str  # name of the token embedding in `around`
    head: tuple[str, ...]  # names of the modules that the model applies after its decoder

    @classmethod
    def of(cls, model: PreTrainedModel) -> Anatomy:
        """Find the modules of a model.

        Raises:
            CheckpointError: The decoder has no list of its layers, or no token embedding beside it.
        """
        decoder = model.get_decoder()
        children = dict(decoder.named_children())
        stacks = [
            child
            for child in children.values()
            if isinstance(child, nn.ModuleList) and len(child) == model.config.num_hidden_layers
        ]
        if len(stacks) != 1:
            raise _indivisible(model, expected="one list of its layers", found=f"{len(stacks)} lists")
        around = {
            name: child
            for name, child in children.items()
            if child is not stacks[0] and (child.state_dict(keep_vars=True) or isinstance(child, nn.Dropout))
        }
        embeddings = [name for name, child in around.items() if child is model.get_input_embeddings()]
        if len(embeddings) != 1:
            raise _indivisible(model, expected="a token embedding beside its layers", found="none")
        return cls(
            model=model,
            decoder=decoder,
            layers=stacks[0],
            around=around,
            embedding=embeddings[0],
            head=tuple(name for name, child in model.named_children() if child is not model.base_model),
        )

    def put_stand_ins(self, own: OwnModules, *, in_tuple: bool) -> None:
        """Put stand-ins into the model for all modules but a part's own."""
        for number, layer in enumerate(self.layers):
            if number not in own.layers:
                self.layers[number] = PassThrough(layer, in_tuple=in_tuple)
        for name, module in self.around.items():
            if name not in own.around:
                # Embeddings of positions are added to hidden states; norms and dropouts are applied to them.
                stand_in = AddsNothing() if isinstance(module, nn.Embedding) else nn.Identity()
                setattr(self.decoder, name, Elsewhere() if name == self.embedding else stand_in)
        for name in () if own.has_head else self.head:
            setattr(self.model, name, Elsewhere())


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnModules:
    """Modules of a part; the default is a part that holds nothing."""

    layers: range = range(0)
    around: tuple[str, ...] = ()  # names of modules before or after the layers
    has_head: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPart:
    """A component as transformers' model, filled."""

    model: PreTrainedModel
    part: Part  # the component: bottom, trunk or top
    implementation: Implementation  # dtype and kernels


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """A model that was proved to be divisible, with the modules around its layers."""

    config: PreTrainedConfig  # without quantisation: FP8 weights are dequantised when they are read
    implementation: Implementation
    model_class: type[PreTrainedModel]
    prefix: str  # prefix of the base model, which some files leave out
    layers: str  # path of the list of layers, prefix included
    tied_head: str | None  # name of the head's weight, if it is tied to the token embedding
    in_tuple: bool = False  # True if a layer returns its hidden states in a tuple
    before: tuple[str, ...] = ()  # names of the modules that the decoder calls before its layers
    after: tuple[str, ...] = ()  # names of those that it calls after them

    @classmethod
    def of(cls, config: PreTrainedConfig, implementation: Implementation) -> Division:
        """Find the modules of the model that `config` describes, and prove that it may be cut between its layers.

        Raises:
            CheckpointError: transformers has no such causal language model, or hidden states change outside its
                layers, embedding, norm and head.
        """
        config = copy.deepcopy(config)
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        model = _build_on_meta(config, implementation)
        anatomy = Anatomy.of(model)
        paths = {module: path for path, module in model.named_modules()}
        head = f"{paths.get(model.get_output_embeddings())}.weight"
        division = cls(
            config=config,
            implementation=implementation,
            model_class=type(model),
            prefix=model.base_model_prefix,
            layers=paths[anatomy.layers],
            tied_head=head if head in model.all_tied_weights_keys else None,
        )
        try:
            return division._proved(anatomy)
        except CheckpointError:
            # In some models a layer returns a tuple, so they fail with the first stand-ins.
            return replace(division, in_tuple=True)._proved(anatomy)

    def load(
        self,
        part: Part,
        tensors: Mapping[str, Any],
        *,
        where: Path,
        device: torch.device,
        shows_bar: bool = False,
    ) -> ModelPart:
        """Fill a component, on `device`.

        Args:
            part: The component.
            tensors: Its tensors by stored name, or values that give the tensor for `value[...]`.
            where: Path of the tensors, named in errors.
            device: Device of the component.
            shows_bar: Whether transformers shows its bar.

        Raises:
            CheckpointError: A tensor cannot be read, is missing, left over or of another shape.
        """
        own = OwnModules(
            layers=part.layers,
            around=(self.before if part.has_embedding else ()) + (self.after if part.has_head else ()),
            has_head=part.has_head,
        )
        # transformers' class is not typed as a module.
        model: Any = self._fill(own, tensors, where=where, shows_bar=shows_bar)
        model.to(device)
        return ModelPart(model=model, part=part, implementation=self.implementation)

    def _proved(self, anatomy: Anatomy) -> Division:
        """Run the stand-ins on random hidden states, and return the division with the modules sorted by their calls."""
        model = self._fill(OwnModules(), {}, where=Path(), shows_bar=False)
        generator = torch.Generator().manual_seed(0)
        states = torch.randn(2, 3, self.config.hidden_size, generator=generator).to(self.implementation.dtype)
        mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
        decoder, layer = model.get_decoder(), self.layers.rpartition(".")[2]
        with _recording_calls(decoder, layer) as calls:
            try:
                with torch.no_grad():
                    output = model.base_model(
                        inputs_embeds=states, attention_mask=mask, use_cache=False
                    ).last_hidden_state
            except Exception as error:
                raise _indivisible(model, expected="a forward over stand-ins", found=str(error)) from error
        if not isinstance(output, torch.Tensor) or not torch.equal(output, states):
            raise _indivisible(
                model,
                expected="hidden states that change in its layers only",
                found="a change outside them",
            )
        calls = [name for name in calls if name == layer or name in anatomy.around]
        start = calls.index(layer) if layer in calls else len(calls)
        stop = start + len(anatomy.layers)
        # The trace starts from hidden states, so the token embedding is not called.
        before, after = {anatomy.embedding, *calls[:start]}, set(calls[stop:])
        strays = set(anatomy.around) - before - after
        if calls[start:stop] != [layer] * len(anatomy.layers) or before & after or strays:
            raise _indivisible(
                model,
                expected="every module to be called before its layers or after them",
                found=", ".join(sorted(strays | before & after)) or "calls between layers",
            )
        return replace(self, before=tuple(sorted(before)), after=tuple(sorted(after)))

    def _fill(
        self, own: OwnModules, tensors: Mapping[str, Any], *, where: Path, shows_bar: bool
    ) -> PreTrainedModel:
        """Let transformers build the model with stand-ins, and fill it."""
        base, in_tuple = self.model_class, self.in_tuple
        in_float32, family = _float32_names(self.config), family_of_config(self.config)

        def build(model: Any, config: PreTrainedConfig) -> None:
            base.__init__(model, config)
            Anatomy.of(model).put_stand_ins(own, in_tuple=in_tuple)
            # The other half of a tie belongs to another part.
            model.all_tied_weights_keys = {}
            model._keep_in_fp32_modules_strict.update(in_float32)

        # transformers knows by the class's name how the files of a model differ from its modules.
        part_class: Any = type(base.__name__, (base,), {"__init__": build, "__module__": base.__module__})
        with _listening(shows_bar=shows_bar) as report:
            try:
                model, info = part_class.from_pretrained(
                    None,
                    config=self.config,
                    state_dict=dict(tensors),
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                    **({} if family is None else loading_arguments(family)),
                    **self.implementation.arguments(),
                )
            except Mm2Error:
                raise
            except Exception as error:
                # Damaged weights, or a config that fits no model, fail in any class.
                unconverted = re.findall(r"^(\S+) +\| CONVERSION", report.getvalue(), re.MULTILINE)
                faults = [f"{name}: its stored matrices do not fit together" for name in unconverted]
                raise unfit_checkpoint(where, faults or [f"{type(error).__name__}: {error}"]) from error
        mismatched = {name: sizes for name, *sizes in info["mismatched_keys"]}
        faults = [f"{name}: found nothing" for name in sorted({*info["missing_keys"]} - mismatched.keys())]
        faults += [
            f"{name}: the model has no place for it"
            for name in sorted(info["unexpected_keys"])
            if not _COMPUTED.search(name)
        ]
        faults += [
            f"{name}: expected {list(expected)}, found {list(found)}"
            for name, (found, expected) in sorted(mismatched.items())
        ]
        if faults:
            raise unfit_checkpoint(where, faults)
        filled: PreTrainedModel = model
        return filled


def _float32_names(config: PreTrainedConfig) -> tuple[str, ...]:
    """Return transformers' names of what stays float32 as the checkpoint stores it; transformers would round it."""
    family = family_of_config(config)
    if family is None:
        return ()
    return tuple(map(family.module_names.stored, float32_names(family.read_graph(config.to_dict()))))


def unfit_checkpoint(where: Path, faults: list[str]) -> CheckpointError:
    """Build the error for tensors at `where` that do not fit their config.json."""
    return CheckpointError(
        f"the tensors at {where} are not the model that its config.json describes",
        found=list_faults(faults),
        next_step="Check that config.json belongs to these files, and fetch the missing files.",
    )


def _build_on_meta(config: PreTrainedConfig, implementation: Implementation) -> PreTrainedModel:
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            model: PreTrainedModel = AutoModelForCausalLM.from_config(config, **implementation.arguments())
    except Exception as error:
        # A config that fits no model fails in any class: AttributeError, ImportError, ZeroDivisionError.
        raise CheckpointError(
            f"transformers cannot build a causal language model of type {config.model_type!r}",
            found=f"{type(error).__name__}: {error}",
        ) from error
    return model


@contextlib.contextmanager
def _recording_calls(decoder: nn.Module, layers: str) -> Iterator[list[str]]:
    """Record the names of the decoder's modules as it calls them in the block; a layer has the name of their list."""
    calls: list[str] = []

    def record(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    handles = []
    for name, child in decoder.named_children():
        watched = child.children() if name == layers else (child,)
        handles += [module.register_forward_hook(record(name)) for module in watched]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


@contextlib.contextmanager
def _listening(*, shows_bar: bool) -> Iterator[io.StringIO]:
    """Collect what transformers logs in the block, show or hide its bars, and have it read each tensor when needed."""
    from transformers.utils import logging as transformers_logging

    # transformers' module has no types.
    bars: Any = transformers_logging
    was_shown, report = bars.is_progress_bar_enabled(), io.StringIO()
    logger = logging.getLogger("transformers")
    handlers = list(logger.handlers)
    logger.handlers[:] = [logging.StreamHandler(report)]
    # Its threads would read all experts of the part before it fuses the first.
    order = os.environ.get(_IN_ORDER)
    os.environ[_IN_ORDER] = "1"
    (bars.enable_progress_bar if shows_bar else bars.disable_progress_bar)()
    try:
        yield report
    finally:
        (bars.enable_progress_bar if was_shown else bars.disable_progress_bar)()
        logger.handlers[:] = handlers
        if order is None:
            del os.environ[_IN_ORDER]
        else:
            os.environ[_IN_ORDER] = order


def _indivisible(model: PreTrainedModel, *, expected: str, found: str) -> CheckpointError:
    return CheckpointError(
        f"{type(model).__name__} cannot be split",
        expected=expected,
        found=found,
        next_step=f"Proved to work: {', '.join(ARCHITECTURES)}.",
    )
