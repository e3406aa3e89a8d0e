"""What the tests of language-model judges share: items, a judge for the stub, its verdicts."""

from stub_server import StubServer

from ia_mech.judge.llm import LlmJudge
from ia_mech.judge.verdict import Item, Verdict

KEY = "sk-test-1234567890-secret"
QUERY, RESPONSE = "How does a lighthouse work?", "A lens gathers the lamp's light into a beam."


class Quiet:
    """A progress that keeps what it was told."""

    def __init__(self) -> None:
        self.estimate = ""
        self.seen: list[Verdict] = []

    def start(self, total: int, cached: int, estimate: str) -> None:
        self.estimate = estimate

    def advance(self, verdict: Verdict) -> None:
        self.seen.append(verdict)

    def stop(self) -> None: ...


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
