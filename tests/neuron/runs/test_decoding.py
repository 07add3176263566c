"""Rows decoded from a cache, and tokens generated through it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import click.testing
import pytest
import torch
from safetensors.torch import load_file

from gpu_reference.cli import main as mm2_gpu

# The device layer with a mistake that only a decode step makes.
DECODE_MISTAKES = """
import torch
from neuron.builtin.layer import DeviceLayer

class Forgets(DeviceLayer):
    "Sees no past row."
    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        if past_key_value is not None:
            attention_mask = attention_mask.clone()
            attention_mask[:, : -hidden_states.shape[1]] = 0
        return super().forward(hidden_states, attention_mask, position_ids, past_key_value)

class CountsAnew(DeviceLayer):
    "Rotates a step's keys as if they were the first."
    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        if past_key_value is not None:
            position_ids = torch.zeros_like(position_ids)
        return super().forward(hidden_states, attention_mask, position_ids, past_key_value)

class ReadsUnused(DeviceLayer):
    "Attends to rows of the cache that nothing was put into."
    def forward(self, hidden_states, attention_mask, position_ids, past_key_value=None):
        return super().forward(hidden_states, torch.ones_like(attention_mask), position_ids, past_key_value)

class Recorded(DeviceLayer):
    "Computes what it should, and returns its cache as `cached` says."
    def forward(self, *args, **kwargs):
        output, (keys, values) = super().forward(*args, **kwargs)
        return output, self.cached(keys, values, output.shape[1])

class NewRowsAlone(Recorded):
    "Returns the rows it was fed, not those before them: allowed."
    def cached(self, keys, values, rows):
        return keys[:, :, -rows:], values[:, :, -rows:]

class FlatKeys(Recorded):
    def cached(self, keys, values, rows):
        return keys.flatten(2), values.flatten(2)

class OtherCache(Recorded):
    def cached(self, keys, values, rows):
        return keys, torch.zeros_like(values)

class FewerHeads(Recorded):
    def cached(self, keys, values, rows):
        return keys[:, :1], values[:, :1]

class KeepsNothing(DeviceLayer):
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)[0]

class MakesNan(DeviceLayer):
    def forward(self, *args, **kwargs):
        output, cache = super().forward(*args, **kwargs)
        return output * float("nan"), cache

class TakesNone(DeviceLayer):
    def forward(self, hidden_states, attention_mask, position_ids):
        return super().forward(hidden_states, attention_mask, position_ids)
"""


@pytest.fixture
def ports(tmp_path: Path) -> Path:
    """The file of the ports above."""
    path = tmp_path / "ports.py"
    path.write_text(DECODE_MISTAKES)
    return path


@pytest.fixture
def decode(run: Any, on_small: tuple[object, ...], ports: Path) -> Any:
    """Runs layer 1 of the small model, some rows decoded, through one of the ports above or mm2's own."""

    def sweep(name: str | None = None, *, rows: int = 4) -> Any:
        target = () if name is None else ("--target", f"{ports}:{name}")
        return run("sweep", "--layers", "1:2", *on_small, "--decode", rows, "--json", *target)

    return sweep


def sites_blamed(result: Any) -> set[str]:
    record = json.loads(result.stdout)
    assert record["verdict"] == "fail"
    return {site for blame in record["blame"] for site in blame["sites"]}


@pytest.mark.parametrize(
    ("name", "rows"),
    [
        pytest.param(None, 1, marks=pytest.mark.slow),
        (None, 4),
        pytest.param(None, 23, marks=pytest.mark.slow),
        ("NewRowsAlone", 4),
    ],
)
def test_decoded_rows_pass(decode: Any, name: str | None, rows: int) -> None:
    result = decode(name, rows=rows)
    record = json.loads(result.stdout)
    assert (result.exit_code, record["verdict"], record["compared"]) == (0, "pass", record["of"])
    assert record["description"]["run"]["decode_rows"] == rows
    assert record["layers"][0]["sites"][0]["shape"] == [2, 24, 64]


@pytest.mark.parametrize("name", ["Forgets", "CountsAnew"])
def test_mistake_of_a_decode_step_alone_fails_in_attention(decode: Any, name: str) -> None:
    assert sites_blamed(decode(name)) <= {"attn_context", "q_rope", "k_rope"}
    # Without decoding it is not seen.
    assert json.loads(decode(name, rows=0).stdout)["verdict"] == "pass"


@pytest.mark.parametrize(
    ("name", "rows", "site"),
    [
        # What is returned to be cached is judged.
        ("OtherCache", 4, "v_proj"),
        ("FewerHeads", 4, "k_rope"),
        # The past is longer than what is in it, so that it has one length for all steps.
        ("ReadsUnused", 10, "attn_context"),
    ],
)
def test_what_is_cached_and_read_is_judged(decode: Any, name: str, rows: int, site: str) -> None:
    assert site in sites_blamed(decode(name, rows=rows))


def test_rows_that_are_decoded_are_each_prompts_own(
    run: Any, make_golden: Any, small_fp8: Path, ports: Path
) -> None:
    """Behind a short prompt, and behind all in a bucket, there is padding: decoding that would judge nothing."""
    for side in ("right", "left"):
        rows = ("--seq-len", "24,9", "--pad-to", 32, "--padding-side", side)
        part = ("--layer", 1, *rows, "--noise-floor", "full")
        golden = make_golden(small_fp8, *part, command="single-layer")
        common: tuple[object, ...] = ("sweep", "--layers", "1:2")
        common += ("--model", small_fp8, "--golden", golden, "--decode", 5, "--json")
        assert json.loads(run(*common).stdout)["verdict"] == "pass"
        wrong = json.loads(run(*common, "--target", f"{ports}:Forgets").stdout)
        assert (side, wrong["verdict"]) == (side, "fail")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("KeepsNothing", "returned no keys and values that fit the pass: expected (output, (keys, values))"),
        ("FlatKeys", "returned no keys and values that fit the pass: expected (output, (keys, values))"),
        ("TakesNone", "cannot decode: its forward does not accept past_key_value"),
    ],
)
def test_port_that_takes_no_part_is_told_how(decode: Any, name: str, message: str) -> None:
    result = decode(name)
    assert result.exit_code == 3
    assert message in result.stderr
    assert "accept past_key_value and return (output, (keys, values))" in result.stderr


def test_rows_that_cannot_be_decoded(run: Any, on_small: tuple[object, ...]) -> None:
    for words, message in (
        (("sweep", "--decode", 24), "of 24 tokens 24 cannot be decoded"),
        (("component", "--layer", 1, "--component", "moe", "--decode", 2), "a component does not decode"),
    ):
        result = run(*words, *on_small)
        assert (result.exit_code, message in result.stderr) == (2, True)


def test_saved_run_that_decoded_nothing_is_not_shown_as_one_that_did(
    run: Any, small: Path, tmp_path: Path
) -> None:
    place = ("--output-dir", tmp_path / "saved")
    common = ("single-layer", "--layer", 0, "--model", small, "--seq-len", 9, *place)
    assert run(*common).exit_code == 0
    result = run(*common, "--decode", 2, "--skip-compile")
    assert result.exit_code == 3
    assert "last 2 tokens of each prompt decoded" in result.stderr


def test_golden_without_keys_cannot_feed_a_decode_step(run: Any, make_golden: Any, small: Path) -> None:
    golden = make_golden(small, "--seq-len", 8, "--sites", "layer", "--noise-floor", "off")
    result = run("sweep", "--model", small, "--golden", golden, "--sites", "layer", "--decode", 2)
    assert result.exit_code == 3
    assert "lacks v_proj of layer 0, k_rope of layer 0" in result.stderr


def test_chained_steps_go_on_from_the_ports_own_rows(run: Any, float32_golden: Path, copies: Any) -> None:
    model = ("--model", copies[torch.float32], "--dtype", "float32", "--golden", float32_golden)
    decoded = json.loads(run("full", *model, "--decode", 5, "--json").stdout)
    whole = json.loads(run("full", *model, "--json").stdout)
    assert decoded["verdict"] == whole["verdict"] == "pass"
    mine, theirs = (load_file(Path(one["directory"]) / "model.safetensors") for one in (decoded, whole))
    real = load_file(Path(whole["directory"]) / "inputs.safetensors")["attention_mask"].bool()
    error = (mine["logits"][real] - theirs["logits"][real]).norm() / theirs["logits"][real].norm()
    assert float(error) < 1e-5


PROMPTS = ("--prompt", "The capital", "--prompt", "Hi")


@pytest.fixture(scope="module")
def model(copies: dict[torch.dtype, Path]) -> tuple[object, ...]:
    return ("--model", copies[torch.float32], "--dtype", "float32")


@pytest.fixture(scope="module")
def generated(model: tuple[object, ...], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """The golden that generates five tokens for each prompt, and what its command printed."""
    directory = tmp_path_factory.mktemp("generated") / "golden"
    options = ("--max-new-tokens", 5, "--noise-floor", "off", "--quiet", "--json", "--output-dir", directory)
    result = click.testing.CliRunner().invoke(
        mm2_gpu, [str(word) for word in ("full", *model, *PROMPTS, *options)]
    )
    assert result.exit_code == 0, result.output
    return directory, json.loads(result.stdout)


@pytest.fixture(scope="module")
def expected(generated: tuple[Path, Any]) -> list[list[int]]:
    return [row["generated_ids"] for row in generated[1]["generation"]["rows"]]


class TestGeneration:
    """Against the golden's own, in float32: neither side's noise decides."""

    # Those of the right are generated by a run that is saved, too.
    @pytest.mark.parametrize("side", [pytest.param("right", marks=pytest.mark.slow), "left"])
    def test_tokens_are_the_goldens(
        self, run: Any, model: tuple[object, ...], expected: list[list[int]], side: str
    ) -> None:
        result = run("full", *model, *PROMPTS, "--padding-side", side, "--max-new-tokens", 5, "--json")
        rows = json.loads(result.stdout)["generation"]["rows"]
        assert [row["generated_ids"] for row in rows] == expected
        assert all(row["text"] for row in rows)

    def test_tokens_far_out_are_the_goldens_and_end_with_the_models_positions(
        self, run: Any, model: tuple[object, ...], command: Any, tmp_path: Path
    ) -> None:
        rows = ("--seq-len", "6,4", "--start-positions", "4090,196602", "--max-new-tokens", 5)
        options = (*model, *rows, "--json")
        golden = command(
            mm2_gpu, "full", *options, "--noise-floor", "off", "--quiet", "--captures", tmp_path / "golden"
        )
        sides = [json.loads(side.stdout)["generation"]["rows"] for side in (golden, run("full", *options))]
        tokens = [[row["generated_ids"] for row in side] for side in sides]
        assert tokens[0] == tokens[1]
        assert [len(row) for row in tokens[0]] == [5, 3]

    def test_one_token_is_told_without_being_asked_for_and_needs_no_past(
        self, run: Any, model: tuple[object, ...], expected: list[list[int]], ports: Path
    ) -> None:
        result = run("full", *model, *PROMPTS, "--target", f"{ports}:TakesNone")
        assert result.exit_code == 0
        assert all(
            f"Row {index} continues with 1 token\n  ids   {row[0]}\n" in result.stdout
            for index, row in enumerate(expected)
        )

    def test_a_saved_run_says_what_it_generated(
        self, run: Any, model: tuple[object, ...], expected: list[list[int]]
    ) -> None:
        first = json.loads(run("full", *model, *PROMPTS, "--max-new-tokens", 3, "--json").stdout)
        shown = json.loads(run("full", *model, *PROMPTS, "--skip-compile", "--json").stdout)
        assert shown["generation"] == first["generation"]
        assert [row["generated_ids"] for row in shown["generation"]["rows"]] == [row[:3] for row in expected]

    @pytest.mark.parametrize(
        ("port", "num_tokens", "message"),
        [
            ("KeepsNothing", 2, "layer 0 returned no keys and values"),
            ("MakesNan", 1, "warning: no token was generated: no token can be chosen: logits are NaN"),
        ],
    )
    def test_a_port_without_a_past_or_logits_chooses_no_token(
        self, run: Any, model: tuple[object, ...], ports: Path, port: str, num_tokens: int, message: str
    ) -> None:
        options = ("--target", f"{ports}:{port}", "--max-new-tokens", num_tokens)
        result = run("full", *model, *PROMPTS, *options)
        assert result.exit_code == 3
        assert message in result.stderr
        assert "continues with" not in result.stdout

    def test_tokens_are_held_against_the_goldens(
        self,
        run: Any,
        model: tuple[object, ...],
        generated: tuple[Path, Any],
        expected: list[list[int]],
        ports: Path,
    ) -> None:
        common = ("full", *model, "--golden", generated[0], "--max-new-tokens", 5)
        assert re.search(r"prompts?: all \d+ generated tokens are the golden's", run(*common).stdout)
        wrong = run(*common, "--target", f"{ports}:Forgets", "--json")
        assert wrong.exit_code == 1
        record = json.loads(wrong.stdout)
        [blame] = record["blame"]
        assert (blame["layer"], blame["sites"]) == (None, ["generated_tokens"])
        assert f"the golden's is {expected[0][1]}, " in blame["reason"]
        assert record["generated"][0]["status"] == "fail"

    def test_text_ends_with_the_token_that_ends_it(
        self, run: Any, copies: dict[torch.dtype, Path], expected: list[list[int]], tmp_path: Path
    ) -> None:
        folder = shutil.copytree(copies[torch.float32], tmp_path / "model")
        ends = {"eos_token_id": [expected[0][1], expected[1][1]]}
        (folder / "generation_config.json").write_text(json.dumps(ends))
        given = ("--model", folder, "--dtype", "float32", *PROMPTS, "--max-new-tokens", 5, "--json")
        rows = json.loads(run("full", *given).stdout)["generation"]["rows"]
        ended = [row["generated_ids"] for row in rows]
        for index, row in enumerate(ended):
            assert row == expected[index][: len(row)]
            assert row[-1] in ends["eos_token_id"]
            assert not set(row[:-1]) & set(ends["eos_token_id"])
