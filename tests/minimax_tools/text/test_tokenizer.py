from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.text.tokenizer import (
    decode_rows,
    encode_texts,
    has_tokenizer,
    read_end_tokens,
    render_messages,
)

TEXTS = ["The capital of France is", "def f(x):\n    return x", "Grüße, 你好 🙂", "]~b]user"]


def test_texts_are_encoded_as_transformers_encodes_them_raw_or_as_a_chat(toy: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(toy)
    assert encode_texts(toy, TEXTS, chat=False) == [tokenizer(text).input_ids for text in TEXTS]
    chats = [[{"role": "user", "content": text}] for text in TEXTS]
    expected = [tokenizer.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats]
    assert encode_texts(toy, TEXTS, chat=True) == expected


def test_rows_are_decoded_with_their_special_tokens(toy: Path) -> None:
    assert decode_rows(toy, encode_texts(toy, TEXTS, chat=False)) == TEXTS
    assert decode_rows(toy, encode_texts(toy, TEXTS[:1], chat=True)) == [
        render_messages(toy, [("user", TEXTS[0])])
    ]


@pytest.mark.parametrize(
    ("value", "expected"), [("3", {3}), ("[3, 4]", {3, 4}), ("[]", set()), ("null", {9})]
)
def test_end_tokens_are_those_of_the_first_file_that_names_them(
    tmp_path: Path, value: str, expected: set[int]
) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    (tmp_path / "config.json").write_text('{"eos_token_id": 9}')
    assert read_end_tokens(tmp_path) == expected


def test_missing_and_damaged_tokenizer_are_told_apart(toy: Path, tmp_path: Path) -> None:
    assert has_tokenizer(toy)
    assert not has_tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json"):
        decode_rows(tmp_path, [[1]])
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json cannot be read"):
        encode_texts(tmp_path, ["a"], chat=False)


@pytest.mark.parametrize("value", ["true", "[true]", "1.0", '"3"', "[[3]]", "{}"])
def test_end_token_that_is_no_id_is_refused_by_name(tmp_path: Path, value: str) -> None:
    (tmp_path / "generation_config.json").write_text(f'{{"eos_token_id": {value}}}')
    with pytest.raises(CheckpointError, match=r"generation_config\.json: eos_token_id is not a token id"):
        read_end_tokens(tmp_path)


PROMPT = 'What is 2 < 3?\n  Say "yes".'

# What templates of the hub use: macros, tojson, loop controls, special tokens, tools that are not given.
TEMPLATE = """\
{%- macro tag(name) -%}<{{ name }}>{%- endmacro -%}
{%- if tools is defined and tools is not none %}{{ tools | tojson(ensure_ascii=False) }}{% endif %}
{%- set ns = namespace(count=0) %}
{{ bos_token }}{{ eos_token }}
    {% for message in messages %}
        {%- if message.role == 'system' %}
            {%- continue %}
        {%- endif %}
        {%- set ns.count = ns.count + 1 %}
        {{- tag(message.role) ~ message.content | tojson }}
    {% endfor %}
{{ ns.count }} of {{ messages | length }}{{ documents is none }}
{%- if add_generation_prompt %}{{ tag('ai') }}{% endif %}
"""


def render_chat(folder: Path, prompt: str = PROMPT) -> str:
    return render_messages(folder, [("user", prompt)])


def with_template(toy: Path, folder: Path, template: object, *, as_file: bool = False) -> Path:
    shutil.copy(toy / "tokenizer.json", folder)
    config = json.loads((toy / "tokenizer_config.json").read_text())
    config.pop("chat_template")
    if as_file:
        (folder / "chat_template.jinja").write_text(str(template))
    else:
        config["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def of_transformers(folder: Path, prompt: str) -> str:
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))


@pytest.mark.parametrize("prompt", [PROMPT, "", "{{ bos_token }}", "Grüße, 你好"])
def test_toys_template_renders_as_transformers_renders_it(toy: Path, prompt: str) -> None:
    rendered = render_chat(toy, prompt)
    assert rendered == of_transformers(toy, prompt)
    assert prompt in rendered


@pytest.mark.parametrize("as_file", [False, True])
def test_template_of_every_feature_renders_as_transformers_renders_it(
    toy: Path, tmp_path: Path, as_file: bool
) -> None:
    folder = with_template(toy, tmp_path, TEMPLATE, as_file=as_file)
    rendered = render_chat(folder)
    assert rendered == of_transformers(folder, PROMPT)
    assert '<user>"What is 2 < 3?' in rendered


def set_token(folder: Path, token: object) -> None:
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "bos_token": token}))


def test_special_token_may_be_an_object(toy: Path, tmp_path: Path) -> None:
    folder = with_template(toy, tmp_path, "{{ bos_token }}{{ pad_token }}")
    set_token(folder, {"content": "<s>", "lstrip": False})
    assert render_chat(folder) == "<s>"


@pytest.mark.parametrize("token", [3, True, ["<s>"], {"text": "<s>"}, {"content": 3}])
def test_special_token_that_is_no_text_is_refused_by_name(toy: Path, tmp_path: Path, token: object) -> None:
    folder = with_template(toy, tmp_path, "{{ bos_token }}")
    set_token(folder, token)
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config\.json: bos_token is no token: expected text, or .* found"
    ):
        render_chat(folder)


@pytest.mark.parametrize(
    ("template", "found"),
    [
        ("{{ raise_exception('roles must alternate') }}", "TemplateError: roles must alternate"),
        ("{% if %}", "TemplateSyntaxError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{{ 1 + 'a' }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}", "RecursionError"),
    ],
)
def test_template_that_fails_is_an_error_with_its_reason(
    toy: Path, tmp_path: Path, template: str, found: str
) -> None:
    folder = with_template(toy, tmp_path, template)
    with pytest.raises(CheckpointError, match=f"chat template of .* cannot be rendered: found {found}"):
        render_chat(folder)


def test_missing_and_damaged_files_are_named(toy: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no chat template"):
        render_chat(tmp_path)
    for text, fault in (("{", "cannot be read"), ("[]", "holds no JSON object")):
        (tmp_path / "tokenizer_config.json").write_text(text)
        with pytest.raises(CheckpointError, match=rf"tokenizer_config\.json {fault}"):
            render_chat(tmp_path)
    folder = with_template(toy, tmp_path, "x")
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(
        CheckpointError, match=r"chat_template\.jinja cannot be read: found .*Fetch the file again"
    ):
        render_chat(folder)
