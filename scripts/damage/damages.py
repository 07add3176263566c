"""Damages: ways in which a golden or a device run is changed before the two are compared.

Digests of the files are stored in a capture's manifest. A damage alone contradicts them; new digests hide it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file

from damage.tampering import (
    Change,
    change_tensor,
    change_tensors,
    cut_file,
    exchange_files,
    flip_byte,
    remove_tensor,
    sign,
)

LAYER = 1
OTHER_LAYER = 0
_VALUES, _TWINS, _FLOORS = (f"layer_{LAYER}{kind}.safetensors" for kind in ("", ".fp32", ".floor"))
_OTHER_VALUES, _OTHER_TWINS, _OTHER_FLOORS = (
    f"layer_{OTHER_LAYER}{kind}.safetensors" for kind in ("", ".fp32", ".floor")
)
_MODEL_VALUES, _MODEL_TWINS, _MODEL_FLOORS = (f"model{kind}.safetensors" for kind in ("", ".fp32", ".floor"))
_INPUTS = "inputs.safetensors"
# Words of a refusal. Of two exchanged files, that of the lower layer is read first, and refused.
_PLACE, _OTHER_PLACE = (f"of layer {layer}" for layer in (LAYER, OTHER_LAYER))


@dataclass(frozen=True, slots=True)
class Damage:
    """A way to damage a capture."""

    name: str
    apply: Callable[[Path], None]  # function that damages a capture directory
    named: tuple[str, ...] = ()  # words that a refusal must contain
    _: KW_ONLY
    is_of_golden: bool = True  # True if the golden is damaged, False if the device run is
    # True if the golden keeps only the statistics of its noise floor, no float32 twins.
    is_without_twins: bool = False


def _scale(factor: float) -> Change:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0, 0] = torch.nan
    return tensor


def _first_expert_twice(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., 0] = tensor[..., 1]
    return tensor


def _one_token_less(mask: torch.Tensor) -> torch.Tensor:
    mask[0, 0] = 0
    return mask


def _golden_as_twin(directory: Path) -> None:
    values = load_file(directory / _VALUES)["moe_delta"].float().clone()
    change_tensor(directory, _TWINS, "moe_delta", lambda _: values)


def _apply(change: Callable[..., None], *arguments: object) -> Callable[[Path], None]:
    """Build the function that applies a change of `damage.tampering` to a capture directory."""
    return lambda directory: change(directory, *arguments)


def _delete(directory: Path, file: str) -> None:
    (directory / file).unlink()


def _of_site(name: str, file: str, tensor: str, change: Change, *, place: tuple[str, ...] = ()) -> Damage:
    """Build the damage of one tensor of the layer; a refusal must name site, layer and file, or site and `place`."""
    words = place or (_PLACE, file)
    return Damage(name, _apply(change_tensor, file, tensor, change), (tensor.partition(".")[0], *words))


def _of_file(name: str, file: str, change: Change) -> Damage:
    """Build the damage of all tensors of the layer's file; a refusal must name layer and file."""
    return Damage(name, _apply(change_tensors, file, change), (_PLACE, file))


def _exchanged(name: str, file: str, other: str, *place: str) -> Damage:
    """Build the exchange of a file with another layer's; of the two, that of the lower layer is named."""
    return Damage(
        f"{name} exchanged with another layer's", _apply(exchange_files, file, other), (*place, other)
    )


def _broken(name: str, break_file: Callable[..., None], file: str) -> Damage:
    """Build the damage of a file that a refusal must name."""
    return Damage(name, _apply(break_file, file), (file,))


def _with_digests(damage: Damage, *, with_statistics: bool = False) -> Damage:
    """Build the same damage, hidden by new digests or statistics of sites too; a refusal need name nothing."""

    def apply(directory: Path) -> None:
        damage.apply(directory)
        sign(directory, with_statistics=with_statistics)

    kind = "digests and statistics" if with_statistics else "digests"
    return Damage(f"{damage.name}, under {kind} of its own", apply, is_without_twins=damage.is_without_twins)


_zero = torch.zeros_like
_ONE_PERCENT = _scale(1.01)

# These are applied twice: with the old digests, and hidden by new ones.
_SIGNABLE = (
    _of_site("twin of a site zeroed", _TWINS, "moe_delta", _zero),
    _of_file("all twins of a layer zeroed", _TWINS, _zero),
    _exchanged("twins", _TWINS, _OTHER_TWINS, _OTHER_PLACE),
    _of_site("twin cast to int8", _TWINS, "q_proj", lambda tensor: tensor.to(torch.int8)),
    _of_site("twin rounded to bfloat16", _TWINS, "q_proj", lambda tensor: tensor.to(torch.bfloat16)),
    _of_site("NaN in a twin", _TWINS, "attn_delta", _one_nan),
    _of_site("twin of another shape", _TWINS, "v_proj", lambda tensor: tensor[..., :-1]),
    Damage("the golden's own values as a twin", _golden_as_twin, ("moe_delta", _PLACE, _TWINS)),
    _of_site("twin twice as large", _TWINS, "moe_delta", _scale(2.0)),
    _of_file("floor zeroed", _FLOORS, _zero),
    _of_file("floor a thousand times as large", _FLOORS, _scale(1000.0)),
    _exchanged("floors", _FLOORS, _OTHER_FLOORS, _OTHER_PLACE),
    Damage(
        "router's noise a thousand times as large",
        _apply(change_tensor, _FLOORS, "router_noise", _scale(1000.0)),
        ("router", _PLACE, _FLOORS),
    ),
    _of_site("values of a site zeroed", _VALUES, "moe_delta", _zero),
    _of_site("values of a site 1 % larger", _VALUES, "k_proj", _ONE_PERCENT),
    _of_site("NaN in the golden's values", _VALUES, "output", _one_nan, place=(_PLACE,)),
    _of_site(
        "values of a site widened to float32", _VALUES, "post_norm", lambda tensor: tensor.float() * 1.001
    ),
    _of_site("an expert counted twice", _VALUES, "router_experts", _first_expert_twice),
    Damage("logits zeroed", _apply(change_tensor, _MODEL_VALUES, "logits", _zero), ("logits",)),
    _of_site("twin of the logits zeroed", _MODEL_TWINS, "logits", _zero, place=(_MODEL_TWINS,)),
    Damage("floor of the logits zeroed", _apply(change_tensors, _MODEL_FLOORS, _zero), (_MODEL_FLOORS,)),
    Damage(
        "positions shifted",
        _apply(change_tensor, _INPUTS, "position_ids", lambda tensor: tensor + 1),
        (_INPUTS,),
    ),
    Damage("a token less", _apply(change_tensor, _INPUTS, "attention_mask", _one_token_less), (_INPUTS,)),
    *(
        replace(damage, is_without_twins=True)
        for damage in (
            _of_file("floor without twins zeroed", _FLOORS, _zero),
            _of_site(
                "a part of a floor without twins twice as large",
                _FLOORS,
                "moe_delta.error_ordinary",
                _scale(2.0),
            ),
            _of_site("values of a golden without twins 1 % larger", _VALUES, "k_proj", _ONE_PERCENT),
        )
    ),
)

# New digests cannot hide these, or would describe another capture that is whole.
_UNSIGNABLE = (
    _exchanged("values", _VALUES, _OTHER_VALUES),
    _broken("one bit of the values", flip_byte, _VALUES),
    _broken("one bit of the twins", flip_byte, _TWINS),
    _broken("values cut off", cut_file, _VALUES),
    _broken("twins cut off", cut_file, _TWINS),
    _broken("floors cut off", cut_file, _FLOORS),
    _broken("no twins", _delete, _TWINS),
    _broken("no floors", _delete, _FLOORS),
    Damage("a twin left out", _apply(remove_tensor, _TWINS, "moe_delta"), ("moe_delta", _PLACE, _TWINS)),
    Damage(
        "a floor left out", _apply(remove_tensor, _FLOORS, "moe_delta.error"), ("moe_delta", _PLACE, _FLOORS)
    ),
)

_OF_DEVICE_RUN = tuple(
    replace(damage, name=f"device run: {damage.name}", is_of_golden=False)
    for damage in (
        _of_site("a site replaced", _VALUES, "moe_delta", _ONE_PERCENT),
        _of_site("a site zeroed", _VALUES, "q_proj", _zero),
        _broken("one bit", flip_byte, _VALUES),
        _broken("values cut off", cut_file, _VALUES),
        _exchanged("values", _VALUES, _OTHER_VALUES),
        _of_site("logits replaced", _MODEL_VALUES, "logits", _ONE_PERCENT, place=(_MODEL_VALUES,)),
        Damage("a token less", _apply(change_tensor, _INPUTS, "attention_mask", _one_token_less), (_INPUTS,)),
    )
)

DAMAGES = (
    *_SIGNABLE,
    *map(_with_digests, _SIGNABLE),
    *(
        _with_digests(damage, with_statistics=True)
        for damage in _SIGNABLE
        if damage.name in ("values of a site zeroed", "values of a site 1 % larger")
    ),
    *_UNSIGNABLE,
    *_OF_DEVICE_RUN,
)
