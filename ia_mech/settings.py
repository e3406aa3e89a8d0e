"""The settings of a run, in one list.

The command line, ``sample(**settings)``, ``run.json``, the run's identity and the name of its
folder are made from it: a new flag is a new field. Nothing heavy is imported, so that ``--help``
answers at once.
"""

import argparse
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from datetime import date
from itertools import product
from numbers import Number
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args

from ia_mech.chat.template import PINNED_DATE
from ia_mech.cli import (
    coverage,
    did_you_mean,
    expanded,
    nonblank,
    one_line,
    program,
    shell_word,
    utf8,
    whole_from,
)
from ia_mech.data.formats import CUTS, FORMATS, ColumnMap
from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.untrusted import parse_json

if TYPE_CHECKING:
    from ia_mech.data.conversations import ConversationSource
    from ia_mech.models.load import ModelSpec

ALL = "all"  # the sampled tokens of a turn
COLDEST, HOTTEST = 1e-3, 1e3  # logits divided by less or by more leave what float32 can tell apart
MOST_FIRST = 40  # first tokens of a context that turns go on from
MOST = 1_000_000  # samples of a temperature, and tokens of a turn: rows are planned as lists
Shard = tuple[int, int]  # one of the shares of a run: its number, from 1, and of how many
WHOLE: Shard = (1, 1)
SEE_HELP = "see ia-mech sample --help"

# Groups of the help, in its order.
FIRST = "what matters first"
MODEL = "model"
DATA = "conversations"
RESPONSES = "responses and chat template"
TURNS = "user turns and what is kept of them"
RUN = "run"
# Rows decoded together on a device. One core's matrix products are nearly at their best with these;
# a GPU's number is an estimate.
BATCH_ROWS = {"cpu": 96, "cuda": 1024}


@dataclass(frozen=True)
class Flag:
    """How the command line shows and reads a setting, besides its name and default.

    Attributes:
        group: of the help.
        help: one line, without the default.
        parse: makes the value from a word; raises ``argparse.ArgumentTypeError``. None: a switch.
        metavar: stands for the word in the help.
        several: the setting is a tuple of such values, given as several words, or with commas.
        mapping: the setting is a dictionary, given as words ``key=value``.
    """

    group: str
    help: str
    parse: Callable[[str], Any] | None = None
    metavar: str = ""
    several: bool = False
    mapping: bool = False


def _one_of(names: Iterable[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in names:
            raise argparse.ArgumentTypeError(f"{text!r} is none of {', '.join(names)}")
        return text

    return parse


def _limit(text: str) -> int | None:
    try:
        return None if text == "all" else whole_from(1)(text)
    except argparse.ArgumentTypeError as problem:
        raise argparse.ArgumentTypeError(f"{problem}, or: all (in Python: limit=None)") from None


def _template(text: str) -> str:
    """A chat template, given as its text, a file, or the name of one that is shipped."""
    if "{{" in text or "{%" in text:
        return utf8(text)
    shipped = _shipped_templates()
    try:
        template = shipped.get(text) or Path(text).expanduser().read_text(encoding="utf-8")
    except (OSError, ValueError, RuntimeError):  # the last: ~ of an unknown user
        listed = " or ".join(shipped)
        raise argparse.ArgumentTypeError(f"{text!r} is no file of text, nor {listed}") from None
    if "{{" not in template and "{%" not in template:
        raise argparse.ArgumentTypeError(f"{text!r} holds no Jinja template")
    return template


def _shipped_templates() -> dict[str, str]:
    files = sorted(embedded.TEMPLATES.glob("*.jinja"))
    return {file.stem: file.read_text(encoding="utf-8") for file in files}


def _opening(text: str) -> str:
    if text != text.strip() or not text:  # it would merge with the words beside it
        raise argparse.ArgumentTypeError(f"{text!r} says nothing, or has white space at its ends")
    return utf8(text)


def _temperature_or_zero(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number such as 0.7") from None
    if value != 0 and not COLDEST <= value <= HOTTEST:  # nor is NaN
        raise argparse.ArgumentTypeError(
            f"{text} is no temperature from {COLDEST:g} to {HOTTEST:g}"
        )
    return value


def _temperature(text: str) -> float:
    value = _temperature_or_zero(text)
    if value == 0:
        raise argparse.ArgumentTypeError("0 is greedy decoding, which every run has: leave it out")
    return value


def _drawn(text: str) -> int | str:
    try:
        return text if text == ALL else whole_from(0)(text)
    except argparse.ArgumentTypeError as problem:
        raise argparse.ArgumentTypeError(f"{problem}, or: all") from None


def _date(text: str) -> str:
    try:
        same = date.fromisoformat(text).isoformat() == text  # 20260101 would be another one
    except ValueError:
        same = False
    if not same:
        raise argparse.ArgumentTypeError(f"{text!r} is not a date such as 2026-01-31")
    return text


def _option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"{text!r} is not KEY=VALUE, as in enable_thinking=false")
    if value in ("True", "False", "None"):  # a text, and all texts are true in a template
        json_word = {"True": "true", "False": "false", "None": "null"}[value]
        raise argparse.ArgumentTypeError(f"{text!r}: write {json_word}, as JSON does")
    try:
        return name, parse_json(value, name, "")
    except UserError:
        return name, utf8(value)


def _choice(names: tuple[str, ...], group: str, help: str = "") -> Any:
    """A setting that is one of some names, the first one by default; the help lists them."""
    listed = help or f"{', '.join(names[:-1])} or {names[-1]}"
    return _setting(names[0], group, "NAME", listed, _one_of(names))


def _setting(
    default: Any,
    group: str,
    metavar: str,
    help: str,
    parse: Any = nonblank,
    *,
    mapping: bool = False,
) -> Any:
    several = isinstance(default, tuple)
    flag = Flag(group, help, parse, metavar, several, mapping)
    return field(default=default, metadata={"flag": flag})


def _switch(group: str, help: str) -> Any:
    return field(default=False, metadata={"flag": Flag(group, help)})


def _column(what: str) -> Any:
    return _setting(None, DATA, "NAME", f"column with {what}")


@dataclass(frozen=True)
class Settings:
    """Everything that decides what a run contains; the fields are the flags of the main job.

    Values may be given as Python has them or as text, and are read as on the command line (only
    names of columns are taken whole, as they may hold blanks):
    ``Settings(limit="all", temperatures="0.5 1", model=Path("folder"))``. None stands for the
    default, and for ``limit`` also for all conversations.

    Raises:
        UserError: a value, or a combination, that can't be.
    """

    model: str = _setting(
        embedded.NAME, FIRST, "NAME", "hub id, folder, GGUF file or embedded model"
    )
    dataset: str = _setting("builtin", FIRST, "DATA", "builtin, a file, a preset or a hub id")
    limit: int | None = _setting(24, FIRST, "N", "how many conversations, or: all", _limit)
    temperatures: tuple[float, ...] = _setting(
        (0.7, 1.0),
        FIRST,
        "T",
        "of sampled turns; greedy turns are always written, too",
        _temperature,
    )
    samples: int = _setting(4, FIRST, "N", "user turns per temperature", whole_from(1, most=MOST))

    revision: str | None = _setting(
        None, MODEL, "REV", "branch, tag or commit of a hub model (default: main)"
    )
    adapter: str | None = _setting(
        None, MODEL, "FOLDER", "a PEFT adapter to merge into the model (needs ia-mech[train])"
    )
    dtype: str = _choice(("auto", "float32", "bfloat16", "float16"), MODEL)
    device: str = _setting("auto", MODEL, "DEV", "auto, cpu, cuda or cuda:N")
    attention: str = _setting("auto", MODEL, "NAME", "sdpa, eager, … as transformers names them")
    device_map: str | None = _setting(
        None,
        MODEL,
        "auto",
        "distribute the model over this machine's GPUs, memory and disk",
        _one_of(("auto",)),
    )
    random_blocks: int | None = _setting(
        None,
        MODEL,
        "SEED",
        "permute the entries of the blocks' tensors: a control for probes",
        whole_from(0),
    )
    trust_remote_code: bool = _switch(MODEL, "run code that a hub model brings")

    subset: str | None = _setting(None, DATA, "NAME", "configuration of a hub dataset")
    split: str | None = _setting(None, DATA, "NAME", "split of a hub dataset")
    format: str = _choice(FORMATS, DATA)
    id_column: str | None = _column("ids of conversations")
    source_column: str | None = _column("ids of the query, where rows share one")
    messages_column: str | None = _column("the list of messages or turns")
    query_column: str | None = _column("the user's query")
    response_column: str | None = _column("the assistant's response")
    followup_column: str | None = _column("the real follow-up: what the user really said next")
    answer_column: str | None = _column("the gold answer")
    system_column: str | None = _column("the system message")
    context_column: str | None = _column("a passage that the query is about")
    metadata_columns: tuple[str, ...] = _setting(
        (), DATA, "NAME", "columns (or fields of messages) that aren't part of the conversation"
    )
    cut: str = _choice(
        CUTS, DATA, "cut conversations after the first response, or before the last user turn"
    )
    skip_unusable: bool = _switch(DATA, "leave out rows that can't be used, instead of refusing")

    response: str = _choice(
        ("auto", "given", "generate"), RESPONSES, "given, generate, or auto: generate missing ones"
    )
    responses: int = _setting(
        1,
        RESPONSES,
        "K",
        "let the model write K finished responses to each query",
        whole_from(1, most=MOST),
    )
    unfinished: bool = _switch(
        RESPONSES, "with --responses K, keep the first K, also those cut off or alike"
    )
    response_temperature: float = _setting(
        None,
        RESPONSES,
        "T",
        "of responses; 0 is greedy (default: 0, or 1 with --responses)",
        _temperature_or_zero,
    )
    max_response_tokens: int = _setting(
        512,
        RESPONSES,
        "N",
        "most tokens of a response, with its thought; a longer one is unfinished",
        whole_from(1, most=MOST),
    )
    system: str | None = _setting(
        None, RESPONSES, "TEXT", "system message (default: the template's own, if any)", utf8
    )
    thinking: str = _choice(
        ("template", "keep"), RESPONSES, "keep earlier thoughts as the template does, or keep all"
    )
    chat_template: str | None = _setting(
        None,
        RESPONSES,
        "FILE",
        "a Jinja template in place of the model's: a file, gemma or plain",
        _template,
    )
    template_option: Mapping[str, Any] | None = _setting(
        None,
        RESPONSES,
        "KEY=VALUE",
        "a variable of the chat template, such as enable_thinking=false",
        _option,
        mapping=True,
    )
    date: str = _setting(
        PINNED_DATE, RESPONSES, "DATE", "the date for templates that print today's", _date
    )

    max_new_tokens: int = _setting(
        40, TURNS, "N", "most tokens of a user turn", whole_from(1, most=MOST)
    )
    opening: str | None = _setting(
        None, TURNS, "TEXT", "words with which every user turn is forced to begin", _opening
    )
    sampled_tokens: tuple[int | str, ...] = _setting(
        (ALL,),
        TURNS,
        "K",
        "how many first tokens of a turn are sampled (the rest is greedy), or: all",
        _drawn,
    )
    first_tokens: float | None = _setting(
        None,
        TURNS,
        "SHARE",
        "sample nothing: continue greedily each of the likeliest first tokens that together have "
        f"this probability at T, at most {MOST_FIRST}",
        coverage,
    )
    seed: int = _setting(0, TURNS, "N", "seed of the sampling", whole_from(0))
    positions: tuple[str, ...] = _setting(
        ("all",), TURNS, "P", "where the residual stream is kept: all, header, or names"
    )
    header_logits: str = _choice(
        ("full", "none"), TURNS, "keep the logits at the header's end: full or none"
    )
    batch_rows: int | None = _setting(
        None,
        TURNS,
        "N",
        "turns or responses decoded at once (default: 96 on a CPU, 1024 on a GPU)",
        whole_from(1),
    )

    intervention: str | None = _setting(
        None, TURNS, "FILE", "steer the model with this vector (docs/experiments.md)"
    )

    ignore_check: bool = _switch(
        RUN, "go on if the engine's start-up check fails; the run records that"
    )

    def __post_init__(self) -> None:
        for one in fields(self):
            self._set(one.name, _field_value(one, getattr(self, one.name)))
        if len(set(self.temperatures)) < len(self.temperatures):
            raise UserError(
                f"a temperature is given twice ({' '.join(map(str, self.temperatures))})",
                "give each once; --samples sets how often it is sampled",
            )
        self._set("temperatures", tuple(sorted(self.temperatures)))
        self._set("sampled_tokens", self._counts_drawn())
        if self.response_temperature is None:
            self._set("response_temperature", 1.0 if self.responses > 1 else 0.0)
        if self.writes_responses and self.response == "given":
            raise UserError(
                "--response given: the model writes no responses",
                "leave out --responses and --response-temperature, or use --response generate",
            )
        if self.responses > 1 and self.response_temperature == 0:
            raise UserError(
                f"greedy decoding writes the same response {self.responses} times",
                "give a --response-temperature above 0",
            )

    @property
    def wants_finished(self) -> bool:
        """Whether responses are drawn until enough are finished and differ."""
        return self.responses > 1 and not self.unfinished

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)  # frozen for everyone else

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> "Settings":
        """Settings by name: of a caller from Python, or of ``run.json`` (:meth:`to_dict`).

        Raises:
            TypeError: there is no such setting; all are named.
            UserError: a value, or a combination, that can't be.
        """
        given = {k: dataset_of(v) if k == "dataset" else v for k, v in given.items()}
        names = [one.name for one in fields(cls)]
        if unknown := [name for name in given if name not in names]:
            meant = "".join(did_you_mean(name, names) for name in unknown)
            listed = f"{', '.join(map(repr, unknown))}{meant}; there are {', '.join(names)}"
            raise TypeError(f"there is no setting {listed}")
        return cls(**given)

    def to_dict(self) -> dict[str, Any]:
        """What ``run.json`` holds: every setting by its name, as JSON has it."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}

    def command(self, out: Path, device: str = "") -> str:
        """The shell command that makes a run of these settings in a folder, without defaults; those
        of a run hold the ``batch_rows`` that are usual for its ``device``."""
        words = [f"{program()} sample"]
        for one in fields(self):
            value, flag = getattr(self, one.name), one.metadata["flag"]
            usual = getattr(Settings(), one.name)
            if value == usual or (one.name == "batch_rows" and value == BATCH_ROWS.get(device)):
                continue
            if one.name == "chat_template":  # by its name, if it is a shipped one
                value = {text: name for name, text in _shipped_templates().items()}.get(
                    value, value
                )
            words.append("--" + one.name.replace("_", "-"))
            if flag.mapping:
                words += [shell_word(f"{key}={json.dumps(each)}") for key, each in value.items()]
            elif flag.parse is not None:
                values = value if flag.several else ["all" if value is None else value]
                words += [shell_word(str(each).removesuffix(".0")) for each in values]
        return " ".join([*words, "--out", shell_word(out)])

    def _counts_drawn(self) -> tuple[int | str, ...]:
        # With none drawn it is the greedy turn, which is always there.
        counts = [ALL if k == self.max_new_tokens else k for k in self.sampled_tokens if k]
        if len({*counts}) < len(counts):
            raise UserError("a number of sampled tokens is given twice", "give each once")
        fewer = sorted(k for k in counts if isinstance(k, int))
        if fewer and fewer[-1] > self.max_new_tokens:
            raise UserError(
                f"{fewer[-1]} sampled tokens, but turns have at most {self.max_new_tokens}",
                "give fewer, or a larger --max-new-tokens",
            )
        if self.first_tokens and (len(self.temperatures) != 1 or counts != [ALL]):
            raise UserError(
                "first tokens are chosen by their probability at one temperature",
                "give one of --temperatures, and no --sampled-tokens",
            )
        return *fewer, *(k for k in counts if k == ALL)

    def rows(self) -> list[tuple[float, int, int]]:
        """(temperature, sampled tokens, sample) of every row of a context: greedy first, as
        (0.0, 0, 0). Where all tokens are sampled, their number is ``max_new_tokens``.

        With ``first_tokens`` a context may have fewer: sample n goes on from the first token that
        is the n-th likeliest, from 0.
        """
        if self.first_tokens:
            return [(0.0, 0, 0), *((t, 1, n) for t in self.temperatures for n in range(MOST_FIRST))]
        drawn = [self.max_new_tokens if k == ALL else int(k) for k in self.sampled_tokens]
        each = product(self.temperatures, drawn, range(self.samples))
        return [(0.0, 0, 0), *each]

    @property
    def writes_responses(self) -> bool:
        """Whether settings say how the model is to write responses."""
        return self.responses > 1 or self.response_temperature != 0

    @property
    def local_model(self) -> bool:
        """Whether the model is a folder or a file of this machine."""
        return expanded(self.model).exists()

    @property
    def columns(self) -> ColumnMap:
        """Which columns of the data hold what."""
        return ColumnMap(
            format=self.format,
            id=self.id_column,
            source=self.source_column,
            messages=self.messages_column,
            query=self.query_column,
            response=self.response_column,
            followup=self.followup_column,
            answer=self.answer_column,
            system=self.system_column,
            context=self.context_column,
            metadata=self.metadata_columns,
            cut=self.cut,
        )

    @property
    def model_spec(self) -> "ModelSpec":
        """Which model to load, and how.

        Raises:
            UserError: settings of the model that exclude each other.
        """
        from ia_mech.models.load import ModelSpec

        return ModelSpec(
            name=self.model,
            revision=self.revision,
            dtype=self.dtype,
            device=self.device,
            attention=self.attention,
            trust_remote_code=self.trust_remote_code,
            adapter=self.adapter,
            device_map=self.device_map,
            random_blocks=self.random_blocks,
        )

    def conversations(self) -> "ConversationSource":
        """Open the data, and read its first row.

        Raises:
            UserError: as :func:`ia_mech.data.conversations.open_conversations`.
        """
        from ia_mech.data.conversations import open_conversations

        return open_conversations(
            self.dataset,
            limit=self.limit,
            columns=self.columns,
            split=self.split,
            subset=self.subset,
            skip_unusable=self.skip_unusable,
        )

    def folder(self) -> Path:
        """``cache/<model>-<dataset>-<hash>``: the same settings, the same folder."""
        text = json.dumps(self.to_dict(), sort_keys=True)
        digest = hashlib.sha256(text.encode()).hexdigest()[:8]
        model = Path(os.path.abspath(self.model)).name  # a name for "." too
        names = [model, Path(self.dataset).stem, digest]
        words = ["".join(c if c.isalnum() or c in ".-" else "-" for c in name) for name in names]
        return embedded.cache_dir() / "-".join(words).lower()


# Parameters of sample() → how a word is read; None: a switch.
PARAMETERS: Mapping[str, Any] = {
    **{one.name: one.metadata["flag"].parse for one in fields(Settings)},
    **{name: whole_from(1) for name in ("out", "shard", "workers", "threads")},
}
# A command to be typed into a shell, up to the end; or a flag, and the word after it.
_FLAG = re.compile(r"(\S*ia-mech [a-z].*)|--([a-z-]+[a-z])(?: ('[^']*'|[\w./=:+-]*\w)(?![\w']))?")
_NO_VALUES = {*("or", "and", "if", "is", "with", "to", "in"), *("leaves", "lists", "sets", "has")}


@contextmanager
def parameters_named() -> Iterator[None]:
    """Have refusals name the parameters of ``sample()``, where its command has flags."""

    def named(found: re.Match[str]) -> str:
        whole, flag, value = found.groups()
        name = "" if whole else flag.replace("-", "_")
        if whole or name not in PARAMETERS:
            return whole or found[0].replace("--", "ia-mech sample --", 1)
        parse, rest = PARAMETERS[name], "" if value is None else f" {value}"
        if parse is None:
            return f"{name}=True{rest}"
        try:
            if value is None or value in _NO_VALUES:
                raise ValueError
            read = parse(value.strip("'"))
        except (ValueError, argparse.ArgumentTypeError):
            return f"{name}{rest}"
        return f"{name}={read!r}"

    def said(text: str) -> str:
        text = re.sub(r"rows-[0-9a-f]{16}\.jsonl line (\d+)", r"row \1 of dataset", text)
        return _FLAG.sub(named, text)

    try:
        yield
    except UserError as error:
        error.__init__(said(error.problem), said(error.remedy))  # type: ignore[misc]
        raise


def dataset_of(given: Any) -> Any:
    """A dataset's name; of rows from Python (:func:`ia_mech.data.files.saved`) the file in the
    cache that they are written to.

    Raises:
        UserError: it is neither.
    """
    if given is None or isinstance(given, str | os.PathLike):
        return given
    from ia_mech.data.files import saved

    return str(saved(given, embedded.cache_dir() / "data"))


def _field_value(setting: Any, value: Any) -> Any:
    """The value of a field of :class:`Settings`, whatever it was given as."""
    flag: Flag = setting.metadata["flag"]
    if value is None:
        return None if type(None) in get_args(setting.type) else setting.default
    if flag.parse is None:
        if not isinstance(value, bool):
            raise UserError(f"{setting.name}={_shown(value)}", "give True or False")
        return value
    if flag.mapping:
        return _mapping_value(setting.name, value, flag.parse)
    return parse_value(setting.name, value, flag.parse, several=flag.several)


def _mapping_value(
    name: str, value: Any, parse: Callable[[str], tuple[str, Any]]
) -> dict[str, Any] | None:
    """A dictionary, given as one or as words ``key=value``; None if it is empty."""
    if isinstance(value, Mapping):
        try:
            words = [f"{key}={json.dumps(each)}" for key, each in value.items()]
        except (TypeError, ValueError):
            raise UserError(f"{name}={_shown(value)}", "give values that JSON has") from None
    else:
        words = list(value) if isinstance(value, list | tuple) else [value]
    pairs = [parse_value(name, word, parse) for word in words]
    if twice := sorted({key for key, _ in pairs if [k for k, _ in pairs].count(key) > 1}):
        raise UserError(f"--{name.replace('_', '-')}: {twice[0]} is given twice", "give it once")
    return dict(pairs) or None


def parse_value(name: str, value: Any, parse: Callable[[str], Any], several: bool = False) -> Any:
    """What the command line would make of a value.

    Args:
        value: as Python has it, or as text.
        several: there may be several values, with commas or spaces in a text; they become a tuple.

    Raises:
        UserError: it can't be.
    """
    listed = several and isinstance(value, Iterable) and not isinstance(value, str)
    values = list(value) if listed else [value]
    for one in values:
        if isinstance(one, bool) or not isinstance(one, str | Number | os.PathLike | date):
            kinds = "a text or a number" + (", or a list of these" if several else "")
            raise UserError(f"{name}={_shown(value)}", f"give {kinds}")
    words = [str(one) for one in values]
    try:
        if not several:
            return parse(words[0])
        if name == "metadata_columns":  # their names may hold blanks
            return tuple(map(parse, words))
        split = " ".join(words).replace(",", " ").split()
        if words and not split:
            raise argparse.ArgumentTypeError(f"{words[0]!r} names nothing")
        return tuple(map(parse, split))
    except argparse.ArgumentTypeError as error:
        if all(isinstance(one, str) for one in values):
            raise UserError(f"--{name.replace('_', '-')}: {error}", SEE_HELP) from None
        raise UserError(f"{name}={_shown(value)}: {error}", "give another value") from None


def default_text(setting: Any) -> str:
    """The default of a field as the help shows it; empty if there is none."""
    default = setting.default
    if default is None or default is False or default == ():
        return ""
    text = " ".join(map(str, default)) if isinstance(default, tuple) else str(default)
    return f" (default: {text})"


def _shown(value: Any) -> str:
    return one_line(repr(value), 60)


def flag_of(path: str) -> str:
    """What a user calls a part of a run's identity: a flag for ``settings.samples``."""
    group, _, name = path.partition(".")
    return "--" + name.replace("_", "-") if group == "settings" else path.removesuffix(".sha256")
