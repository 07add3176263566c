"""Rivals: rules by which other tools call two tensors different, as these tools publish them.

A rule takes the real tokens of one site, all float64 [T,F]: golden, port, and the golden's float32 twin. It returns
True if the tool would report a difference. `not x <= limit` counts NaN as a difference, where `x > limit` would not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from compare.limits.criteria import ClassicLimits
from compare.limits.tolerances import DEFAULT_ATOL, DEFAULT_RTOL
from compare.sides.sides import Batch
from minimax_tools.capture.reader import Capture
from minimax_tools.metrics.pair_metrics import compare_tensors
from minimax_tools.model.sites import Site

Rule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], bool]

# The tools would compare expert numbers as if they were quantities.
_LEFT_OUT = (Site.INPUT, Site.ROUTER_EXPERTS)


def seeds(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply the five limits of the scripts that came before mm2, the seeds: of differences and correlations."""
    metrics = compare_tensors(golden, port, rtol=DEFAULT_RTOL, atol=DEFAULT_ATOL)
    return bool(ClassicLimits().failures(metrics))


def msprobe(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply Ascend msprobe's "Accuracy Reached or Not".

    No where cosine < 0.99 and MaxAbsErr > 0.001, where cosine < 0.9, or where MaxAbsErr > 1
    (Ascend/mstt, msprobe core/compare, CompareConst; and its documentation of the comparison's result).
    """
    cosine, largest = _cosine(golden, port), float((golden - port).abs().max())
    return not ((cosine >= 0.99 or largest <= 0.001) and cosine >= 0.9 and largest <= 1)


def msprobe_both(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply both acceptable values of msprobe: cosine > 0.99 and MaxAbsErr < 0.001 (its documentation)."""
    return not (_cosine(golden, port) > 0.99 and float((golden - port).abs().max()) < 0.001)


def polygraphy(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply Polygraphy's CompareFunc.simple: some element differs by more than atol 1e-5 and by more than rtol 1e-5.

    NVIDIA/TensorRT, tools/Polygraphy, comparator/compare.py: defaults of `--atol` and `--rtol`, checked elementwise.
    """
    difference = (golden - port).abs()
    is_close = (difference <= 1e-5) | (difference <= 1e-5 * golden.abs())
    return not bool(is_close.all())


def sglang(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply SGLang's comparator: rel_diff = 1 − 2⟨x,y⟩ / (‖x‖² + ‖y‖²) above 1e-3.

    sgl-project/sglang, debug_utils/comparator, after DeepGEMM's calc_diff.
    """
    total = float((golden.square() + port.square()).sum())
    difference = 1 - 2 * float((golden * port).sum()) / total if total else 0.0
    return not difference <= 1e-3


def vllm_neuron(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply vLLM-Neuron's comparison: ‖port − float32‖ over ‖BF16 − float32‖ of 6 or more, its limit for MoE models.

    vllm-project/vllm-neuron, examples/vllm_neuron/accuracy: `max_l2_ratio=6.0` for MoE, 3 for others; < 1.5 passes.
    """
    return _l2_ratio_reaches(6.0, golden, port, twin)


def vllm_neuron_dense(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply vLLM-Neuron's comparison with 3, its limit for models without experts."""
    return _l2_ratio_reaches(3.0, golden, port, twin)


def tenstorrent(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply tt-metal's comp_pcc: Pearson's correlation below 0.99, NaN and Inf taken as zero.

    One side alone all NaN, or all zero, fails too.
    tenstorrent/tt-metal, models/common/utility_functions.py.
    """
    if bool(golden.isnan().all()) != bool(port.isnan().all()) or bool(golden.any()) != bool(port.any()):
        return True
    x, y = (torch.where(side.isfinite(), side, 0.0).flatten() for side in (golden, port))
    if torch.equal(x, y):
        return False
    return not _cosine(x - x.mean(), y - y.mean()) >= 0.99


def aws_equivalence(golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Apply AWS's Equivalence rule for ports to Trainium: R above 1.2, one threshold for every component.

    R = ‖port16 − ref32‖_F / (‖ref16 − ref32‖_F + 1e-12); below 1 the port is better than the BF16 reference.
    """
    ratio = float((port - twin).norm()) / (float((golden - twin).norm()) + 1e-12)
    return not ratio <= 1.2


# Rules by name, with which the names of their figures begin.
RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        seeds, msprobe, msprobe_both, polygraphy, sglang,
        vllm_neuron, vllm_neuron_dense, tenstorrent, aws_equivalence,
    )
}  # fmt: skip


def find_differences(golden: Capture, capture: Capture, layer: int) -> Mapping[str, tuple[str, ...]]:
    """Find the sites of a layer that each rule calls different; another shape is different for all rules."""
    batch = Batch.of(golden, capture)
    found: dict[str, list[str]] = {rule: [] for rule in RULES}
    for site in golden.graph.layer(layer).sites:
        if site in _LEFT_OUT or site not in capture.sites(layer):
            continue
        reference, target = golden.read(layer, site), capture.read(layer, site)
        twin = golden.read_twin(layer, site)
        assert twin is not None, "the golden's floor is kept whole"
        if reference.numel() != target.numel():
            for sites in found.values():
                sites.append(str(site))
            continue
        rows = [batch.rows(tensor, site).double() for tensor in (reference, target, twin)]
        if site is Site.ROUTER_WEIGHTS:
            # A port may list a token's experts in any order: no tool is blamed for this difference.
            rows = [row.sort(dim=-1).values for row in rows]
        for name, rule in RULES.items():
            if rule(*rows):
                found[name].append(str(site))
    return {name: tuple(sites) for name, sites in found.items()}


def _cosine(x: torch.Tensor, y: torch.Tensor) -> float:
    """Compute the cosine; if a side is all zero, 1 if both are, else 0."""
    norms = float(x.norm()) * float(y.norm())
    if norms == 0.0:
        return 1.0 if torch.equal(x, y) else 0.0
    return float((x * y).sum()) / norms


def _l2_ratio_reaches(limit: float, golden: torch.Tensor, port: torch.Tensor, twin: torch.Tensor) -> bool:
    """Decide whether the port's distance from the twin is `limit` times the golden's or more, or not 0 beside 0."""
    error, floor = float((port - twin).norm()), float((golden - twin).norm())
    return not error < limit * floor if floor else error != 0.0
