from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from minimax_tools.checkpoint.hub import resolve_model
from minimax_tools.errors import CheckpointError

# huggingface_hub reads its environment when it is imported, so each of these runs in a process of its own.
_PROGRAM = """
import sys
from minimax_tools.checkpoint.hub import resolve_model
from minimax_tools.errors import CheckpointError
try:
    print(resolve_model(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""
_ROOT = Path(__file__).parents[3]


def _resolve(model: str, *, home: Path, **environment: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, model],
        env={**os.environ, "HF_HOME": str(home), "PYTHONPATH": str(_ROOT), **environment},
        cwd=home,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "model", ["nothing", "a/b/c", "./owner/name", "../name", "/owner/name", "owner/", ""]
)
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    with pytest.raises(CheckpointError, match=r"no checkpoint at .*expected a folder.*or a hub id") as caught:
        resolve_model(model)
    assert caught.value.next_step


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(CheckpointError, match="found a file"):
        resolve_model(str(tmp_path / "model.safetensors"))


def test_a_model_of_the_hubs_cache_is_found_offline(tmp_path: Path) -> None:
    repository = tmp_path / "hub" / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert _resolve("owner/name", home=tmp_path, HF_HUB_OFFLINE="1") == str(snapshot)


def test_a_folder_is_preferred_to_the_hub(tmp_path: Path) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    assert _resolve("owner/name", home=tmp_path, HF_HUB_OFFLINE="1") == "owner/name"


def test_a_model_that_cannot_be_fetched_says_why_and_what_to_do(tmp_path: Path) -> None:
    message = _resolve("owner/name", home=tmp_path, HF_HUB_OFFLINE="1")
    assert "no folder 'owner/name' is here, and the hub's model of that id could not be fetched" in message
    assert "HF_ENDPOINT and HF_HUB_OFFLINE are honoured" in message


def test_an_endpoint_that_does_not_answer_is_the_same_error(tmp_path: Path) -> None:
    # Port 9 of this machine: nothing listens there, and nothing leaves the machine.
    message = _resolve("owner/name", home=tmp_path, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_OFFLINE="0")
    assert "could not be fetched" in message
