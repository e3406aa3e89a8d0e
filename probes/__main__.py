"""``python -m probes`` is no command; this names those that are."""

import sys

from ia_mech.cli import refuse

if __name__ == "__main__":
    commands = "python -m probes.train, python -m probes.transfer"
    sys.exit(refuse(f"probes holds several commands; use one of {commands}"))
