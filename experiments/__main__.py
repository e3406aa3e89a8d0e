"""``python -m experiments`` is no command; this names those that are."""

import sys
from pathlib import Path

from ia_mech.cli import refuse

if __name__ == "__main__":
    files = sorted(Path(__file__).parent.rglob("*.py"))
    declared = [file for file in files if "\nEXPERIMENT = " in file.read_text(encoding="utf-8")]
    names = [file.parent.name if file.stem == "__main__" else file.stem for file in declared]
    commands = ", ".join(f"python -m experiments.{name}" for name in names)
    sys.exit(refuse(f"experiments holds several commands; use one of {commands}"))
