"""Each rule of the vendor's contract catches a driver that breaks it.

The sources of the acl driver, a line changed as tests/native/acl_mutants.txt says, are compiled with the tour of
tests/native/acl_tour.cc and run on the strict emulator.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from ascendcl import environment
from driver_kinds import acl_library

ROOT = Path(__file__).parents[1]
NATIVE = ROOT / "native" / "vmm"
TOUR = ROOT / "tests" / "native" / "acl_tour.cc"
SOURCES = [NATIVE / name for name in ("acl_api.cc", "acl_driver.cc", "address_map.cc", "driver.cc")]
FLAGS = ("-std=gnu++20", "-O0")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # a second or two of compiling each; the first makes it all


class Mutant(NamedTuple):
    """`old` becomes `new` in `source`; the run has to end with `complaint`, an expression."""

    source: str
    old: str
    new: str
    complaint: str


def read_mutants() -> dict[str, Mutant]:
    """By what is wrong with them."""
    _, *blocks = (ROOT / "tests" / "native" / "acl_mutants.txt").read_text().split("\n\n")
    mutants = {}
    for title, *lines in (block.splitlines() for block in blocks):
        name, source = title.split(" · ")
        parts = ["\n".join(line[2:] for line in lines if line[0] == mark) for mark in "-+!"]
        mutants[name] = Mutant(source, *parts)
    return mutants


MUTANTS = read_mutants()


class Workshop:
    """Compiles mutants; what they share is compiled once, the headers too: they are most of the work."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.library = acl_library()
        call("c++", *FLAGS, "-x", "c++-header", str(NATIVE / "acl_driver.h"), "-o", str(folder / "headers.h.gch"))
        self.objects = {source.name: self.compile(source, folder) for source in (TOUR, *SOURCES)}

    def compile(self, source: Path, folder: Path) -> Path:
        made = folder / f"{source.stem}.o"
        headers = str(self.folder / "headers.h")
        call("c++", *FLAGS, "-include", headers, f"-I{NATIVE}", "-c", str(source), "-o", str(made))
        return made

    def tour(self, mutant: Mutant | None, folder: Path) -> subprocess.CompletedProcess[str]:
        """What the tour says of the driver, broken by `mutant`."""
        objects = dict(self.objects)
        if mutant is not None:
            text = (NATIVE / mutant.source).read_text()
            assert text.count(mutant.old) == 1, f"{mutant.old!r} is not once in {mutant.source}"
            broken = folder / mutant.source
            broken.write_text(text.replace(mutant.old, mutant.new))
            objects[mutant.source] = self.compile(broken, folder)
        program = folder / "tour"
        call("c++", *map(str, objects.values()), "-o", str(program), "-ldl", "-pthread")
        knobs = environment(self.library.parents[1], mode="strict", devices=2, hbm_bytes=1 << 30)
        command = [str(program), str(self.library)]
        return subprocess.run(command, env=knobs, capture_output=True, text=True, timeout=60)


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    folder = tmp_path_factory.mktemp("acl")
    yield Workshop(folder)
    shutil.rmtree(folder)


def test_the_driver_keeps_the_contract(workshop: Workshop, tmp_path: Path) -> None:
    done = workshop.tour(None, tmp_path)
    assert (done.returncode, done.stdout) == (0, "done\n"), done.stderr


@pytest.mark.parametrize("name", MUTANTS)
def test_a_driver_that_breaks_a_rule_is_caught(workshop: Workshop, tmp_path: Path, name: str) -> None:
    done = workshop.tour(MUTANTS[name], tmp_path)
    assert done.returncode != 0 and done.stdout == "", "the tour ended well"
    assert re.search(MUTANTS[name].complaint, done.stderr), done.stderr
