"""Samples files of lm-evaluation-harness: both layouts of requests, both kinds of tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from minimax_tools.errors import UsageError
from minimax_tools.text.lm_eval_samples import Message, read_lm_eval_samples

GENERATED = {
    "doc_id": 3,
    "doc": {"question": "6 × 7?"},
    "target": "42",
    "arguments": {"gen_args_0": {"arg_0": "6 × 7 =", "arg_1": {"until": ["\n"]}}},
    "resps": [[" 41"]],
    "filtered_resps": ["41"],
    "filter": "strict-match",
    "metrics": ["exact_match"],
    "exact_match": 0.0,
}
CHOSEN = {
    "doc_id": 0,
    "target": 1,
    "arguments": [["Answer:", " A"], ["Answer:", " B"]],
    "resps": [[["-2.5", "False"]], [["-0.5", "True"]]],
    "filtered_resps": [["-2.5", "False"], ["-0.5", "True"]],
    "metrics": ["acc", "acc_norm"],
    "acc": 1.0,
    "acc_norm": 0.0,
}


def write(folder: Path, *records: Any) -> Path:
    # Text of any alphabet as it is, as lm_eval writes it.
    lines = [json.dumps(record, ensure_ascii=False) + "\n" for record in records]
    (folder / "samples.jsonl").write_text("".join(lines), encoding="utf-8")
    return folder / "samples.jsonl"


def test_generated_answer_is_read(tmp_path: Path) -> None:
    (sample,) = read_lm_eval_samples(write(tmp_path, GENERATED))
    assert (sample.name, sample.context, sample.continuation) == ("doc 3", "6 × 7 =", " 41")
    assert (sample.is_generated, sample.target, sample.is_right) == (True, "42", False)


def test_each_choice_is_a_sample_with_its_likelihood(tmp_path: Path) -> None:
    samples = read_lm_eval_samples(write(tmp_path, CHOSEN))
    assert [sample.continuation for sample in samples] == [" A", " B"]
    assert [sample.log_likelihood for sample in samples] == [-2.5, -0.5]
    assert [sample.name for sample in samples] == ["doc 0, choice 0", "doc 0, choice 1"]
    # One of two metrics says no.
    assert samples[0].is_right is False


def test_document_of_several_filters_counts_once_and_is_right_if_one_says_so(tmp_path: Path) -> None:
    flexible = {**GENERATED, "filter": "flexible-extract", "exact_match": 1.0}
    (sample,) = read_lm_eval_samples(write(tmp_path, GENERATED, flexible))
    assert sample.is_right is True
    # Without metrics it is unknown.
    record = {key: value for key, value in GENERATED.items() if key not in ("metrics", "exact_match")}
    (unknown,) = read_lm_eval_samples(write(tmp_path, record))
    assert unknown.is_right is None


def test_chat_is_read_as_messages(tmp_path: Path) -> None:
    messages = json.dumps([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}])
    record = {**GENERATED, "arguments": {"gen_args_0": {"arg_0": [messages], "arg_1": {}}}}
    (sample,) = read_lm_eval_samples(write(tmp_path, record))
    assert sample.context == (
        Message(role="system", content="Be brief."),
        Message(role="user", content="Hi"),
    )


def test_line_separators_within_text_end_no_line(tmp_path: Path) -> None:
    record = {**GENERATED, "resps": [["one\u2028two\x85three"]]}
    (sample,) = read_lm_eval_samples(write(tmp_path, record))
    assert sample.continuation == "one\u2028two\x85three"


def test_likelihood_may_be_a_number_or_text_in_a_pair_of_its_own(tmp_path: Path) -> None:
    record = {**CHOSEN, "resps": [[-2.5, False], [["-inf", "True"]]]}
    samples = read_lm_eval_samples(write(tmp_path, record))
    assert [sample.log_likelihood for sample in samples] == [-2.5, float("-inf")]


@pytest.mark.parametrize(
    "changed",
    [
        {"doc_id": [3]},
        {"metrics": "acc"},
        {"arguments": 3},
        {"arguments": {"gen_args_0": {}}},
        {"arguments": {"gen_args_0": {"arg_1": {}}}},
        {"arguments": {"gen_args_0": ["6 × 7 =", {}]}},
        {"arguments": [[['[{"role": "user"}]']]]},
        {"resps": [3]},
        {"resps": [[]]},
        {"arguments": [["a", "b"]], "resps": [[]]},
        {"arguments": [["a", "b"]], "resps": [[["much", "True"]]]},
        {"arguments": [["a", "b"]], "resps": [[["nan", "True"]]]},
        {"arguments": [["a", "b"]], "resps": [["-2.5"]]},
    ],
)
def test_value_of_another_kind_is_refused_by_its_document(tmp_path: Path, changed: dict[str, Any]) -> None:
    path = write(tmp_path, {**GENERATED, **changed})
    with pytest.raises(
        UsageError, match=r"samples\.jsonl, (line 1|doc 3): its requests cannot be read"
    ) as caught:
        read_lm_eval_samples(path)
    assert caught.value.found
    assert caught.value.next_step == "Give a samples_*.jsonl of lm_eval --log_samples."


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "line 1 is no JSON"),
        ('{"doc_id": 0}', "line 1: its requests cannot be read"),
        ("[1]", r"line 1 is no sample of lm_eval: expected an object .*, found \[1\]"),
        ('{"doc_id": 7, "arguments": [["a", {}]], "resps": []}', "doc 7: its requests cannot be read"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        read_lm_eval_samples(path)
