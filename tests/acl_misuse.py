"""Every way to break ACL's contract that the emulator knows, each with the vendor's code and the emulator's rule.

`python acl_misuse.py HOME` commits all of them, each in a process of its own: in strict mode that is aborted.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
from pathlib import Path

import acl_memory_misuse
import acl_queue_misuse
from acl_calls import Acl, AclError
from ascendcl import Emulator

EARLY = acl_queue_misuse.EARLY
MISUSES = acl_memory_misuse.MISUSES | acl_queue_misuse.MISUSES | EARLY


def commit_in_child(acl: Acl, name: str) -> None:
    """Ends the process: at the latest with a line on stdout, the code and the rule."""
    if name not in EARLY:
        acl.start()
    code = 0
    try:
        MISUSES[name].commit(acl)
    except AclError as error:
        code = error.code
    print(code, acl.emulator.violations()[-1]["rule"], flush=True)
    os._exit(0)


def main(home: str) -> None:
    """Commits each misuse in a child of its own; prints {name: [wait status, everything the child said]}."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    acl = Acl(Emulator(Path(home)))
    outcomes = {}
    for name in MISUSES:
        with tempfile.TemporaryFile("w+") as said:
            child = os.fork()
            if child == 0:
                os.dup2(said.fileno(), 1)
                os.dup2(said.fileno(), 2)
                commit_in_child(acl, name)
            _, status = os.waitpid(child, 0)
            said.seek(0)
            outcomes[name] = (os.waitstatus_to_exitcode(status), said.read())
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main(sys.argv[1])
