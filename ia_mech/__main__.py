"""``python -m ia_mech`` is ``ia-mech``."""

import sys

from ia_mech.console import main

if __name__ == "__main__":
    sys.exit(main())
