"""What the tests of judges share: items, judges without a server or for the stub, verdicts."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path

from stub_server import StubServer

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.rubric import BUILT_IN, FOLLOW_UP, rubric_of
from ia_mech.judge.verdict import Item, Judge, Verdict
from ia_mech.run import Run
from ia_mech.run.labels import KEY as COLUMNS

# Of the run that tests judge: 12 contexts, each once greedy and twice at two temperatures. (Not
# from ``runs``, whose import takes seconds, and a killed process imports this.)
ROWS = 60
DECOYS = 36  # of a judge that is paid: one per source and temperature; a context is a source
KEY = "sk-test-1234567890-secret"
QUERY, RESPONSE = "How does a lighthouse work?", "A lens gathers the lamp's light into a beam."


class Recorded(Quiet):
    """A progress that keeps what it was given, and raises ``error`` at the verdict ``at``."""

    def __init__(self, at: int | None = None, error: type[BaseException] = KeyboardInterrupt):
        self.began: tuple[str, int] | None = None
        self.lines: list[str] = []
        self.notes: list[str] = []
        self.stopped = 0
        self._at, self._error = at, error

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        self.began = phase, total

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.notes.append(note)
        if len(self.notes) == self._at:
            self.interrupt()

    def interrupt(self) -> None:
        raise self._error

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None:
        self.stopped += 1


def by_chance(self, items) -> list[Verdict]:
    """A judge that accepts half of all turns, by what was said and after what."""
    texts = [f"{item.response}\0{item.turn}".encode(errors="surrogatepass") for item in items]
    heads = [hashlib.sha256(text).digest()[0] % 2 == 0 for text in texts]
    return [Verdict(FOLLOW_UP if head else "new_topic") for head in heads]


def judged_by_chance(run: Run, folder: Path, monkeypatch) -> Run:
    """A copy of a run, judged by :func:`by_chance` in place of the built-in judge."""
    from ia_mech.judge import builtin_judge
    from ia_mech.judge.builtin import BuiltInJudge
    from ia_mech.judge.judging import label_run

    monkeypatch.setattr(BuiltInJudge, "judge", by_chance)
    copied = Run.open(shutil.copytree(run.path, folder))
    label_run(copied, builtin_judge(), "builtin", Quiet())
    return copied


BILLED = {"prompt_tokens": 100, "completion_tokens": 7, "cost": 0.25}


def follow_up(item: Item, times: int) -> Verdict:
    return Verdict(FOLLOW_UP, rationale=item.turn, **BILLED)


class FakeJudge(Judge):
    """Says what ``say`` says of an item that it is asked for the n-th time, and keeps both.

    ``fails_after``: verdicts before it gives up.
    """

    caveat = "a fake"

    def __init__(
        self,
        say: Callable[[Item, int], Verdict] = follow_up,
        *,
        paid: bool = True,
        fails_after: int | None = None,
        **identity,
    ) -> None:
        self.identity = {"kind": "fake", "model": "m", "params": {"top": 1}} | identity
        self.paid = paid
        self.say = say
        self.fails_after = fails_after
        self.asked: list[tuple[Item, int]] = []

    def estimate(self, items) -> str:
        return f"{len(items)} to ask"

    def judge(self, items) -> list[Verdict]:
        verdicts = []
        for item in items:
            if len(self.asked) == self.fails_after:
                raise UserError("the server is gone", "look after it")
            repeat = sum(item == before for before, _ in self.asked)
            self.asked.append((item, repeat))
            verdicts.append(self.say(item, repeat))
        return verdicts


def items(count: int) -> list[Item]:
    return [Item(QUERY, RESPONSE, f"turn {number}") for number in range(count)]


def judge_for(stub: StubServer, **options) -> LlmJudge:
    """A judge for a stub that has answers; waits as long as the busiest machine needs."""
    options = {"base_url": stub.url, "api_key_env": "OPENAI_API_KEY", "timeout": 60.0} | options
    return LlmJudge("stub-model", **options)


def one(judge: Judge, item: Item | None = None) -> Verdict:
    return judge.judge([item or items(1)[0]])[0]


def keys_of(run: Run) -> list[dict]:
    return run.generations[list(COLUMNS)].to_dict("records")


def plant(
    run: Run, name: str, labels: list[str | None], record: dict | None = None, **columns: list
) -> None:
    """Verdicts of a judge: a category per turn."""
    record = {"identity_hash": f"hash of {name}"} if record is None else record
    rows = [
        {
            **key,
            "category": labels[i],
            "follow_up": rubric_of(record).follow_up(labels[i]),
            "status": "judged" if labels[i] else "unparsable",
            **{column: values[i] for column, values in columns.items()},
        }
        for i, key in enumerate(keys_of(run))
    ]
    run.labels.write_judgements(name, rows, record)


def annotate(
    run: Run, name: str, labels: dict[int, str], sheet="s", stratum="all", chances=None
) -> None:
    """Labels of an annotator by row; all rows have the same probability without ``chances``."""
    keys = keys_of(run)
    rows = [
        {
            **keys[i],
            "category": category,
            "follow_up": BUILT_IN.follow_up(category),
            "note": f"note {i}",
            "sheet": sheet,
            "stratum": stratum if isinstance(stratum, str) else stratum[i],
            "inclusion_probability": len(labels) / ROWS if chances is None else chances[i],
        }
        for i, category in labels.items()
    ]
    run.labels.write_annotations(name, rows, {})
