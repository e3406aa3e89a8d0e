"""``python -m experiments`` is no command; this names those that are."""

import sys
from pathlib import Path

from ia_mech.cli import refuse

if __name__ == "__main__":
    names = sorted(path.parent.name for path in Path(__file__).parent.glob("*/__main__.py"))
    commands = ", ".join(f"python -m experiments.{name}" for name in names)
    sys.exit(refuse(f"experiments holds several commands; use one of {commands}"))
