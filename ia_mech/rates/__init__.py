"""How often the user turns of a run are genuine, with intervals over sources.

``read_runs`` joins the turns of runs with a judge's verdicts and people's labels, ``estimates``
turns that into one row per estimate, ``write`` keeps the rows in a file and ``print_rates`` shows
them. ``examples_by_category`` draws turns to read. Nothing here computes an interval; that is what
:mod:`ia_mech.stats` is for.

Names are imported when they are asked for, so that ``--help`` needs neither torch nor pandas.
"""

from importlib import import_module

_HOME = {
    "Example": "show",
    "Judged": "load",
    "Row": "compute",
    "estimates": "compute",
    "examples_by_category": "show",
    "frame_of": "files",
    "print_examples": "show",
    "print_rates": "show",
    "read_runs": "load",
    "write": "files",
}
__all__ = sorted(_HOME)


def __getattr__(name: str):
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
