"""Reading total and free memory: the machine's, and cgroup limits of both versions in an invented /proc and /sys."""

from __future__ import annotations

from pathlib import Path

import pytest

from xllm_cli._vmm import host_memory

GIB = 1 << 30
V1_MOUNT = "31 24 0:27 {root} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
V2_MOUNT = "32 24 0:28 {root} /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n"
V1 = ("limit_in_bytes", "usage_in_bytes", "total_inactive_file")
V2 = ("max", "current", "inactive_file")


class Machine:
    """An invented file system: 16 GiB of RAM, 10 available."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("/proc/meminfo", f"MemTotal:  {16 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {10 << 20} kB\n")

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def join(self, mountinfo: str, cgroup: str) -> None:
        self.write("/proc/self/mountinfo", "22 1 8:1 / / rw - ext4 /dev/sda rw\n" + mountinfo)
        self.write("/proc/self/cgroup", cgroup)

    def limit(self, folder: str, version: tuple[str, str, str], limit: int | str, usage: int, cache: int = 0) -> None:
        names = {version[0]: str(limit), version[1]: str(usage), "stat": f"cache 5\n{version[2]} {cache}\n"}
        for name, text in names.items():
            self.write(f"{folder}/memory.{name}", text + "\n")

    def read(self) -> tuple[int, int]:
        return host_memory(str(self.root))


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def test_without_cgroups_the_machine_counts(machine: Machine) -> None:
    assert machine.read() == (16 * GIB, 10 * GIB)


def test_this_machine_has_memory() -> None:
    total, free = host_memory()
    assert 0 < free < total


def test_the_smallest_limit_on_the_way_up_counts(machine: Machine) -> None:
    machine.join(V1_MOUNT.format(root="/"), "4:memory:/pod/app\n0::/\n")
    base = "/sys/fs/cgroup/memory"
    machine.limit(base, V1, 9223372036854771712, 15 * GIB)
    machine.limit(f"{base}/pod", V1, 4 * GIB, 1 * GIB)
    machine.limit(f"{base}/pod/app", V1, 8 * GIB, 1 * GIB)
    assert machine.read() == (4 * GIB, 3 * GIB)


def test_version_two_says_max_for_no_limit(machine: Machine) -> None:
    machine.join(V2_MOUNT.format(root="/"), "0::/user/app\n")
    machine.limit("/sys/fs/cgroup/user", V2, "max", 9 * GIB)
    machine.limit("/sys/fs/cgroup/user/app", V2, 6 * GIB, 2 * GIB)
    assert machine.read() == (6 * GIB, 4 * GIB)
    machine.limit("/sys/fs/cgroup/user/app", V2, "max", 2 * GIB)
    assert machine.read() == (16 * GIB, 10 * GIB)


def test_page_cache_counts_as_free_when_it_is_tight(machine: Machine) -> None:
    machine.join(V2_MOUNT.format(root="/"), "0::/app\n")
    machine.limit("/sys/fs/cgroup/app", V2, 4 * GIB, 4 * GIB - 100, cache=2 * GIB)
    assert machine.read() == (4 * GIB, 2 * GIB + 100)
    machine.limit("/sys/fs/cgroup/app", V2, 4 * GIB, 5 * GIB)
    assert machine.read() == (4 * GIB, 0)


def test_free_memory_falls_evenly_as_usage_grows(machine: Machine) -> None:
    machine.join(V2_MOUNT.format(root="/"), "0::/app\n")
    seen = []
    for tenths in range(41):
        machine.limit("/sys/fs/cgroup/app", V2, 4 * GIB, tenths * GIB // 10, cache=min(tenths * GIB // 10, 2 * GIB))
        seen.append(machine.read()[1])
    assert seen == sorted(seen, reverse=True)
    assert (seen[0], seen[20], seen[40]) == (4 * GIB, 4 * GIB, 2 * GIB)


def test_where_the_kernel_begins_to_throttle_is_a_limit_too(machine: Machine) -> None:
    machine.join(V2_MOUNT.format(root="/"), "0::/app\n")
    machine.limit("/sys/fs/cgroup/app", V2, 8 * GIB, 2 * GIB)
    machine.write("/sys/fs/cgroup/app/memory.high", f"{5 * GIB}\n")
    assert machine.read() == (5 * GIB, 3 * GIB)
    machine.write("/sys/fs/cgroup/app/memory.high", "max\n")
    assert machine.read() == (8 * GIB, 6 * GIB)


def test_version_one_tells_a_limit_above_what_a_container_sees(machine: Machine) -> None:
    machine.join(V1_MOUNT.format(root="/pod/app"), "4:memory:/pod/app\n")
    base = "/sys/fs/cgroup/memory"
    machine.limit(base, V1, 9223372036854771712, 1 * GIB)
    machine.write(f"{base}/memory.stat", f"cache 5\nhierarchical_memory_limit {3 * GIB}\ntotal_inactive_file 0\n")
    assert machine.read() == (3 * GIB, 2 * GIB)


def test_both_versions_at_once_and_the_smaller_counts(machine: Machine) -> None:
    machine.join(V1_MOUNT.format(root="/") + V2_MOUNT.format(root="/"), "4:memory:/a\n0::/b\n")
    machine.limit("/sys/fs/cgroup/memory/a", V1, 6 * GIB, 1 * GIB)
    machine.limit("/sys/fs/cgroup/b", V2, 5 * GIB, 2 * GIB)
    assert machine.read() == (5 * GIB, 3 * GIB)


def test_a_group_whose_name_only_begins_like_the_mount_is_looked_up_at_the_mount(machine: Machine) -> None:
    machine.join(V1_MOUNT.format(root="/docker/abc"), "7:memory:/docker/abcd\n")
    machine.limit("/sys/fs/cgroup/memory", V1, 2 * GIB, 1 * GIB)
    machine.limit("/sys/fs/cgroup/memoryd", V1, 1 * GIB, 1 * GIB)
    assert machine.read() == (2 * GIB, 1 * GIB)


@pytest.mark.parametrize(
    ("root", "path"), [("/docker/abc", "/docker/abc"), ("/docker/abc", "/docker/abc/inner"), ("/", "/")]
)
def test_inside_a_container_the_mount_is_a_part_of_the_tree(machine: Machine, root: str, path: str) -> None:
    machine.join(V1_MOUNT.format(root=root), f"7:cpu,memory:{path}\n")
    machine.limit("/sys/fs/cgroup/memory", V1, 2 * GIB, 1 * GIB)
    assert machine.read() == (2 * GIB, 1 * GIB)


def test_a_path_outside_the_mount_falls_back_to_the_mount(machine: Machine) -> None:
    machine.join(V2_MOUNT.format(root="/"), "0::/../elsewhere\n")
    machine.limit("/sys/fs/cgroup", V2, 3 * GIB, 1 * GIB)
    assert machine.read() == (3 * GIB, 2 * GIB)
