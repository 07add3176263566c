from __future__ import annotations

from pathlib import Path

import psutil
import pytest

from minimax_tools.machine.memory import available_bytes, cgroup_headroom_bytes

MB = 10**6


def write(root: Path, files: dict[str, object]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n", encoding="ascii")
    return root


def second_version(folder: str, **files: object) -> dict[str, object]:
    return {f"sys/fs/cgroup/{folder}memory.{name}": content for name, content in files.items()}


def first_version(folder: str, **files: object) -> dict[str, object]:
    return {f"sys/fs/cgroup/memory/{folder}memory.{name}": content for name, content in files.items()}


def test_limit_less_what_is_used_is_left(tmp_path: Path) -> None:
    files = second_version("job/", max=300 * MB, current=120 * MB)
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": "0::/job", **files})) == 180 * MB


def test_page_cache_counts_as_free(tmp_path: Path) -> None:
    stat = f"anon {40 * MB}\nfile {70 * MB}\nactive_file {20 * MB}\ninactive_file {50 * MB}"
    files = second_version("job/", max=100 * MB, current=100 * MB, stat=stat)
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": "0::/job", **files})) == 70 * MB


def test_tightest_group_above_counts(tmp_path: Path) -> None:
    files = {
        **second_version("pod/job/", max="max", current=10 * MB),
        **second_version("pod/", max=200 * MB, current=150 * MB),
        **second_version("", max=900 * MB, current=150 * MB),
    }
    root = write(tmp_path, {"proc/self/cgroup": "0::/pod/job", **files})
    assert cgroup_headroom_bytes(root=root) == 50 * MB


def test_path_that_a_container_does_not_see_leads_to_its_mount(tmp_path: Path) -> None:
    files = second_version("", max=300 * MB, current=100 * MB)
    root = write(tmp_path, {"proc/self/cgroup": "0::/system.slice/docker-1f.scope", **files})
    assert cgroup_headroom_bytes(root=root) == 200 * MB


def test_first_version_is_read_too(tmp_path: Path) -> None:
    stat = f"total_active_file {MB}\ntotal_inactive_file {2 * MB}\nactive_file 0"
    files = first_version("box/", limit_in_bytes=100 * MB, usage_in_bytes=90 * MB, stat=stat)
    groups = "9:name=systemd:/\n5:cpu,memory:/box\n0::/"
    assert cgroup_headroom_bytes(root=write(tmp_path, {"proc/self/cgroup": groups, **files})) == 13 * MB


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"proc/self/cgroup": "0::/job"},
        {"proc/self/cgroup": "0::/job", **second_version("job/", max="max", current=5)},
        {"proc/self/cgroup": "0::/job", **second_version("job/", max=100)},
    ],
)
def test_without_a_limit_there_is_none(files: dict[str, object], tmp_path: Path) -> None:
    assert cgroup_headroom_bytes(root=write(tmp_path, files)) is None


def test_available_memory_is_the_groups_where_that_is_less(tmp_path: Path) -> None:
    tight = second_version("job/", max=3 * MB, current=MB)
    assert available_bytes(root=write(tmp_path / "tight", {"proc/self/cgroup": "0::/job", **tight})) == 2 * MB
    wide = second_version("job/", max=10**18, current=MB)
    total = psutil.virtual_memory().total
    root = write(tmp_path / "wide", {"proc/self/cgroup": "0::/job", **wide})
    assert 0 < available_bytes(root=root) <= total
    assert 0 < available_bytes() <= total
