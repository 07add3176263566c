from __future__ import annotations

import json
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import (
    described_source,
    fetch_files,
    list_files,
    resolve_config,
    resolve_model,
)
from minimax_tools.hub.snapshot import HubSnapshot, NoRangesError
from minimax_tools.model.weight_names import EMBEDDING, layer_of

INDEX = "model.safetensors.index.json"
LAYER_0, LAYER_1, TOP = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
SHARDS = (LAYER_0, LAYER_1, TOP)
DESCRIPTION = ("config.json", INDEX, "tokenizer.json", "chat_template.jinja")
# Bytes after which a body is cut: a part of a shard, and more than a client reads at once.
CUT = 150_000
# Nothing listens at this port of this machine, and nothing leaves the machine.
NOWHERE = "http://127.0.0.1:9"
NO_TOKEN = {"X-Error-Message": "Invalid credentials in Authorization header"}

# huggingface_hub reads its variables when it is imported. Given are a model and the largest size of a file.
RESOLVE = """
import resource, sys
from minimax_tools.hub.checkpoint_folder import resolve_model
from minimax_tools.errors import CheckpointError
model, *limits = sys.argv[1:]
if limits:
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(limits[0]),) * 2)
try:
    print(resolve_model(model))
except CheckpointError as error:
    print(error)
"""

Files = dict[str, bytes]


@pytest.fixture
def files(fp8_tensors: dict[str, torch.Tensor]) -> Files:
    """A model in three shards: layer 0, layer 1, and the rest with the embedding; and what is not for mm2."""
    shards: dict[int | None, str] = {0: LAYER_0, 1: LAYER_1, None: TOP}
    weight_map = {name: shards[layer_of(name)] for name in fp8_tensors}
    made: Files = {}
    for shard in SHARDS:
        made[shard] = save(
            {name: fp8_tensors[name].contiguous() for name in fp8_tensors if weight_map[name] == shard}
        )
    assert len(made[LAYER_0]) > CUT
    return {
        **made,
        INDEX: json.dumps({"weight_map": weight_map}).encode(),
        "config.json": b'{"model_type": "minimax_m2"}',
        "tokenizer.json": b"{}",
        "chat_template.jinja": b"{{ messages }}",
        "README.md": b"# model",
        "modeling.py": b"raise SystemExit",
        "consolidated.safetensors": b"another copy",
        "pytorch_model.bin": b"another copy",
        "onnx/model.safetensors": b"another format",
    }


class Served:
    """A model that a hub serves as owner/name, with an access of an empty cache."""

    def __init__(self, hub: Any, files: Files, access: HubAccess) -> None:
        self.hub, self.files, self.access = hub, files, access
        hub.add("owner/name", files)

    def resolve(self, model: str = "owner/name", layers: range | None = None, **fields: Any) -> Path:
        """Resolve a model of the hub; fields of its access may be others."""
        return resolve_model(model, layers=layers, access=replace(self.access, **fields))

    def read(self, start: int, stop: int) -> bytes:
        """Read a part of the first shard."""
        snapshot = described_source("owner/name", access=self.access)
        assert isinstance(snapshot, HubSnapshot)
        return snapshot.read(LAYER_0, start, stop)

    def shards_asked(self) -> list[str]:
        return sorted(one.file for one in self.hub.asked("GET") if one.file in SHARDS)

    def plant(self, name: str, **fault: Any) -> None:
        """Plant a fault where the content network has a file."""
        content_hash = self.hub.content_hash(name, self.files[name])
        self.hub.plant("GET", f"/content/{content_hash}/", **fault)


@pytest.fixture
def served(hub: Any, files: Files, access: HubAccess) -> Served:
    return Served(hub, files, access)


@pytest.fixture
def resolve_there(hub: Any, tmp_path: Path, forked_python: Any) -> Callable[..., str]:
    """Resolves a model in another process, with variables of huggingface_hub: the folder, or the error."""

    def resolve_it(*arguments: object, **environment: str) -> str:
        environment |= {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path)}
        done = forked_python(RESOLVE, *arguments, **environment)
        assert done.returncode == 0, done.stderr
        return str(done.stdout).strip()

    return resolve_it


def _fault(act: Callable[..., object], *arguments: Any, **options: Any) -> str:
    with pytest.raises(CheckpointError) as caught:
        act(*arguments, **options)
    assert caught.value.next_step
    return str(caught.value)


# What is a model


def test_a_folder_is_itself_and_its_files_are_found(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_config(str(tmp_path)) == tmp_path
    (tmp_path / "a.json").touch()
    assert list_files(str(tmp_path)) == ("a.json",)
    assert fetch_files(str(tmp_path), ["a.json"]) == {"a.json": tmp_path / "a.json"}
    assert f"{tmp_path} lacks b.json" in _fault(fetch_files, str(tmp_path), ["a.json", "b.json"])


@pytest.mark.parametrize("model", ["nothing", "a/b/c", "../name", "", "owner/name@", "o/n@../x"])
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    message = _fault(resolve_model, model)
    assert f"no checkpoint at {model!r}: expected a folder" in message
    assert "or a hub id" in message


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "found a file" in _fault(resolve_model, str(tmp_path / "model.safetensors"))


def test_a_folder_is_preferred_to_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, served: Served
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert served.resolve() == tmp_path / "owner/name"
    assert served.hub.log == []


# What is fetched


def test_all_that_a_checkpoint_needs_is_fetched_and_nothing_else(served: Served) -> None:
    described = resolve_config("owner/name", access=served.access)
    assert {path.name for path in described.iterdir()} == set(DESCRIPTION)
    served.hub.forget()
    folder = served.resolve()
    assert folder == described
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: served.files[name] for name in (*SHARDS, *DESCRIPTION)
    }
    assert len(TensorIndex.from_folder(folder)) > 0
    assert len(served.hub.asked("GET", "/revision/main")) == 1


@pytest.mark.parametrize(
    ("layers", "shards"),
    [(range(1), [LAYER_0, TOP]), (range(1, 2), [LAYER_1, TOP]), (range(2), list(SHARDS)), (range(0), [TOP])],
)
def test_only_the_shards_of_the_layers_asked_for_are_fetched(
    layers: range, shards: list[str], served: Served
) -> None:
    folder = served.resolve(layers=layers)
    assert served.shards_asked() == shards
    assert sorted(path.name for path in folder.glob("model-*")) == shards
    assert EMBEDDING in TensorIndex.from_folder(folder, layers=layers)


def test_what_was_fetched_is_not_asked_for_again(served: Served) -> None:
    folder = served.resolve(layers=range(1))
    served.hub.forget()
    assert served.resolve(layers=range(1)) == folder
    assert [one.path for one in served.hub.log] == ["/api/models/owner/name/revision/main"]
    assert served.resolve() == folder
    assert served.shards_asked() == [LAYER_1]


@pytest.mark.parametrize(
    ("config", "prefix"), [("{}", ""), ('{"model_type": "minimax_m3_vl"}', "language_model.")]
)
def test_a_model_of_bin_files_is_fetched_by_its_own_index(served: Served, config: str, prefix: str) -> None:
    names = [f"{prefix}model.layers.{layer}.a" for layer in range(2)]
    weight_map = dict(zip(names, ("pytorch_model-1.bin", "pytorch_model-2.bin"), strict=True))
    shards = {file: file.encode() for file in weight_map.values()}
    index = {"pytorch_model.bin.index.json": json.dumps({"weight_map": weight_map}).encode()}
    served.hub.add("owner/bin", {"config.json": config.encode(), **shards, **index})
    folder = served.resolve("owner/bin", layers=range(1))
    assert [path.name for path in folder.glob("*.bin")] == ["pytorch_model-1.bin"]


def test_a_model_that_lacks_weights_is_refused(served: Served) -> None:
    served.hub.add("owner/empty", {"config.json": b"{}", "model.gguf": b""})
    assert "holds no weights: expected safetensors shards" in _fault(served.resolve, "owner/empty")
    del served.files[LAYER_1]
    served.hub.add("owner/torn", served.files)
    assert f"owner/torn at revision 'main' has no {LAYER_1}" in _fault(served.resolve, "owner/torn")
    assert served.resolve("owner/torn", layers=range(1)).is_dir()


def test_a_revision_is_asked_for_and_fetched_by_its_commit(served: Served) -> None:
    folder = served.resolve("owner/name@v2", layers=range(0))
    assert served.hub.log[0].path == "/api/models/owner/name/revision/v2"
    assert served.resolve(f"owner/name@{folder.name}", layers=range(0)) == folder


@pytest.mark.parametrize("name", ["../../evil.json", "/evil.json"])
def test_names_that_lead_out_of_the_folder_are_not_fetched(name: str, served: Served) -> None:
    served.hub.add("owner/evil", {**served.files, name: b"{}"})
    assert name not in list_files("owner/evil", access=served.access)
    assert f"has no {name}" in _fault(fetch_files, "owner/evil", [name], access=served.access)


@pytest.mark.parametrize("etag", ["../../../evil", "/evil", ".hidden"])
def test_an_etag_that_leads_out_of_the_cache_is_refused(etag: str, tmp_path: Path, served: Served) -> None:
    commit = served.hub.add("owner/evil", served.files).commit
    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
    served.hub.plant("HEAD", "config.json", status=200, headers=headers, times=9)
    fault = _fault(fetch_files, "owner/evil", ["config.json"], access=served.access)
    assert "config.json of owner/evil has an etag that is no name for a file: expected its sha256" in fault
    assert not list(tmp_path.rglob("*evil*.incomplete"))
    fetched = fetch_files("owner/evil", [LAYER_1], access=served.access)
    assert fetched[LAYER_1].read_bytes() == served.files[LAYER_1]


def test_named_files_are_fetched_by_name(served: Served) -> None:
    found = fetch_files("owner/name", ["README.md", LAYER_1], access=served.access)
    assert {name: path.read_bytes() for name, path in found.items()} == {
        name: served.files[name] for name in ("README.md", LAYER_1)
    }
    assert served.shards_asked() == [LAYER_1]
    assert list_files("owner/name", access=served.access) == tuple(sorted(served.files))


# What may fail for good


@pytest.mark.parametrize(
    ("model", "answer", "words"),
    [
        ("owner/other", {}, ("there is no model of that id, or it is private", "no folder of that name")),
        ("owner/name@v9", {}, ("it has no revision 'v9'", "--model owner/name@revision")),
        ("owner/name", {"status": 401, "headers": NO_TOKEN}, ("the hub wants a valid token",)),
        ("owner/name", {"status": 403, "headers": NO_TOKEN}, ("the hub forbids it",)),
        ("owner/name", {"body": b"<html>"}, ("the answer is not what a hub says", "HF_ENDPOINT")),
        ("owner/name", {"status": 429, "headers": {"ratelimit": '"api";r=0;t=3600'}}, ("429",)),
    ],
    ids=["no such model", "no such revision", "no token", "forbidden", "no hub's answer", "wait of an hour"],
)
def test_a_refusal_is_told_and_not_tried_again(
    model: str, answer: dict[str, Any], words: tuple[str, ...], served: Served
) -> None:
    if answer:
        served.hub.plant("GET", "/api/", **answer)
    message = _fault(served.resolve, model)
    assert [part for part in words if part not in message] == []
    assert len(served.hub.log) == 1


def test_a_gated_model_opens_to_a_token_that_the_content_network_does_not_see(served: Served) -> None:
    served.hub.add("owner/gated", served.files, is_gated=True)
    message = _fault(served.resolve, "owner/gated")
    assert "owner/gated is gated" in message
    assert f"Ask for access at {served.hub.endpoint}/owner/gated, then log in" in message
    assert not [one for one in served.hub.log if one.status == 401 and one.method == "GET"]
    folder = served.resolve("owner/gated", token=served.hub.good_token)
    assert (folder / LAYER_0).read_bytes() == served.files[LAYER_0]
    content = [one for one in served.hub.log if one.path.startswith("/content/")]
    assert [one.token for one in content] == [None] * len(SHARDS)


# What may pass by itself


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [("GET", "/api/", 429), ("GET", "/api/", 503), ("HEAD", LAYER_0, 503), ("GET", LAYER_0, 503)],
)
def test_a_busy_hub_is_asked_again(method: str, path: str, status: int, served: Served) -> None:
    served.hub.plant(method, path, status=status, times=2)
    assert (served.resolve() / LAYER_0).read_bytes() == served.files[LAYER_0]
    assert [one.status for one in served.hub.log].count(status) == 2


def test_a_hub_that_names_a_delay_is_given_it(caplog: pytest.LogCaptureFixture, served: Served) -> None:
    served.hub.plant("GET", "/api/", status=429, headers={"Retry-After": "1"})
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        served.resolve(layers=range(0))
    assert any(message.endswith("Attempt 2 of 5 in 1 s.") for message in caplog.messages)


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_body_that_breaks_off_is_whole_in_the_end(ending: str, served: Served) -> None:
    served.plant(LAYER_0, after_bytes=CUT, ending=ending)
    assert (served.resolve(layers=range(1)) / LAYER_0).read_bytes() == served.files[LAYER_0]


def test_a_hub_that_fails_for_long_is_named_and_what_came_whole_is_kept(served: Served) -> None:
    served.plant(LAYER_0, status=503, times=3)
    message = _fault(served.resolve, num_attempts=3, num_workers=1)
    assert f"{LAYER_0} of owner/name could not be fetched: {served.hub.endpoint} does not answer" in message
    assert "503" in message
    served.hub.forget()
    assert (served.resolve() / LAYER_0).read_bytes() == served.files[LAYER_0]
    assert served.shards_asked() == list(SHARDS)


# What is verified


def test_a_corrupted_file_is_fetched_anew_once(caplog: pytest.LogCaptureFixture, served: Served) -> None:
    served.plant(LAYER_0, is_corrupt=True)
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        folder = served.resolve()
    assert (folder / LAYER_0).read_bytes() == served.files[LAYER_0]
    assert [one.range for one in served.hub.asked("GET", LAYER_0)] == [None, None]
    assert f"{LAYER_0} came corrupted" in caplog.text


@pytest.mark.parametrize(("name", "kind"), [(LAYER_0, "sha256"), ("tokenizer.json", "git sha1")])
def test_a_file_that_is_corrupted_twice_is_named_and_not_kept(
    name: str, kind: str, tmp_path: Path, served: Served
) -> None:
    content_hash = served.hub.content_hash(name, served.files[name])
    served.hub.plant("GET", name, is_corrupt=True, times=4)
    message = _fault(served.resolve)
    assert f"{name} of owner/name came corrupted twice" in message
    assert f"expected {len(served.files[name])} bytes of {kind} {content_hash}" in message
    assert not list(tmp_path.rglob(name))
    assert not list(tmp_path.rglob(f"{content_hash}*[!k]"))


def test_a_cached_file_of_another_size_is_fetched_anew(served: Served) -> None:
    shard = served.resolve() / LAYER_0
    shard.resolve().write_bytes(served.files[LAYER_0][:-1])
    assert (served.resolve() / LAYER_0).read_bytes() == served.files[LAYER_0]


@pytest.mark.parametrize("place", ["snapshot", "blob", "part"])
def test_a_link_out_of_the_cache_is_neither_read_nor_written(
    place: str, tmp_path: Path, served: Served
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(served.files[LAYER_0][: CUT if place == "part" else None])
    before = outside.read_bytes()
    shard = served.resolve() / LAYER_0
    blob = shard.resolve()
    shard.unlink()
    blob.unlink()
    link = {"snapshot": shard, "blob": blob, "part": blob.with_name(f"{blob.name}.incomplete")}[place]
    link.symlink_to(outside)
    again = served.resolve() / LAYER_0
    assert again.read_bytes() == served.files[LAYER_0]
    assert again.resolve().is_relative_to((tmp_path / "cache").resolve())
    assert outside.read_bytes() == before


def test_a_store_that_gives_nothing_by_xet_says_what_to_set(
    resolve_there: Callable[..., str], served: Served
) -> None:
    pytest.importorskip("hf_xet")
    # The content-addressed store that is offered gives no token.
    served.hub.add("owner/xet", served.files, offers_xet=True)
    message = _fault(served.resolve, "owner/xet")
    assert "could not be fetched by xet" in message
    assert "Set HF_HUB_DISABLE_XET=1" in message
    folder = Path(resolve_there("owner/xet", HF_HUB_DISABLE_XET="1"))
    assert all((folder / shard).read_bytes() == served.files[shard] for shard in SHARDS)


def test_two_at_once_fetch_every_shard_once(served: Served) -> None:
    # So slow that the other asks before it is there.
    served.plant(LAYER_0, pause_s=0.1, times=2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(served.resolve), pool.submit(served.resolve)
        assert first.result() == second.result()
    assert served.shards_asked() == list(SHARDS)


# The disk


def test_a_disk_that_is_too_small_is_found_before_a_shard_is_fetched(served: Served) -> None:
    served.hub.add("owner/huge", served.files, claimed_sizes={LAYER_0: 10**18})
    message = _fault(served.resolve, "owner/huge")
    assert "too small for what is missing of owner/huge: expected 1000.0 PB for 3 files, found" in message
    assert "free. Make room" in message
    assert served.shards_asked() == []


@pytest.mark.usefixtures("served")
def test_a_file_that_cannot_be_stored_says_where(resolve_there: Callable[..., str], tmp_path: Path) -> None:
    output = resolve_there("owner/name", 100_000)
    assert f"of owner/name cannot be stored in {tmp_path / 'hub'}: found [Errno 27]" in output
    assert "set HF_HOME to another disk" in output


# Without the hub


def test_a_hub_that_is_away_is_no_missing_model_and_what_is_cached_is_used(
    caplog: pytest.LogCaptureFixture, served: Served
) -> None:
    fault = f"the hub's model owner/name could not be fetched: {NOWHERE} does not answer"
    assert fault in _fault(served.resolve, endpoint=NOWHERE)
    folder = served.resolve(layers=range(1))
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        assert served.resolve(layers=range(1), endpoint=NOWHERE) == folder
    assert f"using the cached commit {folder.name[:8]} of owner/name" in caplog.text
    assert fault in _fault(served.resolve, endpoint=NOWHERE)


def test_a_refusal_is_not_covered_by_the_cache(served: Served) -> None:
    served.resolve(layers=range(1))
    served.hub.plant("GET", "/api/", status=403)
    assert "the hub forbids it" in _fault(served.resolve, layers=range(1))


def test_offline_what_is_cached_is_used_and_what_is_missing_is_named(served: Served) -> None:
    folder = served.resolve(layers=range(1))
    served.hub.forget()
    assert served.resolve(layers=range(1), is_offline=True) == folder
    assert served.resolve(f"owner/name@{folder.name}", layers=range(1), is_offline=True) == folder
    message = _fault(served.resolve, is_offline=True)
    assert f"lacks {LAYER_1} of owner/name, and the hub is not asked" in message
    assert "HF_HUB_OFFLINE" in message
    assert served.hub.log == []


@pytest.mark.parametrize("kept", [(), (LAYER_0,)])
def test_offline_shards_without_their_index_are_not_taken_for_all(
    kept: tuple[str, ...], served: Served
) -> None:
    folder = fetch_files("owner/name", ["config.json", *kept], access=served.access)["config.json"].parent
    assert not (folder / INDEX).exists()
    assert f"lacks {INDEX} of owner/name" in _fault(served.resolve, is_offline=True)


def test_endpoint_token_and_cache_are_those_of_the_environment(
    resolve_there: Callable[..., str], tmp_path: Path, served: Served
) -> None:
    served.hub.add("owner/name", served.files, is_gated=True)
    token = served.hub.good_token
    folder = resolve_there("owner/name", HF_TOKEN=token)
    assert Path(folder).parent == tmp_path / "hub" / "models--owner--name" / "snapshots"
    assert {one.token for one in served.hub.log if not one.path.startswith("/content/")} == {token}
    assert resolve_there("owner/name", HF_HUB_OFFLINE="1") == folder


# A part of a file


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (500, 150_000), (7, 7)])
def test_a_range_is_what_comes_and_all_that_comes(start: int, stop: int, served: Served) -> None:
    assert served.read(start, stop) == served.files[LAYER_0][start:stop]
    asked = [request.range for request in served.hub.asked("GET", LAYER_0)]
    assert asked == ([f"bytes={start}-{stop - 1}"] if stop > start else [])


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_range_that_breaks_off_is_asked_for_again(ending: str, served: Served) -> None:
    served.hub.plant("GET", "/content/", after_bytes=CUT - 1000, ending=ending, times=2)
    assert served.read(100, CUT) == served.files[LAYER_0][100:CUT]
    assert [one.range for one in served.hub.asked("GET", LAYER_0)] == [f"bytes=100-{CUT - 1}"] * 3


def test_a_server_without_ranges_is_named_and_its_file_left_alone(served: Served) -> None:
    served.hub.plant("GET", "/content/", ignores_range=True)
    with pytest.raises(NoRangesError, match=f"gives no part of {LAYER_0}.*status 200"):
        served.read(0, 8)
    assert len(served.hub.asked("GET", LAYER_0)) == 1


def test_a_part_of_another_file_is_not_taken(served: Served) -> None:
    size_bytes = len(served.files[LAYER_0]) + 1
    served.hub.add("owner/name", served.files, claimed_sizes={LAYER_0: size_bytes})
    assert f"bytes 0 to 7 of {size_bytes} were asked for" in _fault(served.read, 0, 8)
