"""``python -m experiments`` is no command; this names those that are."""

import sys
from pathlib import Path

from ia_mech.cli import refuse

if __name__ == "__main__":
    files = sorted(Path(__file__).parent.glob("*.py"))
    commands = [file.stem for file in files if '__name__ == "__main__"' in file.read_text("utf-8")]
    named = ", ".join(f"experiments.{name}" for name in commands if name != "__main__")
    sys.exit(refuse(f"experiments holds several commands; use one of {named}, with python -m"))
