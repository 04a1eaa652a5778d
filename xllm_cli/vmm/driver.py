"""Opens the driver of a device. Owns the choice of mode and library; knows no pages, no tensors and no policy.

The verbs, their preconditions and what failure means are written once, in native/vmm/driver.h. `VmmError` carries
`op, code, address, text`; `VmmShortage` is its expected kind: a miss, not a failure.
"""

from __future__ import annotations

import glob
import logging
import os
from typing import Any

from xllm_cli._vmm import (
    AclDriver,
    Driver,
    DriverInfo,
    FaultyDriver,
    HostDriver,
    VmmError,
    VmmShortage,
    probe_acl,
    probe_host,
)
from xllm_cli.errors import DeviceError

__all__ = [
    "HUGE_PAGE_BYTES",
    "Driver",
    "DriverInfo",
    "FaultyDriver",
    "VmmError",
    "VmmShortage",
    "open_acl_driver",
    "open_driver",
    "open_host_driver",
    "probe_acl",
    "probe_host",
]

HUGE_PAGE_BYTES = 2 << 20

SMALL_PAGES_NOTE = "If other processes take the last free memory, the kernel may kill this one."

ACL_NODES = ("/dev/davinci[0-9]*", "/dev/davinci_manager", "/dev/devmm_svm", "/dev/hisi_hdc")
ACL_ENVIRONMENT = "/usr/local/Ascend/ascend-toolkit/set_env.sh"

logger = logging.getLogger(__name__)


def open_driver(device: str, **options: Any) -> Driver:
    """The driver of `device`: "cpu" (options of `open_host_driver`) or "npu" (of `open_acl_driver`).

    Raises DeviceError when the device cannot be used, with what to do about it.
    """
    if device == "cpu":
        return open_host_driver(**options)
    if device == "npu":
        return open_acl_driver(**options)
    raise DeviceError(f"no virtual-memory driver for device {device!r}: not supported yet, use --device=cpu")


def open_host_driver(
    *,
    mode: str = "auto",
    page_bytes: int | None = None,
    total_bytes: int | None = None,
    poison: int | None = None,
    vma_limit: int | None = None,
) -> Driver:
    """Host memory as a device.

    `mode`: "huge" (2 MiB kernel pages; running out of memory is an error code), "4k" (everywhere; running out can be a
    SIGKILL), "auto" = huge where it works. `page_bytes` None is 2 MiB; no multiple of it implies 4k under auto.
    `total_bytes` caps the pages created and `info().total`. `poison` fills fresh pages with that byte. `vma_limit`
    bounds the process's kernel mappings (None: 70 % of vm.max_map_count).

    Raises DeviceError when the mode cannot be used, ValueError for a page size that cannot be.
    """
    if mode not in ("auto", "huge", "4k"):
        raise DeviceError(f"host_page_mode={mode} is not one of auto, huge, 4k")
    size = HUGE_PAGE_BYTES if page_bytes is None else page_bytes
    try:
        return HostDriver(
            huge=_use_huge(mode, size),
            page_bytes=size,
            total_bytes=total_bytes or 0,
            poison=poison,
            vma_limit=vma_limit or 0,
        )
    except VmmError as error:
        raise DeviceError(f"host memory cannot be managed here: {error}") from error


def open_acl_driver(
    *,
    device_index: int = 0,
    page_bytes: int | None = None,
    total_bytes: int | None = None,
    library: str | os.PathLike[str] | None = None,
) -> Driver:
    """The memory of an Ascend device.

    `device_index` counts the devices the vendor's runtime shows, which ASCEND_RT_VISIBLE_DEVICES renumbers from 0.
    `page_bytes` None is what the device gives (2 MiB). `total_bytes` caps the pages created and `info().total`.
    `library` is the path of libascendcl.so (None: the loader's, then that of the toolkit's environment).

    Raises DeviceError without the library, without a device or when the device fails, ValueError for a page size that
    cannot be.
    """
    path = "" if library is None else os.fspath(library)
    probe = probe_acl(path)
    if probe.num_devices == 0:
        raise DeviceError(_no_acl_device(probe.reason))
    if not 0 <= device_index < probe.num_devices:
        shown = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "unset")
        raise DeviceError(
            f"npu:{device_index} is not there: the runtime shows {probe.num_devices} device(s), numbered from 0 "
            f"(ASCEND_RT_VISIBLE_DEVICES is {shown}); use a lower --node_rank or make more devices visible"
        )
    try:
        return AclDriver(library=path, device=device_index, page_bytes=page_bytes, total_bytes=total_bytes or 0)
    except VmmError as error:
        raise DeviceError(f"npu:{device_index} cannot be used: {error}") from error


def _no_acl_device(reason: str) -> str:
    missing = [node for node in ACL_NODES if not glob.glob(node)]
    nodes = f"missing device nodes: {', '.join(missing)}" if missing else "all device nodes are there"
    return (
        f"no npu can be used through libascendcl.so ({reason}; {nodes}): on an Ascend host run "
        f"`source {ACL_ENVIRONMENT}` first, into a container pass the nodes, or use --device=cpu"
    )


def _use_huge(mode: str, page_bytes: int) -> bool:
    """Whether to use huge pages; a fall back to 4k pages is said in the log, with what it costs."""
    if mode == "4k" or (mode == "auto" and page_bytes % HUGE_PAGE_BYTES):
        return False
    probe = probe_host()
    if not probe.huge and mode == "huge":
        raise DeviceError(f"host_page_mode=huge does not work here: {probe.reason}; use --host_page_mode=4k")
    if not probe.huge:
        logger.warning("huge pages do not work here (%s): using 4k pages. %s", probe.reason, SMALL_PAGES_NOTE)
    return probe.huge
