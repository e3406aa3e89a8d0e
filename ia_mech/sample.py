"""``python -m ia_mech.sample``: the main job's command line, see ``ia_mech/collect/command.py``.

It isn't imported: in Python ``ia_mech.sample`` is the function.
"""

if __name__ != "__main__":
    raise ImportError("ia_mech.sample is a command and a function: from ia_mech import sample")

import sys

from ia_mech.collect.command import main

sys.exit(main())
