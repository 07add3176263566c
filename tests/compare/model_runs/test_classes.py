"""Modules that a device gets in another class than a whole port's run had, in words."""

from __future__ import annotations

from compare.comparer import judge_classes
from minimax_tools.capture.passes import ModelPasses


def test_places_of_a_pair_of_classes_are_named_together() -> None:
    other = {
        "norm": ("Norm", "DeviceNorm"),
        "layers.0.self_attn.q_norm": ("Norm", "RankNorm"),
        "layers.0.input_layernorm": ("Norm", "DeviceNorm"),
        "sampler": ("", "Sampler"),
        "head": ("Linear", ""),
    }
    finding = judge_classes(ModelPasses(num_passes=1, other_classes=other))
    assert finding is not None
    assert (finding.mistake, finding.is_warning) == ("class_of_the_cpu", True)
    assert finding.reason == "; ".join(
        (
            "the device gets DeviceNorm for norm, layers.*.input_layernorm, where this run had Norm: that class is not "
            "judged here",
            "the device gets RankNorm for layers.*.self_attn.q_norm, where this run had Norm: that class is not judged "
            "here",
            "the device gets Sampler for sampler, where this run had none: that class is not judged here",
            "the device has no head, a Linear in this run",
        )
    )


def test_the_number_of_a_layer_alone_is_left_out() -> None:
    other = {"layers.0.experts.layers.0": ("Norm", "DeviceNorm")}
    finding = judge_classes(ModelPasses(num_passes=1, other_classes=other))
    assert finding is not None
    assert "for layers.*.experts.layers.0," in finding.reason


def test_nothing_is_said_without_a_difference_or_where_nobody_looked() -> None:
    assert judge_classes(ModelPasses(num_passes=1, other_classes={})) is None
    assert judge_classes(ModelPasses(num_passes=1)) is None


def test_six_modules_of_a_class_are_named() -> None:
    other = {f"norm_{number}": ("Norm", "DeviceNorm") for number in range(7)}
    finding = judge_classes(ModelPasses(num_passes=1, other_classes=other))
    assert finding is not None
    assert "norm_5" in finding.reason
    assert "norm_6" not in finding.reason
