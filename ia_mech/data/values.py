"""What cells of data files hold: gaps, JSON texts, and copies that JSON can hold."""

import math
from typing import Any

from ia_mech.errors import UserError
from ia_mech.untrusted import parse_json

DEPTH = 100  # levels of a row's other values; what copies them later recurses, too


def is_null(value: Any) -> bool:
    """Whether a value is null, or NaN or an infinity, with which columnar files mark a gap."""
    return value is None or (isinstance(value, float) and not math.isfinite(value))


def is_gap(value: Any) -> bool:
    """Whether a value says nothing: null, an empty text, or a list or object of nothing else.

    Columnar files pad every record with the keys of all others.
    """
    if isinstance(value, dict):
        return all(map(is_gap, value.values()))
    if isinstance(value, list | tuple):
        return all(map(is_gap, value))
    return is_null(value) or (isinstance(value, str) and not value.strip())


def list_of(value: Any, kind: type) -> bool:
    """Whether a value is a list that holds this kind alone, and holds something."""
    return isinstance(value, list) and bool(value) and all(isinstance(v, kind) for v in value)


def from_json(value: Any) -> Any:
    """The list or object whose JSON a text is, as columnar files often have them; else the value
    itself."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        try:
            return parse_json(value, "", "")
        except UserError:
            pass
    return value


def jsonable(value: Any, depth: int = 0) -> Any:
    """A copy that JSON can hold: nulls inside dicts dropped, dates as ISO text.

    Nulls go because columnar files pad every record with the keys of all others (IFBench: 40 keys,
    of which a row uses one or two).

    Raises:
        RecursionError: nested deeper than :data:`DEPTH`; ``depth`` is that of ``value``.
    """
    if depth > DEPTH:
        raise RecursionError(f"nested deeper than {DEPTH} levels")
    if hasattr(value, "tolist"):  # of NumPy
        value = value.tolist()
    if isinstance(value, dict):
        return {str(k): jsonable(v, depth + 1) for k, v in value.items() if not is_null(v)}
    if isinstance(value, list | tuple):
        return [jsonable(v, depth + 1) for v in value]
    if is_null(value):
        return None
    if hasattr(value, "isoformat"):  # dates and times
        return value.isoformat()
    return value if isinstance(value, str | int | float) else str(value)


def json_type(value: Any) -> str:
    """What an error calls a value."""
    names = {"NoneType": "null", "dict": "an object", "list": "a list", "str": "text"}
    return names.get(type(value).__name__, "empty" if value == "" else type(value).__name__)
