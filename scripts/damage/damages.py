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


def _damage_of_site(name: str, file: str, tensor: str, change: Change) -> Damage:
    """Build the damage of one tensor of the layer; a refusal must name site, layer and file."""
    return Damage(name, _apply(change_tensor, file, tensor, change), (tensor.partition(".")[0], _PLACE, file))


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
    _damage_of_site("twin of a site zeroed", _TWINS, "moe_delta", _zero),
    Damage("all twins of a layer zeroed", _apply(change_tensors, _TWINS, _zero), (_PLACE, _TWINS)),
    Damage(
        "twins exchanged with another layer's",
        _apply(exchange_files, _TWINS, _OTHER_TWINS),
        (_OTHER_PLACE, _OTHER_TWINS),
    ),
    _damage_of_site("twin cast to int8", _TWINS, "q_proj", lambda tensor: tensor.to(torch.int8)),
    _damage_of_site("twin rounded to bfloat16", _TWINS, "q_proj", lambda tensor: tensor.to(torch.bfloat16)),
    _damage_of_site("NaN in a twin", _TWINS, "attn_delta", _one_nan),
    _damage_of_site("twin of another shape", _TWINS, "v_proj", lambda tensor: tensor[..., :-1]),
    Damage("the golden's own values as a twin", _golden_as_twin, ("moe_delta", _PLACE, _TWINS)),
    _damage_of_site("twin twice as large", _TWINS, "moe_delta", _scale(2.0)),
    Damage("floor zeroed", _apply(change_tensors, _FLOORS, _zero), (_PLACE, _FLOORS)),
    Damage(
        "floor a thousand times as large", _apply(change_tensors, _FLOORS, _scale(1000.0)), (_PLACE, _FLOORS)
    ),
    Damage(
        "floors exchanged with another layer's",
        _apply(exchange_files, _FLOORS, _OTHER_FLOORS),
        (_OTHER_PLACE, _OTHER_FLOORS),
    ),
    Damage(
        "router's noise a thousand times as large",
        _apply(change_tensor, _FLOORS, "router_noise", _scale(1000.0)),
        ("router", _PLACE, _FLOORS),
    ),
    _damage_of_site("values of a site zeroed", _VALUES, "moe_delta", _zero),
    _damage_of_site("values of a site 1 % larger", _VALUES, "k_proj", _ONE_PERCENT),
    Damage(
        "NaN in the golden's values", _apply(change_tensor, _VALUES, "output", _one_nan), ("output", _PLACE)
    ),
    _damage_of_site(
        "values of a site widened to float32", _VALUES, "post_norm", lambda tensor: tensor.float() * 1.001
    ),
    _damage_of_site("an expert counted twice", _VALUES, "router_experts", _first_expert_twice),
    Damage("logits zeroed", _apply(change_tensor, _MODEL_VALUES, "logits", _zero), ("logits",)),
    Damage(
        "twin of the logits zeroed",
        _apply(change_tensor, _MODEL_TWINS, "logits", _zero),
        ("logits", _MODEL_TWINS),
    ),
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
            Damage("floor without twins zeroed", _apply(change_tensors, _FLOORS, _zero), (_PLACE, _FLOORS)),
            _damage_of_site(
                "a part of a floor without twins twice as large",
                _FLOORS,
                "moe_delta.error_ordinary",
                _scale(2.0),
            ),
            _damage_of_site("values of a golden without twins 1 % larger", _VALUES, "k_proj", _ONE_PERCENT),
        )
    ),
)

# New digests cannot hide these, or would describe another capture that is whole.
_UNSIGNABLE = (
    Damage(
        "values exchanged with another layer's",
        _apply(exchange_files, _VALUES, _OTHER_VALUES),
        (_OTHER_VALUES,),
    ),
    Damage("one bit of the values", _apply(flip_byte, _VALUES), (_VALUES,)),
    Damage("one bit of the twins", _apply(flip_byte, _TWINS), (_TWINS,)),
    Damage("values cut off", _apply(cut_file, _VALUES), (_VALUES,)),
    Damage("twins cut off", _apply(cut_file, _TWINS), (_TWINS,)),
    Damage("floors cut off", _apply(cut_file, _FLOORS), (_FLOORS,)),
    Damage("no twins", _apply(_delete, _TWINS), (_TWINS,)),
    Damage("no floors", _apply(_delete, _FLOORS), (_FLOORS,)),
    Damage("a twin left out", _apply(remove_tensor, _TWINS, "moe_delta"), ("moe_delta", _PLACE, _TWINS)),
    Damage(
        "a floor left out", _apply(remove_tensor, _FLOORS, "moe_delta.error"), ("moe_delta", _PLACE, _FLOORS)
    ),
)

_OF_DEVICE_RUN = tuple(
    replace(damage, name=f"device run: {damage.name}", is_of_golden=False)
    for damage in (
        _damage_of_site("a site replaced", _VALUES, "moe_delta", _ONE_PERCENT),
        _damage_of_site("a site zeroed", _VALUES, "q_proj", _zero),
        Damage("one bit", _apply(flip_byte, _VALUES), (_VALUES,)),
        Damage("values cut off", _apply(cut_file, _VALUES), (_VALUES,)),
        Damage(
            "values exchanged with another layer's",
            _apply(exchange_files, _VALUES, _OTHER_VALUES),
            (_OTHER_VALUES,),
        ),
        Damage(
            "logits replaced",
            _apply(change_tensor, _MODEL_VALUES, "logits", _ONE_PERCENT),
            ("logits", _MODEL_VALUES),
        ),
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
