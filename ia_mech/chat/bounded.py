"""Chat templates are other people's programs: they are run within limits.

The sandbox of ``transformers`` keeps a template away from files and from Python's internals, but
lets it loop and write without end. Here a template is compiled in that same environment, with a
charge on everything that repeats (a pass of a loop, a call, a filter) or makes a value (operators,
literals, printed expressions). One operation that could make very much at once (``'x' * 10**10``)
is refused before it is done. The text is that of ``apply_chat_template``, character by character.

What is bounded is what a template makes and how long it takes between two charges, so a single
operation on values within the limits can still take a moment longer.
"""

import functools
import math
import re
import threading
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from jinja2 import Environment, Template, TemplateError, nodes
from jinja2.visitor import NodeTransformer

from ia_mech.errors import UserError

SOURCE = 200_000  # characters of a template; the longest in use have 30,000
OUTPUT, OUTPUT_PER_CHARACTER = 1_000_000, 10  # characters of the text, by those of the messages
MADE = 50  # times as many may be made on the way, each operation counting as one
SECONDS = 5.0  # of processor time for one text; usual templates take less than 0.0001
BITS = 100_000  # of a power

_MADE = " made"  # a name that no template can spell
_MULTIPLYING = frozenset(("expandtabs", "indent", "tojson", "translate", "urlize", "wordwrap"))
_FORESEEN = _MULTIPLYING | {"replace", "join", "format", "format_map"}


def render(source: str, date: str, messages: Sequence[dict[str, str]], variables: dict) -> str:
    """The text that a template makes of a dialogue.

    Args:
        source: the template.
        date: ISO date that ``strftime_now`` gives.
        messages: the dialogue.
        variables: what else the template sees: special tokens and options.

    Raises:
        UserError: the template reaches a limit.
        Exception: what the template raises.
    """
    characters = sum(len(message["content"]) for message in messages)
    _meter.begin(characters)
    variables = {"tools": None, "documents": None, "add_generation_prompt": False} | variables
    pieces, length = [], 0
    try:
        template = _compiled(source, date)
        for piece in template.generate(messages=list(messages), **variables):
            length += len(piece)
            if length > _meter.most:
                raise _meter.refusal(f"writes more than {_meter.most:,} characters")
            pieces.append(piece)
    except RecursionError:
        raise _meter.refusal("is nested too deeply, or calls itself,") from None
    return "".join(pieces)


class _Meter(threading.local):
    """What the text being made in this thread may still cost."""

    def begin(self, characters: int) -> None:
        self.characters, self.most = characters, OUTPUT + OUTPUT_PER_CHARACTER * characters
        self.left, self.charges, self.until = MADE * self.most, 0, math.inf
        self.refused: UserError | None = None

    def charge(self, cost: int) -> None:
        self.left -= cost + 1
        self.charges += 1
        if self.left < 0:
            raise self.too_much()
        if cost > 100_000 or not self.charges % 256:  # a look at the clock may take 20 µs
            now = time.thread_time()
            self.until = min(self.until, now + SECONDS)
            if now > self.until:
                raise self.refusal(f"takes more than {SECONDS:g} s of processor time")

    def refusal(self, problem: str) -> UserError:
        """What ends this text. The compiler, which computes constants, drops what they raise."""
        self.refused = self.refused or UserError(
            f"the chat template {problem} for a dialogue of {self.characters:,} characters",
            "use a model with another chat template, or correct this one",
        )
        return self.refused

    def too_much(self) -> UserError:
        return self.refusal(f"makes more than {MADE * self.most:,} characters")

    def check(self) -> None:
        """Raise what has ended this text, if anything has."""
        if self.refused is not None:
            raise self.refused

    def made(self, value: Any) -> Any:
        """Charge for a value; returns it."""
        self.charge(len(value) if type(value) is str else self.weight(value))
        return value

    def weight(self, value: Any) -> int:
        """Characters, items and digits of a value; what it holds twice counts twice."""
        weight, rest = 0, [value]
        while rest and weight <= self.left:
            value = rest.pop()
            weight += 1
            if isinstance(value, str):
                weight += len(value)
            elif isinstance(value, int):
                weight += value.bit_length() // 8
            elif isinstance(value, dict):
                rest += [*value, *value.values()]
            elif isinstance(value, list | tuple):
                rest += value
        return weight

    def foresee(self, cost: int) -> None:
        """Refuse an operation that would make so much at once."""
        if cost > self.left:
            raise self.too_much()

    def foresee_call(self, name: str, of: Any, given: Sequence[Any]) -> None:
        """The same for a filter or a method: its name, what it is applied to, its arguments."""
        for value in given:
            if isinstance(value, int) and value > self.most:  # a width or a count
                raise self.too_much()
        if name not in _FORESEEN:
            return
        texts = [value for value in given if isinstance(value, str)]
        if name == "replace" and isinstance(of, str) and len(texts) > 1:
            self.foresee(of.count(texts[0]) * len(texts[1]))
        elif name == "join" and texts:
            self.foresee(len(of) * len(texts[0]))
        elif name in ("format", "format_map") and isinstance(of, str):
            self.foresee(sum(int(width[:12]) for width in re.findall("[0-9]+", of)))
        elif name in _MULTIPLYING:
            factors = [v if isinstance(v, int) else self.weight(v) for v in given]
            self.foresee(self.weight(of) * max(factors, default=1))

    def product(self, left: Any, right: Any) -> Any:
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int):
                self.foresee(self.weight(value) * times)
        return self.made(left * right)

    def power(self, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if whole and left.bit_length() * right > BITS:
            raise self.too_much()
        return self.made(left**right)

    def remainder(self, left: Any, right: Any) -> Any:
        if isinstance(left, str):
            self.foresee_call("format", left, right if isinstance(right, tuple) else (right,))
        return self.made(left % right)


_meter = _Meter()


# -- the environment ------------------------------------------------------------------------------


@functools.cache
def _environment() -> Environment:
    """The environment in which ``transformers`` renders, with charges."""
    # Not public, and the only way to what apply_chat_template uses. Templates aren't compiled by it
    # but below: it would compute constants such as 'x' * 10**10.
    from transformers.utils.chat_template_utils import _compile_jinja_template

    plain: Any = _compile_jinja_template("").environment
    made: Any = plain.overlay(finalize=_meter.made)
    made.call = _charged_call(plain.call)
    made.filters = {name: _charged_filter(name, f) for name, f in plain.filters.items()}
    made.filters[_MADE] = _meter.made
    made.tests = plain.tests | {"in": _charged_filter("in", plain.tests["in"])}
    made.binop_table = plain.binop_table | {
        "*": _meter.product,
        "**": _meter.power,
        "%": _meter.remainder,
    }
    made.intercepted_binops = frozenset(("*", "**", "%"))
    made.globals = {name: f for name, f in plain.globals.items() if name != "lipsum"}
    made.globals["namespace"] = _unprinted(plain.globals["namespace"])
    made.charge = _meter.charge
    return made


def _charged_call(call: Callable[..., Any]) -> Callable[..., Any]:
    def charged(context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        if args or options:
            method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
            name, of = getattr(method, "__name__", ""), getattr(method, "__self__", None)
            given = (*args, *options.values())
            if name == "join" and isinstance(of, str):
                args = (_sized(args[0]),)
                of, given = args[0], (of,)
            _meter.foresee_call(name, of, given)
        return _meter.made(call(context, function, *args, **options))

    return charged


def _charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter or a test; some get the context first."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def charged(*args: Any, **options: Any) -> Any:
        _meter.check()
        if name == "join":
            args = (*args[:first], _sized(args[first]), *args[first + 1 :])
        if given := (*args[first + 1 :], *options.values()):
            _meter.foresee_call(name, args[first], given)
        return _meter.made(function(*args, **options))

    return charged


def _sized(values: Any) -> Any:
    return values if hasattr(values, "__len__") else list(values)


def _unprinted(namespace: type) -> type:
    def refuse(self: Any) -> str:  # of namespaces within namespaces it grows without bound
        raise TemplateError("a namespace is not text")

    return type("namespace", (namespace,), {"__repr__": refuse})


@functools.lru_cache
def _compiled(source: str, date: str) -> Template:
    """A template, compiled with a charge on what loops and on what operators don't make."""
    if len(source) > SOURCE:
        raise _meter.refusal(f"has more than {SOURCE:,} characters, too many")
    environment = _environment()
    tree = environment.parse(source)
    for loop in list(tree.find_all(nodes.For)):
        written = sum(len(text.data) for text in loop.find_all(nodes.TemplateData))
        charge = nodes.EnvironmentAttribute("charge")
        call = nodes.Call(charge, [nodes.Const(written)], [], None, None)
        loop.body.insert(0, nodes.ExprStmt(call))
    tree = _Charging().visit(tree)
    pinned = datetime.fromisoformat(date).strftime
    return environment.from_string(tree, {"strftime_now": lambda form: pinned(form)})


class _Charging(NodeTransformer):
    """Has what holds several values pass through the filter that charges.

    Sums and what is joined by ``~`` are charged whole, not sum by sum; what is printed is charged
    when it is.
    """

    def _charged(self, node: Any) -> nodes.Expr:
        node = self.generic_visit(node)
        if getattr(node, "ctx", "load") != "load":  # the names of an assignment
            return node
        return nodes.Filter(node, _MADE, [], [], None, None)

    visit_Concat = visit_List = visit_Tuple = visit_Dict = _charged

    def visit_Add(self, node: Any) -> nodes.Expr:
        node = self.generic_visit(node)
        node.left, node.right = (_uncharged(side, nodes.Add) for side in (node.left, node.right))
        return nodes.Filter(node, _MADE, [], [], None, None)

    def visit_Output(self, node: Any) -> nodes.Node:
        node = self.generic_visit(node)
        node.nodes = [_uncharged(printed, nodes.Expr) for printed in node.nodes]
        return node

    def visit_AssignBlock(self, node: Any) -> nodes.Node:
        node = self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, _MADE, [], [], None, None)
        return node


def _uncharged(node: Any, kind: type) -> nodes.Expr:
    """An expression without the charge on it, if it is of a kind."""
    charged = isinstance(node, nodes.Filter) and node.name == _MADE and isinstance(node.node, kind)
    return node.node if charged else node
