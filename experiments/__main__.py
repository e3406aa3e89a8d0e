"""``python -m experiments`` is no command; this names what lists those that are."""

import sys

from ia_mech.cli import refuse

if __name__ == "__main__":
    sys.exit(refuse("experiments holds several commands; ia-mech --help lists them"))
