from __future__ import annotations

from pathlib import Path

import pytest

from minimax_tools.dumps import name_map
from minimax_tools.dumps.name_map import NameMap
from minimax_tools.dumps.piece import SitePlace
from minimax_tools.errors import UsageError
from minimax_tools.model.sites import ModelSite, Site


def read(folder: Path, text: str) -> NameMap:
    (folder / "map.yaml").write_text(text)
    return NameMap.read(folder / "map.yaml")


def test_everything_that_the_docstring_shows_is_read(tmp_path: Path) -> None:
    shown = (name_map.__doc__ or "").split("\n\n", 1)[1]
    lines = [line for line in shown.splitlines() if "attention_mask" not in line]
    names = read(tmp_path, "\n".join(line.removeprefix("    ") for line in lines))
    assert (names.format, names.num_ranks, names.lengths) == ("msprobe", 2, (48, 33))
    assert (names.padding, names.is_packed, names.steps) == ("right", False, (("0",),))
    assert names.sites[Site.Q_ROPE].transpose == (0, 2, 1, 3)
    assert names.sites[Site.OUTPUT].terms == (
        SitePlace.read("layers.{layer}:output[0]"),
        SitePlace.read("layers.{layer}:output[1]"),
    )
    assert names.sites[ModelSite.LOGITS].terms == (SitePlace(path="lm_head"),)


def test_mask_lies_beside_the_map(tmp_path: Path) -> None:
    assert read(tmp_path, "attention_mask: masks/mask.pt").attention_mask == tmp_path / "masks" / "mask.pt"


def test_passes_that_follow_are_an_inner_list(tmp_path: Path) -> None:
    assert read(tmp_path, "steps: [1, [2, 3]]").steps == (("1",), ("2", "3"))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- 1", "is no map: expected keys and values"),
        ("rank: 2", "has keys that no map has: found rank. The keys are: format, ranks"),
        ("ranks: 0", "ranks is wrong: expected a whole number from 1, found 0"),
        ("lengths: 48", r"lengths is wrong: expected a list of whole numbers from 1, such as \[48, 33\]"),
        ("padding: up", "padding is wrong: expected right or left, found 'up'"),
        (
            "format: onnx",
            "format is wrong: expected nxdi or vllm-neuron or msprobe or sglang or transformers",
        ),
        ("steps: 1", "steps is wrong: expected a list of labels"),
        ("usual_names: 1", "usual_names is wrong: expected true or false"),
        ("attention_mask: [1]", "attention_mask is wrong: expected a file's name"),
        ("sites: [q_proj]", "sites is wrong: expected sites and where they lie"),
        ("sites: {q: a}", "'q' is no site: expected one of input, input_norm"),
        ("sites: {q_proj: 1}", "sites.q_proj is wrong: expected a place"),
        ("sites: {q_proj: {from: a, sum: [b]}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: {from: a, transpose: [0, 2]}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: 'a:b'}", "sites.q_proj: the place 'a:b' cannot be read: expected 'layers"),
        ("lengths: [1]\nattention_mask: m.pt", "gives lengths and attention_mask"),
        ("ranks: 2\nranks: 4", "names 'ranks' twice: found the second in line 2"),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        read(tmp_path, text)
    assert str(tmp_path / "map.yaml") in str(raised.value)
