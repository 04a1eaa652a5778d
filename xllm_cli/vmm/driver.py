"""Opens the driver of a device. Owns the choice of mode; knows no pages, no tensors and no policy.

The verbs, their preconditions and what failure means are written once, in native/vmm/driver.h. `VmmError` carries
`op, code, address, text`; `VmmShortage` is its expected kind: a miss, not a failure.
"""

from __future__ import annotations

import logging

from xllm_cli._vmm import Driver, DriverInfo, FaultyDriver, HostDriver, VmmError, VmmShortage, probe_host
from xllm_cli.errors import DeviceError

__all__ = ["HUGE_PAGE_BYTES", "Driver", "DriverInfo", "FaultyDriver", "VmmError", "VmmShortage", "open_driver"]

HUGE_PAGE_BYTES = 2 << 20

SMALL_PAGES_NOTE = "If other processes take the last free memory, the kernel may kill this one."

logger = logging.getLogger(__name__)


def open_driver(
    device: str,
    *,
    mode: str = "auto",
    page_bytes: int | None = None,
    total_bytes: int | None = None,
    poison: int | None = None,
    vma_limit: int | None = None,
) -> Driver:
    """The driver of `device` ("cpu"; "npu" and "cuda" are not there yet).

    `mode`: "huge" (2 MiB kernel pages; running out of memory is an error code), "4k" (everywhere; running out can be a
    SIGKILL), "auto" = huge where it works. `page_bytes` None is 2 MiB; no multiple of it implies 4k under auto.
    `total_bytes` caps the pages created and `info().total`. `poison` fills fresh pages with that byte. `vma_limit`
    bounds the process's kernel mappings (None: 70 % of vm.max_map_count).

    Raises DeviceError when the device or the mode cannot be used, ValueError for a page size that cannot be.
    """
    if device != "cpu":
        raise DeviceError(f"no virtual-memory driver for device {device!r}: not supported yet, use --device=cpu")
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
