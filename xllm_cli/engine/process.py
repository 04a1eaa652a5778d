"""The engine as a process: from the server's folder to an exit code.

    python -m xllm_cli.engine.process --runtime_dir DIR --death_fd N

DIR holds config.json and the two sockets the server bound (parent.py). One thread owns the engine (loop.py), a second
only watches the death pipe, for when the first is deep in a load or in a long step.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from setproctitle import setproctitle

from xllm_cli import logs
from xllm_cli.core import Fatal, Loading
from xllm_cli.engine.exchange import Exchange
from xllm_cli.engine.loop import Loop
from xllm_cli.engine.parent import Parent
from xllm_cli.errors import XllmError
from xllm_cli.flags import Config

log = logging.getLogger("xllm.engine")

ORPHAN_SECONDS = 2.0  # what the loop has to end by itself once the server is gone
_PR_SET_PDEATHSIG = 1


def run(runtime_dir: Path, death_fd: int) -> int:
    """Load, say Ready, serve. The exit code of the process."""
    started = time.monotonic()
    config = Config.model_validate_json((runtime_dir / "config.json").read_text())
    logs.set_up(config.service)
    parent = Parent(runtime_dir, death_fd)

    def progress(phase: str) -> None:
        parent.send(Loading(phase, time.monotonic() - started))

    try:
        progress("importing torch")
        from xllm_cli.engine.host import Host  # brings torch: seconds, and the server should hear of them
        from xllm_cli.engine.start import build_first, join

        host = Host(*build_first(config, progress, beat=parent.beat))
        _keep_for_good()
        with closing(Exchange(host, join(config))) as exchange:
            parent.send(host.ready)
            Loop(host, parent, exchange).run()
        host.close()
        return 0
    except XllmError as error:
        parent.send(Fatal(str(error), error.exit_code))
        return error.exit_code
    except Exception as error:
        log.exception("the engine failed")
        parent.send(Fatal(f"{type(error).__name__}: {error}", 1))
        return 1
    finally:
        parent.close()


def _die_with_parent() -> None:
    """SIGKILL when the parent dies, also during a long load; the death pipe covers the race before this call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _wait_politely() -> None:
    """Short spins at the barriers of the arithmetic threads, before torch loads OpenMP.

    By default they spin for milliseconds, and beside one other busy process a step of 17 ms then takes 76 ms, 600 at
    times; with short spins 37. Alone it costs about 2 ms. Whoever sets one of these variables decides.
    """
    if not {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & os.environ.keys():
        os.environ["GOMP_SPINCOUNT"] = "1000"


def _load_no_extension() -> None:
    """Keep `import torch` from importing device packages by itself: one whose vendor's libraries are missing makes it
    fail, whatever the device. A device imports its own. Whoever sets the variable decides.
    """
    os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")


def _keep_for_good() -> None:
    """What the start made lives as long as the process: collections need not walk it, a tenth of a second within some
    request's step each time."""
    gc.collect()
    gc.freeze()


def _end_when_orphaned(death_fd: int) -> None:
    """End the process soon after the server closed the pipe or died, whatever the loop is doing then."""

    def watch() -> None:
        poller = select.poll()
        poller.register(death_fd, select.POLLIN)
        poller.poll()
        time.sleep(ORPHAN_SECONDS)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m xllm_cli.engine.process`."""
    parser = argparse.ArgumentParser(prog="xllm engine")
    parser.add_argument("--runtime_dir", type=Path, required=True)
    parser.add_argument("--death_fd", type=int, required=True)
    arguments = parser.parse_args(argv)
    _die_with_parent()
    _end_when_orphaned(arguments.death_fd)
    _wait_politely()
    _load_no_extension()
    os.set_inheritable(arguments.death_fd, False)
    # the server decides when to end; a terminal's Ctrl-C and `pkill xllm` reach this process too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    setproctitle("xllm engine [rank 0]")
    return run(arguments.runtime_dir, arguments.death_fd)


if __name__ == "__main__":
    sys.exit(main())
