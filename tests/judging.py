"""What the tests of language-model judges share: items, a judge for the stub, its verdicts."""

from stub_server import StubServer

from ia_mech.display import Quiet
from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.verdict import Item, Verdict

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


def items(count: int) -> list[Item]:
    return [Item(QUERY, RESPONSE, f"turn {number}") for number in range(count)]


def judge_for(stub: StubServer, **options) -> LlmJudge:
    options = {"base_url": stub.url, "api_key_env": "OPENAI_API_KEY", "timeout": 5.0} | options
    return LlmJudge("stub-model", **options)


def verdicts_of(judge, asked: list[Item]) -> list[Verdict]:
    found = dict(judge.judge(asked, [0] * len(asked)))
    return [found[index] for index in range(len(asked))]


def one(judge, item: Item | None = None) -> Verdict:
    return verdicts_of(judge, [item or items(1)[0]])[0]
