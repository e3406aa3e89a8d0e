"""What ``benchmarks.sampling_cuda`` measured: JSON lines, each written when it is known.

A line is never changed. Processes add to the file one after the other, so that whatever is killed,
what was measured before is there, and the next command goes on with what is missing.
"""

import datetime
import json
import os
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ia_mech.errors import UserError

CEILINGS, OURS, CAPTURE, PROFILE = "ceilings", "ours", "capture", "profile"
ONCE = (CEILINGS, PROFILE)  # one round of these is enough
NO_MODEL = ""  # the ceilings are the device's


@dataclass(frozen=True)
class Size:
    """How much is decoded: contexts, tokens of each, rows of each, new tokens of each row."""

    contexts: int = 32
    context_tokens: int = 512
    rows: int = 33  # greedy + 4 temperatures x 8 samples
    new_tokens: int = 64


@dataclass(frozen=True)
class Setting:
    """What figures must have in common to be compared: hardware, software and workload.

    ``besides`` names packages with kernels that ``transformers`` uses where it finds them.
    """

    device: str
    gpu: bool
    driver: str
    dtype: str
    torch: str
    transformers: str
    besides: str
    contexts: int
    context_tokens: int
    rows: int
    new_tokens: int

    @property
    def size(self) -> Size:
        return Size(self.contexts, self.context_tokens, self.rows, self.new_tokens)

    @property
    def tokens(self) -> int:
        """New tokens of the whole job."""
        return self.contexts * self.rows * self.new_tokens


@dataclass
class Measured:
    """All that is known of one contender on one model.

    Attributes:
        values: one dictionary per round; see :mod:`benchmarks.sampling_cuda.contenders`.
        gpu: the GPU's state before each round, None where it isn't known.
        notes: how it ran; of the last round.
        warm_up: seconds, the last one's.
        cut: why it was measured only once.
        failed: why it was not measured, or not to the end.
        failures: how often that happened, measured since or not.
    """

    values: list[dict] = field(default_factory=list)
    gpu: list[dict | None] = field(default_factory=list)
    notes: dict = field(default_factory=dict)
    warm_up: float | None = None
    cut: str = ""
    failed: str = ""
    failures: int = 0

    def take(self, name: str) -> list[float]:
        """One of the values, of all rounds."""
        return [values[name] for values in self.values]

    def missing(self, rounds: int, forgiven: int) -> int:
        """How many of so many rounds are still to be measured; so many failures don't count."""
        if (self.failed and self.failures > forgiven) or (self.cut and self.values):
            return 0
        return max(0, rounds - len(self.values))


# What lines of each kind say.
_OF = {"at", "model", "contender"}
FIELDS = {
    "setting": {"at", *Setting.__dataclass_fields__},
    "measured": _OF | {"values", "gpu", "notes"},
    "warm-up": _OF | {"seconds"},
    "cut": _OF | {"why"},
    "failed": _OF | {"why"},
}


class Log:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, kind: str, **fields) -> None:
        """One more line, on the disk when this returns."""
        moment = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        line = json.dumps({"kind": kind, "at": moment} | fields).encode() + b"\n"
        with self.path.open("ab+") as file:
            if file.tell():
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":  # a kill cut the last line
                    line = b"\n" + line
            file.write(line)
            file.flush()
            os.fsync(file.fileno())

    def records(self) -> list[dict]:
        """All lines but those that a kill cut; none if there is no file."""
        if not self.path.exists():
            return []
        found = []
        text = self.path.read_text(encoding="utf-8", errors="replace")
        for number, line in enumerate(text.splitlines(), 1):
            try:
                record = json.loads(line)
            except ValueError:
                if found or line.startswith('{"kind"'):  # a kill cut it
                    continue
                raise UserError(f"{self.path} holds something else", "name another file") from None
            kind = record.get("kind") if isinstance(record, dict) else None
            if not FIELDS.get(kind, {"no such kind"}) <= set(record):
                raise UserError(
                    f"line {number} of {self.path} is no measurement", "name another file"
                )
            found.append(record)
        return found

    def agree(self, setting: Setting) -> None:
        """Note the setting, if the file has none yet.

        Raises:
            UserError: the file has another.
        """
        self.demand(asdict(setting))
        if setting_of(self.records()) is None:
            self.add("setting", **asdict(setting))

    def demand(self, wanted: dict) -> None:
        """Raises UserError if the file has another setting than is wanted, as far as that says."""
        known = setting_of(self.records())
        if known is None:
            return
        for name, mine in wanted.items():
            theirs = getattr(known, name)
            if theirs != mine:
                raise UserError(
                    f"{self.path} was measured with {name} = {theirs}, not {mine}",
                    "name another file with --out",
                )


def setting_of(records: Sequence[dict]) -> Setting | None:
    """The setting that a file's lines begin with."""
    for record in records:
        if record["kind"] == "setting":
            return Setting(**{name: record[name] for name in Setting.__dataclass_fields__})
    return None


@dataclass
class Results:
    """Everything in one or several files.

    Attributes:
        setting: of all of it.
        measured: by model (the ceilings have none) and contender.
        days: dates on which lines were written, in order.
    """

    setting: Setting
    measured: dict[tuple[str, str], Measured]
    days: list[str]

    @classmethod
    def read(cls, paths: Sequence[Path]) -> "Results":
        """What is in these files.

        Raises:
            UserError: a file isn't there or holds something else, or settings differ.
        """
        records, settings = [], []
        for path in paths:
            if path.is_dir():
                raise UserError(f"{path} is a folder", "name the file that was measured into")
            if not path.is_file():
                raise UserError(f"no file {path}", "measure first, without --read")
            if sum(path.resolve() == other.resolve() for other in paths) > 1:
                raise UserError(f"{path} is named twice", "name each file once")
            lines = Log(path).records()
            if (setting := setting_of(lines)) is None:
                raise UserError(
                    f"{path} was not written by benchmarks.sampling_cuda", "measure again"
                )
            if settings and setting != settings[0]:
                raise UserError(
                    f"{path} and {paths[0]} were measured in different settings",
                    "make tables of each by itself",
                )
            settings.append(setting)
            records += lines
        days = sorted({record["at"][:10] for record in records})
        return cls(settings[0], collect(records), days)

    def of(self, model: str, contender: str) -> Measured:
        """What is known of a contender; empty if nothing is."""
        return self.measured.get((model, contender), Measured())

    @property
    def models(self) -> list[str]:
        """Those of which anything is known."""
        return list(dict.fromkeys(model for model, _ in self.measured if model))


def collect(records: Sequence[dict]) -> dict[tuple[str, str], Measured]:
    """Lines by model and contender; a failure before a measurement is forgotten."""
    found: dict[tuple[str, str], Measured] = {}
    for record in records:
        if record["kind"] == "setting":
            continue
        one = found.setdefault((record["model"], record["contender"]), Measured())
        if record["kind"] == "measured":
            one.values.append(record["values"])
            one.gpu.append(record["gpu"])
            one.notes, one.failed = record["notes"], ""
        elif record["kind"] == "warm-up":
            one.warm_up = record["seconds"]
        elif record["kind"] in ("cut", "failed"):
            setattr(one, record["kind"], record["why"])
            one.failures += record["kind"] == "failed"
    return found


def ratio(theirs: Sequence[float], ours: Sequence[float]) -> tuple[float, float, float]:
    """Median over median, and the least and the most of all pairs.

    They ran one after the other in processes of their own, so no round of one belongs to a round of
    the other.
    """
    middle = statistics.median(theirs) / statistics.median(ours)
    return middle, min(theirs) / max(ours), max(theirs) / min(ours)
