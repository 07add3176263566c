"""Damages: the ways in which a golden, or a device run, is damaged before it is judged."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from damage.tampering import (
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Damage:
    """One way to damage a capture.

    Args:
        name: What is done, in words.
        apply: Does it to a capture directory.
        named: What a refusal must name, beside the capture.
        of_golden: Whether the golden is damaged; else the device run.
        in_stats: Whether a golden is damaged that kept the floor's distances alone, without twins.
        is_provable_when_old: Whether it shows without digests of twins and floors.
    """

    name: str
    apply: Callable[[Path], None]
    named: tuple[str, ...] = ()
    of_golden: bool = True
    in_stats: bool = False
    is_provable_when_old: bool = True


def _zero(tensor: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(tensor)


def _scale(factor: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: (tensor.float() * factor).to(tensor.dtype)


def _one_nan(tensor: torch.Tensor) -> torch.Tensor:
    tensor[0, 0, 0] = torch.nan
    return tensor


def _to(dtype: torch.dtype) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda tensor: tensor.to(dtype)


def _shifted(tensor: torch.Tensor) -> torch.Tensor:
    return tensor + 1


def _first_expert_twice(tensor: torch.Tensor) -> torch.Tensor:
    tensor[..., 0] = tensor[..., 1]
    return tensor


def _one_token_less(mask: torch.Tensor) -> torch.Tensor:
    mask[0, 0] = 0
    return mask


def _golden_as_twin(directory: Path) -> None:
    from safetensors.torch import load_file

    values = load_file(directory / _VALUES)["moe_delta"].float().clone()
    change_tensor(directory, _TWINS, "moe_delta", lambda _: values)


def _then_signed(apply: Callable[[Path], None], *, with_statistics: bool = False) -> Callable[[Path], None]:
    def both(directory: Path) -> None:
        apply(directory)
        sign(directory, with_statistics=with_statistics)

    return both


def _change(file: str, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    return lambda directory: change_tensor(directory, file, name, how)


def _both(file: str, other: str) -> Callable[[Path], None]:
    return lambda directory: exchange_files(directory, file, other)


_PLACE = f"of layer {LAYER}"

# What may be done with new digests, and without.
_SIGNABLE = (
    Damage(
        name="twin of a site zeroed",
        apply=_change(_TWINS, "moe_delta", _zero),
        named=("moe_delta", _PLACE, _TWINS),
    ),
    Damage(
        name="all twins of a layer zeroed",
        apply=lambda directory: change_tensors(directory, _TWINS, _zero),
        named=(_PLACE, _TWINS),
    ),
    Damage(
        name="twins exchanged with another layer's",
        apply=_both(_TWINS, _OTHER_TWINS),
        named=("of layer 0", _OTHER_TWINS),
    ),
    Damage(
        name="twin cast to int8",
        apply=_change(_TWINS, "q_proj", _to(torch.int8)),
        named=("q_proj", _PLACE, _TWINS),
    ),
    Damage(
        name="twin rounded to bfloat16",
        apply=_change(_TWINS, "q_proj", _to(torch.bfloat16)),
        named=("q_proj", _PLACE, _TWINS),
    ),
    Damage(
        name="NaN in a twin",
        apply=_change(_TWINS, "attn_delta", _one_nan),
        named=("attn_delta", _PLACE, _TWINS),
    ),
    Damage(
        name="twin of another shape",
        apply=_change(_TWINS, "v_proj", lambda tensor: tensor[..., :-1]),
        named=("v_proj", _PLACE, _TWINS),
    ),
    Damage(
        name="the golden's own values as a twin", apply=_golden_as_twin, named=("moe_delta", _PLACE, _TWINS)
    ),
    Damage(
        name="twin twice as large",
        apply=_change(_TWINS, "moe_delta", _scale(2.0)),
        named=("moe_delta", _PLACE, _TWINS),
    ),
    Damage(
        name="floor zeroed",
        apply=lambda directory: change_tensors(directory, _FLOORS, _zero),
        named=(_PLACE, _FLOORS),
    ),
    Damage(
        name="floor a thousand times as large",
        apply=lambda directory: change_tensors(directory, _FLOORS, _scale(1000.0)),
        named=(_PLACE, _FLOORS),
    ),
    Damage(
        name="floors exchanged with another layer's",
        apply=_both(_FLOORS, _OTHER_FLOORS),
        named=("of layer 0", _OTHER_FLOORS),
    ),
    Damage(
        name="router's noise a thousand times as large",
        apply=_change(_FLOORS, "router_noise", _scale(1000.0)),
        named=("router", _PLACE, _FLOORS),
    ),
    Damage(
        name="values of a site zeroed",
        apply=_change(_VALUES, "moe_delta", _zero),
        named=("moe_delta", _PLACE, _VALUES),
    ),
    Damage(
        name="values of a site 1 % larger",
        apply=_change(_VALUES, "k_proj", _scale(1.01)),
        named=("k_proj", _PLACE, _VALUES),
    ),
    Damage(
        name="NaN in the golden's values",
        apply=_change(_VALUES, "output", _one_nan),
        named=("output", _PLACE),
    ),
    Damage(
        name="values of a site widened to float32",
        apply=_change(_VALUES, "post_norm", lambda tensor: tensor.float() * 1.001),
        named=("post_norm", _PLACE, _VALUES),
    ),
    Damage(
        name="an expert counted twice",
        apply=_change(_VALUES, "router_experts", _first_expert_twice),
        named=("router_experts", _PLACE, _VALUES),
    ),
    Damage(name="logits zeroed", apply=_change("model.safetensors", "logits", _zero), named=("logits",)),
    Damage(
        name="twin of the logits zeroed",
        apply=_change("model.fp32.safetensors", "logits", _zero),
        named=("logits", "model.fp32.safetensors"),
    ),
    Damage(
        name="floor of the logits zeroed",
        apply=lambda directory: change_tensors(directory, "model.floor.safetensors", _zero),
        named=("model.floor.safetensors",),
    ),
    Damage(
        name="positions shifted",
        apply=_change("inputs.safetensors", "position_ids", _shifted),
        named=("inputs.safetensors",),
    ),
    Damage(
        name="a token less",
        apply=_change("inputs.safetensors", "attention_mask", _one_token_less),
        named=("inputs.safetensors",),
    ),
    Damage(
        name="floor without twins zeroed",
        apply=lambda directory: change_tensors(directory, _FLOORS, _zero),
        named=(_PLACE, _FLOORS),
        in_stats=True,
    ),
    Damage(
        name="a part of a floor without twins twice as large",
        apply=_change(_FLOORS, "moe_delta.error_ordinary", _scale(2.0)),
        named=("moe_delta", _PLACE, _FLOORS),
        in_stats=True,
    ),
    Damage(
        name="values of a golden without twins 1 % larger",
        apply=_change(_VALUES, "k_proj", _scale(1.01)),
        named=("k_proj", _PLACE, _VALUES),
        in_stats=True,
    ),
)

# What no new digest can hide, or would be another capture with one.
_UNSIGNABLE = (
    Damage(
        name="values exchanged with another layer's",
        apply=_both(_VALUES, _OTHER_VALUES),
        named=(_OTHER_VALUES,),
    ),
    Damage(
        name="one bit of the values", apply=lambda directory: flip_byte(directory, _VALUES), named=(_VALUES,)
    ),
    Damage(
        name="one bit of the twins",
        apply=lambda directory: flip_byte(directory, _TWINS),
        named=(_TWINS,),
        # Less than the distances are known by.
        is_provable_when_old=False,
    ),
    Damage(name="values cut off", apply=lambda directory: cut_file(directory, _VALUES), named=(_VALUES,)),
    Damage(name="twins cut off", apply=lambda directory: cut_file(directory, _TWINS), named=(_TWINS,)),
    Damage(name="floors cut off", apply=lambda directory: cut_file(directory, _FLOORS), named=(_FLOORS,)),
    Damage(name="no twins", apply=lambda directory: (directory / _TWINS).unlink(), named=(_TWINS,)),
    Damage(name="no floors", apply=lambda directory: (directory / _FLOORS).unlink(), named=(_FLOORS,)),
    Damage(
        name="a twin left out",
        apply=lambda directory: remove_tensor(directory, _TWINS, "moe_delta"),
        named=("moe_delta", _PLACE, _TWINS),
    ),
    Damage(
        name="a floor left out",
        apply=lambda directory: remove_tensor(directory, _FLOORS, "moe_delta.error"),
        named=("moe_delta", _PLACE, _FLOORS),
    ),
)

_OF_DEVICE_RUN = tuple(
    Damage(name=f"device run: {name}", apply=apply, named=named, of_golden=False)
    for name, apply, named in (
        ("a site replaced", _change(_VALUES, "moe_delta", _scale(1.01)), ("moe_delta", _PLACE, _VALUES)),
        ("a site zeroed", _change(_VALUES, "q_proj", _zero), ("q_proj", _PLACE, _VALUES)),
        ("one bit", lambda directory: flip_byte(directory, _VALUES), (_VALUES,)),
        ("values cut off", lambda directory: cut_file(directory, _VALUES), (_VALUES,)),
        ("values exchanged with another layer's", _both(_VALUES, _OTHER_VALUES), (_OTHER_VALUES,)),
        (
            "logits replaced",
            _change("model.safetensors", "logits", _scale(1.01)),
            ("logits", "model.safetensors"),
        ),
        (
            "a token less",
            _change("inputs.safetensors", "attention_mask", _one_token_less),
            ("inputs.safetensors",),
        ),
    )
)


def _signed(damage: Damage) -> Damage:
    return Damage(
        name=f"{damage.name}, under digests of its own",
        apply=_then_signed(damage.apply),
        named=(),
        in_stats=damage.in_stats,
    )


DAMAGES = (
    *_SIGNABLE,
    *(_signed(damage) for damage in _SIGNABLE),
    *(
        Damage(
            name=f"{damage.name}, under digests and statistics of its own",
            apply=_then_signed(damage.apply, with_statistics=True),
        )
        for damage in _SIGNABLE
        if damage.name in ("values of a site zeroed", "values of a site 1 % larger")
    ),
    *_UNSIGNABLE,
    *_OF_DEVICE_RUN,
)
