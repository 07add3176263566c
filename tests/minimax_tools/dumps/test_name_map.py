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
        SitePlace.parse("layers.{layer}:output[0]"),
        SitePlace.parse("layers.{layer}:output[1]"),
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
        ("ranks: true", "ranks is wrong"),
        ("lengths: 48", r"lengths is wrong: expected a list of whole numbers from 1, such as \[48, 33\]"),
        ("lengths: [48, 0]", "lengths is wrong"),
        ("padding: up", "padding is wrong: expected right or left, found 'up'"),
        ("rows: flat", "rows is wrong: expected padded or packed"),
        (
            "format: onnx",
            "format is wrong: expected nxdi or vllm-neuron or msprobe or sglang or transformers",
        ),
        ("steps: 1", "steps is wrong: expected a list of labels"),
        ("steps: 0", "steps is wrong: expected a list of labels"),
        ("steps: [[]]", "steps is wrong"),
        ("usual_names: 1", "usual_names is wrong: expected true or false"),
        ("attention_mask: [1]", "attention_mask is wrong: expected a file's name"),
        ("sites: [q_proj]", "sites is wrong: expected sites and where they lie"),
        ("sites: {q: a}", "'q' is no site: expected one of input, input_norm"),
        ("sites: {q_proj: 1}", "sites.q_proj is wrong: expected a place"),
        ("sites: {q_proj: {from: a, sum: [b]}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: {from: a, transpose: [0, 2]}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: {from: a, transpose: 3}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: {from: a, transpose: [0, x]}}", "sites.q_proj is wrong"),
        ("sites: {q_proj: 'a:b'}", "sites.q_proj: the place 'a:b' cannot be read: expected 'layers"),
        ("lengths: [1]\nattention_mask: m.pt", "gives lengths and attention_mask"),
        ("ranks: 2\nranks: 4", "names 'ranks' twice: found the second in line 2"),
        ("ranks: [", "is not valid YAML: found line "),
        ("!!python/object/apply:os.system ['true']", "is not valid YAML"),
    ],
)
def test_what_is_wrong_is_named(text: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=said) as raised:
        read(tmp_path, text)
    assert str(tmp_path / "map.yaml") in str(raised.value)


def test_map_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"map\.yaml cannot be read: found No such file"):
        NameMap.read(tmp_path / "map.yaml")


@pytest.mark.parametrize(
    "order", ["[0, 2, 1, '1']", "[0, true, 2]", "[0, 1.0, 2]", "[0, 2]", "[[0], 1]", "[-1, 0]"]
)
def test_transpose_that_is_no_order_of_dims_is_refused(order: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"map\.yaml: sites\.q_rope is wrong"):
        read(tmp_path, f"sites: {{q_rope: {{from: a, transpose: {order}}}}}")


def test_sites_that_are_a_list_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"map\.yaml: sites is wrong"):
        read(tmp_path, "sites: []")
