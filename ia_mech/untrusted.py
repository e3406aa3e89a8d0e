"""Parse text that data and models wrote, and make it safe to show."""

import json
import re
import unicodedata
from typing import Any

from ia_mech.errors import UserError

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_FORMULA = frozenset("=+-@")
# Line ends and tabs, and the joiners that scripts and emoji need.
_KEPT = frozenset("\n\t\u200c\u200d")
_UNSEEN = frozenset(("Cc", "Cf", "Cs", "Zl", "Zp"))


def parse_json(text: str | bytes, place: str, remedy: str) -> Any:
    """The value of a JSON text (bytes: in UTF-8, perhaps with a byte order mark).

    Stricter than ``json.loads``, which accepts NaN and infinities, a name given twice in one object
    (the first value is lost) and half a surrogate pair (which no file can hold).

    Args:
        text: the whole text.
        place: where it stands, such as ``chats.jsonl line 3``; opens the error.
        remedy: ends the error.

    Raises:
        UserError: the text isn't JSON in this sense.
    """
    try:
        if isinstance(text, bytes):
            text = text.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_constant)
        if _SURROGATE.search(text):  # most are halves of a pair that makes one character
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except json.JSONDecodeError as error:
        reason = f"{error.msg} at character {error.pos + 1}"
    except UnicodeDecodeError as error:
        reason = f"not UTF-8 text: byte {error.object[error.start]:#04x} at {error.start + 1}"
    except UnicodeEncodeError:
        reason = "half a surrogate pair"
    except RecursionError:
        reason = "nested too deeply"
    except ValueError as error:  # also a number of thousands of digits
        reason = str(error).partition(";")[0][:120]
    raise UserError(f"{place} is not JSON ({reason})", remedy)


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:40]!r} is given twice")
    return value


def _constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON number")


def visible(text: str) -> str:
    """The text, with � for each character that can't be seen but changes what is shown.

    These are control characters, bidirectional overrides and marks, zero-width spaces, tags, line
    and paragraph separators. Line ends, tabs and joiners stay.
    """
    return text if text.isprintable() else "".join("�" if _is_unseen(c) else c for c in text)


def escape_unseen(line: str) -> str:
    """The same JSON, with the characters of :func:`visible` written as ``\\u`` escapes."""
    if line.isprintable():
        return line
    return "".join(json.dumps(c)[1:-1] if _is_unseen(c) else c for c in line)


def _is_unseen(character: str) -> bool:
    return character not in _KEPT and unicodedata.category(character) in _UNSEEN


def spreadsheet_safe(text: str) -> str:
    """The text as a cell that no spreadsheet takes for a formula, with nothing hidden in it.

    A text that begins with ``= + - @`` (also full-width, or behind white space) or with a tab or
    line end gets an apostrophe in front, as OWASP advises against CSV injection. All line ends
    become one kind, and :func:`visible` does the rest. Nothing helps if a file is opened with
    another separator than its own.
    """
    text = visible(text.replace("\r\n", "\n").replace("\r", "\n"))
    first = unicodedata.normalize("NFKC", text.lstrip()[:1])
    return f"'{text}" if first in _FORMULA or text.startswith(("\t", "\n")) else text
