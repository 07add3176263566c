"""Caches of vLLM Neuron, read as a capture."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from compare.cli import main as mm2_compare
from minimax_tools.capture.reader import Capture
from minimax_tools.dumps.cache_capture import CacheCapture
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.opening import DumpReading, open_source
from minimax_tools.errors import CaptureError, IncomparableError, UsageError
from minimax_tools.model.sites import Site

Pair = tuple[torch.Tensor, torch.Tensor]
Change = Callable[[int, Pair], Any]


def unchanged(_: int, pair: Pair) -> Pair:
    return pair


def write_caches(
    directory: Path,
    golden: Path,
    change: Change = unchanged,
    *,
    prompts: tuple[int, ...] = (0, 1),
    num_more: int = 0,
    name: str = "layers.{layer}.self_attn",
) -> Path:
    """The golden's keys and values, with rows of tokens fed behind the prompts, as `change` returns a layer's pair."""
    source = Capture.open(golden)
    mask = source.read_attention_mask().bool()
    for prompt in prompts:
        caches = {}
        for layer in source.layers:
            keys = source.read(layer, Site.K_ROPE)[prompt][:, mask[prompt]]
            values = source.read(layer, Site.V_PROJ)[prompt, mask[prompt]]
            values = values.unflatten(-1, (len(keys), -1)).transpose(0, 1)
            more = keys.new_full((len(keys), num_more, keys.shape[-1]), 7)
            pair = tuple(torch.cat((half, more), dim=1)[None] for half in (keys, values))
            caches[name.format(layer=layer)] = change(layer, pair)
        folder = directory / "prompt_analysis" / f"prompt_{prompt}" / "kv_analysis"
        folder.mkdir(parents=True)
        torch.save(caches, folder / "vllm_kv.pt")
    return directory


@pytest.mark.parametrize("num_more", [0, 3])
def test_caches_are_read_as_sites_in_the_goldens_padding(golden: Path, tmp_path: Path, num_more: int) -> None:
    source = Capture.open(golden)
    real = source.read_attention_mask().bool()
    dump = open_source(write_caches(tmp_path, golden, num_more=num_more)).laid_out_as(source)
    assert isinstance(dump, CacheCapture)
    assert dump.layers == source.layers
    assert dump.sites(2) == (Site.V_PROJ, Site.K_ROPE)
    assert torch.equal(dump.read(2, Site.V_PROJ)[real], source.read(2, Site.V_PROJ)[real])
    keys, golden_keys = (side.read(2, Site.K_ROPE).transpose(1, 2) for side in (dump, source))
    assert torch.equal(keys[real], golden_keys[real])
    assert not keys[~real].any()


def test_folder_may_be_named_at_any_depth(golden: Path, tmp_path: Path) -> None:
    write_caches(tmp_path, golden, prompts=(0,))
    for folder in ("", "prompt_analysis", "prompt_analysis/prompt_0", "prompt_analysis/prompt_0/kv_analysis"):
        assert open_source(tmp_path / folder).layers == (0, 1, 2, 3)


def test_prompts_are_in_the_order_of_their_numbers(golden: Path, tmp_path: Path) -> None:
    write_caches(tmp_path, golden)
    prompts = tmp_path / "prompt_analysis"
    (prompts / "prompt_1").rename(prompts / "prompt_10")
    (prompts / "prompt_0").rename(prompts / "prompt_2")
    mask = open_source(tmp_path).read_attention_mask()
    assert mask is not None
    assert mask.sum(dim=1).tolist() == [48, 33]


def judge(golden: Path, dump: Path, command: Any) -> dict[tuple[int, str], dict[str, Any]]:
    """Compare, and return the results by layer and site; nothing but keys and values is held, so it is no pass."""
    compared = command(mm2_compare, "--golden", golden, "--run", dump, "--json")
    record = json.loads(compared.stdout)
    assert (compared.exit_code, record["verdict"]) == (3, "incomparable")
    return {(result["layer"], result["site"]): result for result in record["sites"]}


def test_right_caches_pass_site_by_site(golden: Path, tmp_path: Path, command: Any) -> None:
    results = judge(golden, write_caches(tmp_path, golden), command)
    for layer in range(4):
        assert {results[layer, site]["status"] for site in ("k_rope", "v_proj")} == {"pass"}


def test_wrong_keys_are_told_from_right_values(golden: Path, tmp_path: Path, command: Any) -> None:
    def enlarge(layer: int, pair: Pair) -> Pair:
        keys, values = pair
        return (keys * 1.05 if layer == 2 else keys), values

    results = judge(golden, write_caches(tmp_path, golden, enlarge), command)
    assert results[2, "v_proj"]["status"] == results[1, "k_rope"]["status"] == "pass"
    # A port that shows no input of its layers may have inherited the error.
    assert results[2, "k_rope"]["status"] == "not judged"
    assert "norm ×1.05; its inputs are not held" in results[2, "k_rope"]["reason"]


def test_cache_of_other_prompts_or_fewer_tokens_is_refused(golden: Path, tmp_path: Path) -> None:
    source = Capture.open(golden)
    one_prompt = open_source(write_caches(tmp_path / "one", golden, prompts=(0,)))
    with pytest.raises(IncomparableError, match=r"of other prompts than .* the caches of 2 prompts, found 1"):
        one_prompt.laid_out_as(source)
    short = write_caches(tmp_path / "short", golden, lambda _, pair: tuple(half[:, :, :20] for half in pair))
    with pytest.raises(IncomparableError, match=r"holds fewer tokens than .* expected 48 or more, found 20"):
        open_source(short).laid_out_as(source)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _, pair: pair[0], "is no pair of keys and values"),
        (lambda _, pair: (pair[0], pair[1][:, :1]), "is no pair of keys and values"),
        (lambda _, pair: (pair[0][0], pair[1][0]), "is no pair of keys and values"),
        (
            lambda _, pair: tuple(half.to(torch.float8_e4m3fn) for half in pair),
            "is quantised, and its scales",
        ),
        (lambda layer, pair: tuple(half[:, :, : 9 + layer] for half in pair), "4 layers of 4 lengths"),
    ],
)
def test_what_is_no_cache_is_refused(change: Change, message: str, golden: Path, tmp_path: Path) -> None:
    write_caches(tmp_path, golden, change)
    with pytest.raises(CaptureError, match=message):
        open_source(tmp_path)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"layers.3.self_attn": lambda _: None}, "is of other layers or heads than .* 4 layers .*, found 3"),
        (
            {"layers.2.self_attn": lambda pair: tuple(half[:, :1] for half in pair)},
            r"than .*: expected 4 layers of 2 heads of \d+, found .* or 1 heads of",
        ),
        # Such as a draft model's beside the target's.
        (
            {"draft.layers.0.self_attn": lambda pair: pair},
            r"holds two caches of layer 0: found draft\.layers",
        ),
    ],
    ids=["layers", "heads", "two caches"],
)
def test_second_prompt_of_other_caches_is_refused(
    changed: dict[str, Callable[[Pair], Any]], message: str, golden: Path, tmp_path: Path
) -> None:
    write_caches(tmp_path, golden)
    path = tmp_path / "prompt_analysis/prompt_1/kv_analysis/vllm_kv.pt"
    caches = torch.load(path, weights_only=True)
    for name, change in changed.items():
        caches[name] = change(caches[name.removeprefix("draft.")])
    torch.save({name: pair for name, pair in caches.items() if pair is not None}, path)
    with pytest.raises(CaptureError, match=message):
        open_source(tmp_path)


def test_caches_take_no_map(golden: Path, tmp_path: Path) -> None:
    write_caches(tmp_path, golden)
    (tmp_path / "map.yaml").write_text("padding: right")
    reading = DumpReading(names=NameMap.read(tmp_path / "map.yaml"))
    with pytest.raises(UsageError, match="caches: it takes no format and no map"):
        open_source(tmp_path, reading)
