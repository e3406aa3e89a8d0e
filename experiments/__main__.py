"""``python -m experiments`` is no command; this names those that are."""

import sys
from pathlib import Path

from ia_mech.cli import refuse

if __name__ == "__main__":
    here = Path(__file__).parent
    files = [path for path in here.glob("*.py") if "EXPERIMENT = " in path.read_text("utf-8")]
    names = sorted(
        [path.parent.name for path in here.glob("*/__main__.py")] + [path.stem for path in files]
    )
    commands = ", ".join(f"python -m experiments.{name}" for name in names)
    sys.exit(refuse(f"experiments holds several commands; use one of {commands}"))
