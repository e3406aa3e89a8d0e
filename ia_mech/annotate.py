"""``python -m ia_mech.annotate export`` and ``import``: turns for people to label, blind.

The subcommands of ``python -m ia_mech.judge``, under the name of what they are for.
"""

import sys

from ia_mech.judge.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
