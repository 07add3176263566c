from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from minimax_tools.errors import CheckpointError
from minimax_tools.hub.access import HubAccess
from minimax_tools.hub.checkpoint_folder import described_source
from minimax_tools.hub.snapshot import HubSnapshot, NoRangesError

MODEL, SHARD = "owner/name", "model.safetensors"
DATA = bytes(range(256)) * 2_000
CUT = 150_000


@pytest.fixture
def access(hub: Any, tmp_path: Path) -> HubAccess:
    hub.add(MODEL, {"config.json": b"{}", SHARD: DATA})
    return HubAccess(endpoint=hub.endpoint, cache_dir=tmp_path / "cache", first_delay_s=0.01, timeout_s=60)


def read(access: HubAccess, start: int, stop: int) -> bytes:
    snapshot = described_source(MODEL, access=access)
    assert isinstance(snapshot, HubSnapshot)
    return snapshot.read(SHARD, start, stop)


@pytest.mark.parametrize(("start", "stop"), [(0, 8), (500, 300_000), (7, 7)])
def test_a_range_is_what_comes_and_all_that_comes(access: HubAccess, hub: Any, start: int, stop: int) -> None:
    assert read(access, start, stop) == DATA[start:stop]
    asked = [request.range for request in hub.asked("GET", SHARD)]
    assert asked == ([f"bytes={start}-{stop - 1}"] if stop > start else [])


@pytest.mark.parametrize("ending", ["close", "reset"])
def test_a_range_that_breaks_off_is_asked_for_again(
    access: HubAccess, hub: Any, hub_module: ModuleType, ending: str
) -> None:
    hub.plant("GET", "/content/", hub_module.Fault(after_bytes=CUT, ending=ending), times=2)
    assert read(access, 100, 500_000) == DATA[100:500_000]
    assert [one.range for one in hub.asked("GET", SHARD)] == ["bytes=100-499999"] * 3


def test_a_server_without_ranges_is_named_and_its_file_left_alone(
    access: HubAccess, hub: Any, hub_module: ModuleType
) -> None:
    hub.plant("GET", "/content/", hub_module.Fault(ignores_range=True))
    with pytest.raises(NoRangesError, match="gives no part of model.safetensors.*status 200"):
        read(access, 0, 8)
    assert len(hub.asked("GET", SHARD)) == 1


def test_a_hub_that_stays_down_is_a_network_error(
    access: HubAccess, hub: Any, hub_module: ModuleType
) -> None:
    hub.plant("GET", "/content/", hub_module.Fault(status=503), times=99)
    with pytest.raises(CheckpointError, match="does not answer, or breaks off") as caught:
        read(access, 0, 8)
    assert not isinstance(caught.value, NoRangesError)


def test_a_part_of_another_file_is_not_taken(access: HubAccess, hub: Any) -> None:
    hub.add(MODEL, {"config.json": b"{}", SHARD: DATA}, claimed_sizes={SHARD: len(DATA) + 1})
    with pytest.raises(CheckpointError, match=r"bytes 0 to 7 of 512001 were asked for"):
        read(access, 0, 8)
