from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from minimax_tools.synthetic.checkpoint import synthesize
from minimax_tools.synthetic.toy_model import SyntheticModel

sys.path.append(str(Path(__file__).parent))

from equivalent import CHANGES, rewrite_checkpoint

# Kv heads and experts enough that an exchange of two shows.
SMALL = SyntheticModel(
    num_hidden_layers=2,
    hidden_size=64,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=16,
    rotary_dim=8,
    num_local_experts=8,
    num_experts_per_tok=2,
    intermediate_size=32,
    vocab_size=262,
)
EXACT = [name for name in CHANGES if name.startswith("scale")]
IDS = torch.randint(256, (2, 40), generator=torch.Generator().manual_seed(0))


def written(folder: Path, dtype: torch.dtype) -> Path:
    synthesize(folder, model=SMALL, dtype=dtype, shard_size_bytes=None, seed=0)
    return folder


@pytest.fixture(scope="module")
def bf16(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model") / "bf16", torch.bfloat16)


@pytest.fixture(scope="module")
def float32(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("model") / "float32", torch.float32)


def logits(folder: Path, dtype: torch.dtype) -> torch.Tensor:
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, attn_implementation="sdpa", experts_implementation="grouped_mm"
    ).eval()
    with torch.no_grad():
        found: torch.Tensor = model(IDS).logits
    return found.float()


def rewritten(source: Path, tmp_path: Path, *changes: str) -> Path:
    rewrite_checkpoint(source, tmp_path / "changed", changes=changes, seed=7)
    return tmp_path / "changed"


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_powers_of_two_keep_every_bit(name: str, dtype: torch.dtype, bf16: Path, tmp_path: Path) -> None:
    changed = rewritten(bf16, tmp_path, name)
    assert torch.equal(logits(changed, dtype), logits(bf16, dtype))


@pytest.mark.parametrize("name", sorted(set(CHANGES) - set(EXACT)))
def test_permutation_keeps_logits_up_to_the_order_of_summation(
    name: str, float32: Path, tmp_path: Path
) -> None:
    before = logits(float32, torch.float32)
    after = logits(rewritten(float32, tmp_path, name), torch.float32)
    assert float((after - before).abs().max()) < 1e-4 * float(before.abs().max())


def test_half_a_change_is_none(float32: Path, tmp_path: Path) -> None:
    # A check of the check: the same scales without what undoes them.
    before = logits(float32, torch.float32)
    changed = rewritten(float32, tmp_path, "scale_stream")
    (changed / "config.json").write_text((float32 / "config.json").read_text())
    assert not torch.equal(logits(changed, torch.float32), before)
