"""Pages that are one file: no network, no build step, nothing a text in them could run.

A page is the template ``page.html`` around a body, with its styles, its script and its data inside.
A content security policy allows that one script and that one style sheet, by their hashes, and no
request. Texts that data or models wrote reach the page escaped by Jinja, or as compressed JSON that
the script only ever shows as text.
"""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from ia_mech.untrusted import visible

FOLDER = Path(__file__).parent


def packed(data: Any) -> str:
    """JSON-able data as the page's script reads it: gzip in base64; the same text for the same
    data. An iterator is a list that is never whole in memory. A NaN is refused (``ValueError``):
    JSON has none."""
    file = zlib.compressobj(6, wbits=zlib.MAX_WBITS + 16)  # with the header of gzip
    content = b"".join([*(file.compress(text.encode()) for text in _json(data)), file.flush()])
    return base64.b64encode(content).decode()


def _json(data: Any) -> Iterator[str]:
    """An encoded object in parts; items of iterators, a thousand at a time."""
    if isinstance(data, dict):
        for at, (name, value) in enumerate(data.items()):
            yield ("," if at else "{") + _encoded(name) + ":"
            yield from _json(value)
        yield "}" if data else "{}"
    elif isinstance(data, Iterator):
        opening = "["
        while batch := list(islice(data, 1000)):
            yield opening + _encoded(batch)[1:-1]
            opening = ","
        yield "]" if opening == "," else "[]"
    else:
        yield _encoded(data)


def _encoded(data: Any) -> str:
    return json.dumps(data, ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def image(content: bytes) -> str:
    """An SVG picture as an address. As an image it can neither run scripts nor load anything, and
    its ids can't clash with another picture's."""
    return f"data:image/svg+xml;base64,{base64.b64encode(content).decode()}"


def glossary() -> list[tuple[str, str]]:
    """The words of results with their meanings, of the first table in ``glossary.md``."""
    text = (FOLDER / "glossary.md").read_text(encoding="utf-8").partition("## In the code")[0]
    rows = re.findall(r"^\| \*\*(.+?)\*\* \| (.+?) \|", text, re.MULTILINE)
    return [(word, re.sub("[*`]", "", meaning)) for word, meaning in rows]


def rendered(body: str, data: str, **content: Any) -> str:
    """A page.

    Args:
        body: ``report`` or ``annotate``, the names of a template and its script.
        data: of :func:`packed`.
        content: what the template shows; texts are made :func:`~ia_mech.untrusted.visible` and
            escaped.
    """
    style = (FOLDER / "page.css").read_text(encoding="utf-8")
    script = "".join(
        (FOLDER / f"{name}.js").read_text(encoding="utf-8") for name in ("common", body)
    )
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    return (
        _environment()
        .get_template("page.html")
        .render(
            body=f"{body}.html",
            data=Markup(data),
            policy=Markup(policy),
            style=Markup(style),
            script=Markup(script),
            **content,
        )
    )


@cache
def _environment() -> Environment:
    return Environment(
        loader=FileSystemLoader(FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_without_unseen,
    )


def _without_unseen(value: Any) -> Any:
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"
