"""A golden that no longer agrees with itself is refused, whatever digests it was given."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

sys.path.insert(0, str(Path(__file__).parents[3] / "scripts"))
from damage.tampering import change_tensor, sign

from compare.chains.chain_judge import ChainJudge
from compare.limits.criteria import Criteria
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from minimax_tools.capture.reader import Capture
from minimax_tools.errors import CaptureError
from minimax_tools.model.run import multi_layer_run, single_layer_run
from minimax_tools.model.sites import Site
from minimax_tools.model.span import Span
from minimax_tools.results.results import Comparison, Verdict

Judge = Callable[..., Comparison]
FLOOR = "layer_1.floor.safetensors"
# Both sides hold the layer that is looked at, and no other.
Q_PROJ = ["q_proj.error", "q_proj.error_ordinary", "q_proj.error_massive"]
RUN = single_layer_run(1, sites_level="all")
GOLDEN = multi_layer_run(Span.single(1), sites_level="all")


def tampered(golden: Path, file: str, name: str, how: Callable[[torch.Tensor], torch.Tensor]) -> Path:
    change_tensor(golden, file, name, how)
    sign(golden, with_statistics=True)
    return golden


def test_golden_that_agrees_with_itself_is_taken(copyist: Any, judge: Judge) -> None:
    run = copyist.device_run(run=RUN)
    for noise_floor in ("full", "stats", "off"):
        golden = copyist.golden(run=GOLDEN, noise_floor=noise_floor, name=noise_floor)
        assert judge(run, reference=golden).verdict is Verdict.PASS


@pytest.mark.parametrize("noise_floor", ["full", "stats"])
def test_variant_whose_parts_do_not_add_up_is_refused(copyist: Any, judge: Judge, noise_floor: str) -> None:
    def describe(description: Any) -> Any:
        return replace(description, floor_variants=("eager",))

    golden = copyist.golden(run=GOLDEN, noise_floor=noise_floor, describe=describe)
    for path in golden.glob("layer_*.floor.safetensors"):
        own = {name: tensor.clone() for name, tensor in load_file(path).items()}
        path.unlink()
        save_file(own | {f"eager/{name}": tensor.clone() for name, tensor in own.items()}, path)
    sign(golden)
    run = copyist.device_run(run=RUN)
    assert judge(run, reference=golden).verdict is Verdict.PASS
    tampered(golden, FLOOR, "eager/moe_delta.error_ordinary", lambda error: error * 1000)
    words = r"of variant eager do not add up to moe_delta\.error at moe_delta"
    with pytest.raises(CaptureError, match=words):
        judge(run, reference=golden)


@pytest.mark.parametrize(
    ("file", "names", "how", "words"),
    [
        (FLOOR, Q_PROJ, torch.zeros_like, "says that BF16 cost nothing at q_proj of layer 1"),
        (FLOOR, ["router_noise"], torch.zeros_like, "another noise on the router's scores of layer 1"),
        (
            FLOOR,
            ["router_noise"],
            lambda noise: 1000 * noise,
            "another noise on the router's scores of layer",
        ),
        (
            "layer_1.safetensors",
            ["router_experts"],
            lambda experts: (experts + 1) % 32,
            "router_experts of layer 1 .* do not follow from its logits",
        ),
    ],
)
def test_golden_that_disagrees_with_itself_is_refused(
    copyist: Any, judge: Judge, file: str, names: list[str], how: Any, words: str
) -> None:
    golden = copyist.golden(run=GOLDEN, noise_floor="stats" if names is Q_PROJ else "full")
    for name in names:
        tampered(golden, file, name, how)
    with pytest.raises(CaptureError, match=words):
        judge(copyist.device_run(run=RUN), reference=golden)


def test_chain_is_not_judged_by_a_floor_that_is_not_the_goldens(copyist: Any) -> None:
    golden = copyist.golden()
    output = Capture.open(golden).read(2, Site.OUTPUT).clone()
    for part in ("error", "error_ordinary", "error_massive"):
        tampered(golden, FLOOR, f"output.{part}", lambda error: error * 1000)
    criteria = Criteria(name="noise", rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    with pytest.raises(CaptureError, match=r"output of layer 1 and its float32 twin are not as far apart"):
        ChainJudge(Capture.open(golden), criteria=criteria).judge(Span(1, 3), output)
