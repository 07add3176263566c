from __future__ import annotations

import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import save

from minimax_tools.checkpoint.index import TensorIndex
from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import fetch_files, list_files, resolve_config, resolve_model
from minimax_tools.model.weight_names import EMBEDDING, layer_of

_ROOT = Path(__file__).parents[3]
INDEX = "model.safetensors.index.json"
LAYER_0, LAYER_1, TOP = (f"model-{number:05}-of-00003.safetensors" for number in (1, 2, 3))
SHARDS = (LAYER_0, LAYER_1, TOP)
DESCRIPTION = ("config.json", INDEX, "tokenizer.json", "chat_template.jinja")
# Bytes after which a body is cut: a part of a shard, and more than a client reads at once.
CUT = 150_000

Files = dict[str, bytes]
Resolve = Callable[..., Path]


@pytest.fixture
def files(fp8_tensors: dict[str, torch.Tensor]) -> Files:
    """A model in three shards: layer 0, layer 1, and the rest with the embedding; and what is not for mm2."""
    weight_map = {name: (TOP, LAYER_0, LAYER_1)[(-1, 0, 1).index(_layer(name))] for name in fp8_tensors}
    made = {
        shard: save(
            {name: fp8_tensors[name].contiguous() for name in fp8_tensors if weight_map[name] == shard}
        )
        for shard in SHARDS
    }
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


def _layer(name: str) -> int:
    layer = layer_of(name)
    return -1 if layer is None else layer


@pytest.fixture
def access(hub: Any, tmp_path: Path) -> HubAccess:
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)


@pytest.fixture
def resolve(hub: Any, files: Files, access: HubAccess) -> Resolve:
    """Serves `files` as owner/name and resolves that; `model` and `HubAccess`'s fields may be others."""
    hub.add("owner/name", files)

    def resolve_it(model: str = "owner/name", layers: range | None = None, **fields: Any) -> Path:
        return resolve_model(model, layers=layers, access=dataclasses.replace(access, **fields))

    return resolve_it


def _fault(act: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        act()
    assert caught.value.next_step
    return str(caught.value)


def _shards_asked(hub: Any) -> list[str]:
    return sorted({one.file for one in hub.asked("GET") if one.file in SHARDS})


def _ranges(hub: Any, shard: str) -> list[str | None]:
    return [one.range for one in hub.asked("GET", shard)]


def _content(hub_module: ModuleType, files: Files, name: str) -> str:
    """Part of the path where the content network has the file."""
    return f"/content/{hub_module.content_hash(name, files[name])}/"


# What is a model


def test_a_folder_is_itself(tmp_path: Path) -> None:
    assert resolve_model(str(tmp_path)) == tmp_path
    assert resolve_config(str(tmp_path)) == tmp_path


@pytest.mark.parametrize(
    "model",
    ["nothing", "a/b/c", "../name", "", "owner/name@", "o/n@../x"],
)
def test_what_is_neither_folder_nor_id_is_refused(model: str) -> None:
    message = _fault(lambda: resolve_model(model))
    assert f"no checkpoint at {model!r}: expected a folder" in message
    assert "or a hub id" in message


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").touch()
    assert "found a file" in _fault(lambda: resolve_model(str(tmp_path / "model.safetensors")))


def test_a_folder_is_preferred_to_the_hub(
    hub: Any, resolve: Resolve, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve() == tmp_path / "owner/name"
    assert hub.log == []


# What is fetched


def test_all_that_a_checkpoint_needs_is_fetched_and_nothing_else(
    hub: Any, files: Files, resolve: Resolve
) -> None:
    folder = resolve()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: files[name] for name in (*SHARDS, *DESCRIPTION)
    }
    assert len(TensorIndex.from_folder(folder)) > 0
    assert len(hub.asked("GET", "/revision/main")) == 1


@pytest.mark.parametrize(
    ("layers", "shards"),
    [(range(1), [LAYER_0, TOP]), (range(1, 2), [LAYER_1, TOP]), (range(2), list(SHARDS)), (range(0), [TOP])],
)
def test_only_the_shards_of_the_layers_asked_for_are_fetched(
    layers: range, shards: list[str], hub: Any, resolve: Resolve
) -> None:
    folder = resolve(layers=layers)
    assert _shards_asked(hub) == shards
    assert sorted(path.name for path in folder.glob("model-*")) == shards
    assert EMBEDDING in TensorIndex.from_folder(folder, layers=layers)


def test_what_was_fetched_is_not_asked_for_again(hub: Any, resolve: Resolve) -> None:
    folder = resolve(layers=range(1))
    hub.forget()
    assert resolve(layers=range(1)) == folder
    assert [one.path for one in hub.log] == ["/api/models/owner/name/revision/main"]
    assert resolve() == folder
    assert _shards_asked(hub) == [LAYER_1]


def test_the_config_alone_comes_without_shards(hub: Any, access: HubAccess, resolve: Resolve) -> None:
    folder = resolve_config("owner/name", access=access)
    assert {path.name for path in folder.iterdir()} == set(DESCRIPTION)
    assert resolve() == folder


def test_a_model_of_bin_files_is_fetched_by_its_own_index(hub: Any, access: HubAccess) -> None:
    weight_map = {"model.layers.0.a": "pytorch_model-1.bin", "model.layers.1.a": "pytorch_model-2.bin"}
    shards = {file: file.encode() for file in weight_map.values()}
    index = {"pytorch_model.bin.index.json": json.dumps({"weight_map": weight_map}).encode()}
    hub.add("owner/bin", {"config.json": b"{}", **shards, **index})
    folder = resolve_model("owner/bin", layers=range(1), access=access)
    assert (folder / "pytorch_model-1.bin").exists()
    assert not (folder / "pytorch_model-2.bin").exists()


def test_a_model_without_weights_is_refused(hub: Any, access: HubAccess) -> None:
    hub.add("owner/empty", {"config.json": b"{}", "model.gguf": b""})
    message = _fault(lambda: resolve_model("owner/empty", access=access))
    assert "holds no weights: expected safetensors shards" in message


def test_a_shard_that_the_index_names_and_the_hub_lacks_is_named(
    hub: Any, access: HubAccess, files: Files
) -> None:
    del files[LAYER_1]
    hub.add("owner/torn", files)
    assert f"owner/torn at revision 'main' has no {LAYER_1}" in _fault(
        lambda: resolve_model("owner/torn", access=access)
    )
    assert resolve_model("owner/torn", layers=range(1), access=access).is_dir()


def test_a_revision_is_asked_for_and_fetched_by_its_commit(hub: Any, resolve: Resolve) -> None:
    folder = resolve("owner/name@v2", layers=range(0))
    assert hub.log[0].path == "/api/models/owner/name/revision/v2"
    assert resolve(f"owner/name@{folder.name}", layers=range(0)) == folder


@pytest.mark.parametrize("name", ["../../evil.json", "/evil.json"])
def test_names_that_lead_out_of_the_folder_are_not_fetched(
    name: str, hub: Any, access: HubAccess, files: Files
) -> None:
    hub.add("owner/evil", {**files, name: b"{}"})
    assert name not in list_files("owner/evil", access=access)
    assert f"has no {name}" in _fault(lambda: fetch_files("owner/evil", [name], access=access))


@pytest.mark.parametrize("etag", ["../../../evil", "/evil", ".hidden"])
def test_an_etag_that_leads_out_of_the_cache_is_refused(
    etag: str, hub: Any, hub_module: ModuleType, access: HubAccess, files: Files, tmp_path: Path
) -> None:
    commit = hub.add("owner/evil", files).commit
    headers = {"ETag": f'"{etag}"', "X-Repo-Commit": commit}
    hub.plant("HEAD", "config.json", hub_module.Fault(status=200, headers=headers), times=9)
    fault = _fault(lambda: fetch_files("owner/evil", ["config.json"], access=access))
    assert "config.json of owner/evil has an etag that is no name for a file: expected its sha256" in fault
    assert not list(tmp_path.rglob("*evil*.incomplete"))
    assert fetch_files("owner/evil", [LAYER_1], access=access)[LAYER_1].read_bytes() == files[LAYER_1]


def test_named_files_are_fetched_by_name(hub: Any, access: HubAccess, files: Files, resolve: Resolve) -> None:
    found = fetch_files("owner/name", ["README.md", LAYER_1], access=access)
    assert {name: path.read_bytes() for name, path in found.items()} == {
        name: files[name] for name in ("README.md", LAYER_1)
    }
    assert _shards_asked(hub) == [LAYER_1]
    assert list_files("owner/name", access=access) == tuple(sorted(files))


def test_files_of_a_folder_are_listed_and_found(tmp_path: Path) -> None:
    (tmp_path / "a.json").touch()
    assert list_files(str(tmp_path)) == ("a.json",)
    assert fetch_files(str(tmp_path), ["a.json"]) == {"a.json": tmp_path / "a.json"}
    assert f"{tmp_path} lacks b.json" in _fault(lambda: fetch_files(str(tmp_path), ["a.json", "b.json"]))


# What may fail for good


def test_an_unknown_model_is_said_to_be_one(hub: Any, resolve: Resolve) -> None:
    message = _fault(lambda: resolve("owner/other"))
    assert "there is no model of that id, or it is private and hidden from this token" in message
    assert "no folder of that name is here either" in message
    assert len(hub.log) == 1


def test_an_unknown_revision_is_said_to_be_one(resolve: Resolve) -> None:
    message = _fault(lambda: resolve("owner/name@v9"))
    assert "it has no revision 'v9'" in message
    assert "--model owner/name@revision" in message


def test_a_gated_model_says_where_to_ask(hub: Any, access: HubAccess, files: Files) -> None:
    hub.add("owner/gated", files, is_gated=True)
    message = _fault(lambda: resolve_model("owner/gated", access=access))
    assert "owner/gated is gated" in message
    assert f"Ask for access at {hub.endpoint}/owner/gated, then log in" in message
    assert not [one for one in hub.log if one.status == 401 and one.method == "GET"]


def test_a_token_opens_a_gated_model_and_is_not_shown_to_the_content_network(
    hub: Any, hub_module: ModuleType, access: HubAccess, files: Files
) -> None:
    hub.add("owner/gated", files, is_gated=True)
    given = dataclasses.replace(access, token=hub_module.GOOD_TOKEN)
    assert (resolve_model("owner/gated", access=given) / LAYER_0).read_bytes() == files[LAYER_0]
    content = [one for one in hub.log if one.path.startswith("/content/")]
    assert len(content) == len(SHARDS)
    assert {one.token for one in content} == {None}


@pytest.mark.parametrize(
    ("status", "reason"), [(401, "the hub wants a valid token"), (403, "the hub forbids it")]
)
def test_a_refusal_is_not_tried_again(
    status: int, reason: str, hub: Any, hub_module: ModuleType, resolve: Resolve
) -> None:
    headers = {"X-Error-Message": "Invalid credentials in Authorization header"}
    hub.plant("GET", "/api/", hub_module.Fault(status=status, headers=headers))
    assert reason in _fault(resolve)
    assert len(hub.log) == 1


def test_an_answer_that_is_no_hubs_is_no_missing_model(
    hub: Any, hub_module: ModuleType, resolve: Resolve
) -> None:
    hub.plant("GET", "/api/", hub_module.Fault(body=b"<html>Log in to this network</html>"), times=9)
    message = _fault(resolve)
    assert "no model of that id" not in message
    assert "HF_ENDPOINT" in message


# What may pass by itself


@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize(("method", "path"), [("GET", "/api/"), ("HEAD", LAYER_0), ("GET", LAYER_0)])
def test_a_busy_hub_is_asked_again(
    method: str, path: str, status: int, hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve
) -> None:
    hub.plant(method, path, hub_module.Fault(status=status), times=2)
    assert (resolve() / LAYER_0).read_bytes() == files[LAYER_0]
    assert [one.status for one in hub.log].count(status) == 2


def test_a_hub_that_names_a_delay_is_given_it(
    hub: Any, hub_module: ModuleType, resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    hub.plant("GET", "/api/", hub_module.Fault(status=429, headers={"Retry-After": "1"}))
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        resolve(layers=range(0))
    assert any(message.endswith("Attempt 2 of 5 in 1 s.") for message in caplog.messages)


def test_a_delay_of_an_hour_is_not_waited_for(hub: Any, hub_module: ModuleType, resolve: Resolve) -> None:
    hub.plant("GET", "/api/", hub_module.Fault(status=429, headers={"ratelimit": '"api";r=0;t=3600'}))
    assert "429" in _fault(resolve)
    assert len(hub.log) == 1


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_body_that_breaks_off_is_whole_in_the_end(
    ending: str, hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve
) -> None:
    fault = hub_module.Fault(after_bytes=CUT, ending=ending)
    hub.plant("GET", _content(hub_module, files, LAYER_0), fault)
    assert (resolve(layers=range(1)) / LAYER_0).read_bytes() == files[LAYER_0]


def test_a_hub_that_fails_for_long_is_named_and_what_came_whole_is_kept(
    hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve
) -> None:
    hub.plant("GET", _content(hub_module, files, LAYER_0), hub_module.Fault(status=503), times=3)
    message = _fault(lambda: resolve(num_attempts=3, num_workers=1))
    assert f"{LAYER_0} of owner/name could not be fetched: {hub.endpoint} does not answer" in message
    assert "503" in message
    hub.forget()
    assert (resolve() / LAYER_0).read_bytes() == files[LAYER_0]
    assert _shards_asked(hub) == list(SHARDS)


# What is verified


def test_a_corrupted_file_is_fetched_anew_once(
    hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    hub.plant("GET", _content(hub_module, files, LAYER_0), hub_module.Fault(is_corrupt=True))
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        folder = resolve()
    assert (folder / LAYER_0).read_bytes() == files[LAYER_0]
    assert _ranges(hub, LAYER_0) == [None, None]
    assert f"{LAYER_0} came corrupted" in caplog.text


@pytest.mark.parametrize(("name", "kind"), [(LAYER_0, "sha256"), ("tokenizer.json", "git sha1")])
def test_a_file_that_is_corrupted_twice_is_named_and_not_kept(
    name: str, kind: str, hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve, tmp_path: Path
) -> None:
    path = _content(hub_module, files, name) if name == LAYER_0 else name
    hub.plant("GET", path, hub_module.Fault(is_corrupt=True), times=2)
    message = _fault(resolve)
    assert f"{name} of owner/name came corrupted twice" in message
    assert (
        f"expected {len(files[name])} bytes of {kind} {hub_module.content_hash(name, files[name])}" in message
    )
    assert not list(tmp_path.rglob(name))
    assert not list(tmp_path.rglob(f"{hub_module.content_hash(name, files[name])}*[!k]"))


def test_a_cached_file_of_another_size_is_fetched_anew(files: Files, resolve: Resolve) -> None:
    shard = resolve() / LAYER_0
    shard.resolve().write_bytes(files[LAYER_0][:-1])
    assert (resolve() / LAYER_0).read_bytes() == files[LAYER_0]


@pytest.mark.parametrize("place", ["snapshot", "blob", "part"])
def test_a_link_out_of_the_cache_is_neither_read_nor_written(
    place: str, hub_module: ModuleType, files: Files, resolve: Resolve, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(files[LAYER_0][: CUT if place == "part" else None])
    before = outside.read_bytes()
    shard = resolve() / LAYER_0
    blob = shard.resolve()
    shard.unlink()
    blob.unlink()
    link = {"snapshot": shard, "blob": blob, "part": blob.with_name(f"{blob.name}.incomplete")}[place]
    link.symlink_to(outside)
    again = resolve() / LAYER_0
    assert again.read_bytes() == files[LAYER_0]
    assert again.resolve().is_relative_to((tmp_path / "cache").resolve())
    assert outside.read_bytes() == before


def test_a_store_that_gives_nothing_by_xet_says_what_to_set(
    hub: Any, files: Files, access: HubAccess, tmp_path: Path
) -> None:
    pytest.importorskip("hf_xet")
    # The content-addressed store that is offered gives no token.
    hub.add("owner/xet", files, offers_xet=True)
    message = _fault(lambda: resolve_model("owner/xet", access=access))
    assert "could not be fetched by xet" in message
    assert "Set HF_HUB_DISABLE_XET=1" in message
    folder = _run(tmp_path, "owner/xet", HF_ENDPOINT=hub.endpoint, HF_HUB_DISABLE_XET="1").stdout.strip()
    assert {shard: (Path(folder) / shard).read_bytes() for shard in SHARDS} == {
        shard: files[shard] for shard in SHARDS
    }


def test_two_at_once_fetch_every_shard_once(
    hub: Any, hub_module: ModuleType, files: Files, resolve: Resolve
) -> None:
    # So slow that the other asks before it is there.
    hub.plant("GET", _content(hub_module, files, LAYER_0), hub_module.Fault(pause_s=0.1), times=2)
    with ThreadPoolExecutor(2) as pool:
        first, second = pool.submit(resolve), pool.submit(resolve)
        assert first.result() == second.result()
    assert sorted(one.file for one in hub.asked("GET") if one.file in SHARDS) == list(SHARDS)


# The disk


def test_a_disk_that_is_too_small_is_found_before_a_shard_is_fetched(
    hub: Any, access: HubAccess, files: Files
) -> None:
    hub.add("owner/huge", files, claimed_sizes={LAYER_0: 10**18})
    message = _fault(lambda: resolve_model("owner/huge", access=access))
    assert "too small for what is missing of owner/huge: expected 1000.0 PB for 3 files, found" in message
    assert "free. Make room" in message
    assert _shards_asked(hub) == []


@pytest.mark.usefixtures("resolve")
def test_a_file_that_cannot_be_stored_says_where(hub: Any, tmp_path: Path) -> None:
    limit = "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))"
    output = _run(tmp_path, before=limit, HF_ENDPOINT=hub.endpoint).stdout
    assert f"of owner/name cannot be stored in {tmp_path / 'hub'}: found [Errno 27]" in output
    assert "set HF_HOME to another disk" in output


# Without the hub


def test_no_hub_and_nothing_cached_is_no_missing_model(tmp_path: Path) -> None:
    # Port 9 of this machine: nothing listens there, and nothing leaves the machine.
    access = HubAccess(endpoint="http://127.0.0.1:9", cache_dir=tmp_path, first_delay_s=0.01)
    message = _fault(lambda: resolve_model("owner/name", access=access))
    assert "the hub's model owner/name could not be fetched: http://127.0.0.1:9 does not answer" in message
    assert "no model" not in message
    assert "sharded" not in message


def test_no_hub_and_all_cached_is_the_cached_model(
    resolve: Resolve, caplog: pytest.LogCaptureFixture
) -> None:
    folder = resolve(layers=range(1))
    with caplog.at_level(logging.WARNING, "minimax_tools"):
        assert resolve(layers=range(1), endpoint="http://127.0.0.1:9") == folder
    assert f"using the cached commit {folder.name[:8]} of owner/name" in caplog.text


def test_a_refusal_is_not_covered_by_the_cache(hub: Any, hub_module: ModuleType, resolve: Resolve) -> None:
    resolve(layers=range(1))
    hub.plant("GET", "/api/", hub_module.Fault(status=403))
    assert "the hub forbids it" in _fault(lambda: resolve(layers=range(1)))


def test_offline_what_is_cached_is_used_and_what_is_missing_is_named(hub: Any, resolve: Resolve) -> None:
    folder = resolve(layers=range(1))
    hub.forget()
    assert resolve(layers=range(1), is_offline=True) == folder
    assert resolve(f"owner/name@{folder.name}", layers=range(1), is_offline=True) == folder
    message = _fault(lambda: resolve(is_offline=True))
    assert f"lacks {LAYER_1} of owner/name, and the hub is not asked" in message
    assert "HF_HUB_OFFLINE" in message
    assert hub.log == []


@pytest.mark.parametrize("kept", [(), (LAYER_0,)])
def test_offline_shards_without_their_index_are_not_taken_for_all(
    kept: tuple[str, ...], access: HubAccess, resolve: Resolve
) -> None:
    del resolve
    folder = fetch_files("owner/name", ["config.json", *kept], access=access)["config.json"].parent
    assert not (folder / INDEX).exists()
    offline = dataclasses.replace(access, is_offline=True)
    assert f"lacks {INDEX} of owner/name" in _fault(lambda: resolve_model("owner/name", access=offline))


# The environment, which huggingface_hub reads when it is imported: each of these runs in a process of its own

_PROGRAM = """
{before}
import logging, sys
logging.basicConfig(format="%(message)s")
logging.getLogger("minimax_tools").setLevel({level})
from minimax_tools.hub.checkpoint_folder import resolve_model
from minimax_tools.errors import CheckpointError
try:
    print(resolve_model(sys.argv[1]))
except CheckpointError as error:
    print(error)
"""


def _run(
    home: Path,
    model: str = "owner/name",
    *,
    before: str = "",
    level: str = "logging.INFO",
    **environment: str,
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(**_process(home, model, before, level, environment), capture_output=True, text=True)


def _process(home: Path, model: str, before: str, level: str, environment: dict[str, str]) -> dict[str, Any]:
    unset = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    path = os.pathsep.join((str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])))
    return {
        "args": [sys.executable, "-c", _PROGRAM.format(before=before, level=level), model],
        "env": {**unset, "HF_HOME": str(home), "PYTHONPATH": path, **environment},
        "cwd": home,
        "check": True,
    }


def test_endpoint_token_and_cache_are_those_of_the_environment(
    hub: Any, hub_module: ModuleType, files: Files, tmp_path: Path
) -> None:
    hub.add("owner/name", files, is_gated=True)
    token = hub_module.GOOD_TOKEN
    folder = Path(_run(tmp_path, HF_ENDPOINT=hub.endpoint, HF_TOKEN=token).stdout.strip())
    assert folder.parent == tmp_path / "hub" / "models--owner--name" / "snapshots"
    assert {one.token for one in hub.log if not one.path.startswith("/content/")} == {token}
    offline = _run(tmp_path, HF_ENDPOINT=hub.endpoint, HF_HUB_OFFLINE="1")
    assert offline.stdout.strip() == str(folder)


def test_no_hub_and_a_part_cached_is_no_answer(resolve: Resolve) -> None:
    resolve(layers=range(1))
    assert "does not answer" in _fault(lambda: resolve(endpoint="http://127.0.0.1:9"))
