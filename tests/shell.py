"""Command lines run in this process, and what they may leave behind."""

import hashlib
import importlib.util
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from ia_mech.run import Run


class Outcome(NamedTuple):
    """Exit status, stdout and stderr of one command."""

    status: int
    out: str
    err: str

    @property
    def run(self) -> Run:
        """The run that the command said it wrote."""
        assert self.status == 0, self.err
        return Run.open(re.search(r"^run: (.*)$", self.out, re.MULTILINE)[1])


def call(main: Callable[[list[str]], int], words: list[str], capfd) -> Outcome:
    """Exit status and output of a command line."""
    capfd.readouterr()
    try:
        status = main(words)
    except SystemExit as stopped:
        status = stopped.code
    return Outcome(status, *capfd.readouterr())


def files(folder: Path) -> dict[str, str]:
    """Every file below a folder with a hash of its content; locks hold nothing."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.suffix != ".lock" and path.name != ".lock"
    }


def worked(name: str) -> ModuleType:
    """An experiment of docs/, as its reader would run it."""
    file = Path(__file__).parent.parent / "docs" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, file)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def refusal(outcome: Outcome) -> str:
    """The one line of a refusal, without its ``error: ``, and without lines that were printed
    before it while a model was loaded."""
    assert outcome.status == 2, outcome
    assert outcome.out == ""
    err = re.sub(
        r"\A((loading \S+|reading runs and results) …\n|note: .*\n)*",
        "",
        outcome.err,
    )
    assert err.count("\n") == 1 and err.endswith("\n"), outcome.err
    assert err.startswith("error: ") and "; " in err and "Traceback" not in err
    return err.removeprefix("error: ").rstrip("\n")
