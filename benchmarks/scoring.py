"""What scoring given turns costs, against one forward pass per context and turn.

    python -m benchmarks.scoring                 about ten minutes on two cores
    python -m benchmarks.scoring --rounds 1      a quick look

Built-in conversations, each with its reference turn, its rivals, four swapped responses, an empty
one and the bare header; then half of them with 25 generations of 24 tokens each, as
``--score-generations`` scores them. Contexts are computed in the units of a default run, whose
prefill exists already. "Pass by pass" runs every (context, turn) through the model alone and reads
the same log-probabilities, those of the candidates at all temperatures, as a script without a
shared prefill does. The contenders take turns in one process and must agree. Prints Markdown.
"""

import argparse
import itertools
import statistics
import sys
from collections.abc import Sequence

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.sampling.measure import setting
from benchmarks.sampling.workload import timed
from ia_mech.chat.format import ChatFormat
from ia_mech.cli import Parser, guarded, whole_from
from ia_mech.data.conversations import open_conversations
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Decoded, Row
from ia_mech.engine.plan import OomBackoff, contexts_per_batch, plan_units
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.likelihood.scorer import (
    ContextScores,
    Scorable,
    ScoredCandidate,
    Scorer,
    scored_temperatures,
)
from ia_mech.likelihood.swaps import SwapSources
from ia_mech.models.load import ModelSpec, load

SWAPS, GENERATIONS, NEW_TOKENS, BATCH_ROWS = 4, 25, 24, 64
TEMPERATURES = scored_temperatures((0.7, 1.0, 1.3))


class PassByPass:
    """Every turn after every context, each in a forward pass of its own."""

    def __init__(self, model: PreTrainedModel, chat: ChatFormat, swaps: SwapSources) -> None:
        self.model, self.chat, self.swaps = model, chat, swaps

    @torch.inference_mode()
    def logprobs(
        self, context: Sequence[int], turn: Sequence[int], temperatures: Sequence[float] = (1.0,)
    ) -> list[float]:
        """Of a whole turn after a context at each temperature, nats."""
        ids = torch.tensor([[*context, *turn]], device=self.model.device)
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=len(turn) + 1).logits
        logits = logits[0, :-1].float()
        chosen = torch.tensor(turn, device=logits.device)[:, None]
        return [
            float((logits / t).log_softmax(-1).gather(-1, chosen).double().sum())
            for t in temperatures
        ]

    def score(
        self, item: Scorable, candidates: Sequence[ScoredCandidate], decoded: Sequence[Decoded]
    ) -> list[float]:
        """All log-probabilities of one context, in the order of :func:`flat`."""
        assert self.chat.closing_id is not None  # the embedded model closes turns with a token
        conversation, end = item.conversation, [self.chat.closing_id]
        responses = ["", *(one.response for one in self.swaps.responses(item.order, SWAPS))]
        others = [self.chat.context(conversation.with_response(r).messages).ids for r in responses]
        others.append(self.chat.opening(conversation.messages))
        found = [
            value
            for one in candidates
            for value in self.logprobs(item.ids, [*one.ids, *end], TEMPERATURES)
        ]
        turns = [[*one.ids, *end] for one in candidates if one.contrasts is not None]
        turns += [row.token_ids.tolist() for row in decoded]
        return found + [self.logprobs(other, turn)[0] for turn in turns for other in others]


def flat(scores: ContextScores) -> list[float]:
    """Our log-probabilities of one context: of the candidates at all temperatures, then of every
    turn after everything that replaces the response."""
    found = [
        float(total)
        for one in scores.candidates
        for total in one.scored.logprobs_tempered.astype(float).sum(-1)
    ]
    turns = [one.contrasts for one in scores.candidates if one.contrasts is not None]
    for contrasts in [*turns, *(scores.generations or [])]:
        for one in (contrasts.empty, *contrasts.swapped, contrasts.header):
            assert one is not None  # the embedded model's template expresses all of them
            found.append(one.content if one.whole is None else one.whole)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = Parser(prog="python -m benchmarks.scoring", description=__doc__)
    parser.add_argument(
        "--rounds", type=whole_from(1), default=3, help="of every contender (default: 3)"
    )
    parser.add_argument("--contexts", type=whole_from(2), default=4, help="default: 4")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    args = parser.parse_args(argv)
    return guarded(lambda: run(args), lambda: "nothing was kept")


def run(args: argparse.Namespace) -> None:
    """Measure and print."""
    subject = load(ModelSpec(device=args.device, dtype="float32"))
    chat = ChatFormat(subject.tokenizer)
    source = open_conversations("builtin", limit=None, columns=ColumnMap(), split=None, subset=None)
    conversations = list(enumerate(source))
    swaps = SwapSources.of(((o, c, None) for o, c in conversations), subject.tokenizer, seed=0)
    items = []
    for order, conversation in conversations[: args.contexts]:
        context = chat.context(conversation.messages)
        assert conversation.reference is not None  # the built-in ones have one
        ids = chat.reference_ids(conversation.messages, context, conversation.reference)
        items.append(Scorable(order, conversation, context.ids, ids))
    tokens = np.mean([len(item.ids) for item in items])
    print(
        f"{setting(subject.device, 'float32')}; {len(items)} contexts of {tokens:.0f} tokens, "
        f"{args.rounds} rounds, medians.\n"
    )
    print("| | ours, s | pass by pass, s | ours / pass by pass (min … max) | differ by, nats |")
    print("|---|---|---|---|---|")
    for name, part, count in (
        (f"references and candidates of {len(items)} contexts", items, 0),
        ("half of them, with 25 generations each", items[: len(items) // 2], GENERATIONS),
    ):
        found = compare(subject.model, chat, swaps, part, count, args.rounds)
        print(f"| {name} | {found} |", flush=True)


def compare(
    model: PreTrainedModel, chat: ChatFormat, swaps: SwapSources, items: Sequence[Scorable],
    generations: int, rounds: int,
) -> str:  # fmt: skip
    """One row of the table."""
    prefixes = [Prefix(item.ids) for item in items]
    rows = [
        Row(at, 1.0, stream_key(0, "benchmark", sample))
        for at in range(len(items))
        for sample in range(generations)
    ]
    written = (
        decode(model, prefill(model, prefixes), rows, chat.stop_ids, NEW_TOKENS) if rows else []
    )
    of_context = [written[at * generations : (at + 1) * generations] for at in range(len(items))]
    scorer = Scorer(
        model, chat, swaps, TEMPERATURES, swaps=SWAPS, generations=generations > 0, own=None,
        limit=None, rows_limit=OomBackoff(BATCH_ROWS, lambda size: None),
        note=lambda kind, problem: None,
    )  # fmt: skip
    units = plan_units(
        [len(item.ids) for item in items], contexts_per_batch(GENERATIONS, BATCH_ROWS)
    )
    prefilled = [prefill(model, [prefixes[i] for i in unit]) for unit in units]  # made anyway
    order = list(itertools.chain(*units))
    found: list[ContextScores] = []
    expected: list[list[float]] = []
    plain = PassByPass(model, chat, swaps)

    def ours() -> None:
        found.clear()
        for unit, group in zip(units, prefilled, strict=True):
            members = [items[i] for i in unit]
            scores = scorer.score_candidates(group, members)
            scorer.add_contrasts(members, scores, [of_context[i] for i in unit])
            found.extend(scores)

    def pass_by_pass() -> None:
        expected[:] = [
            plain.score(items[i], scores.candidates, of_context[i])
            for i, scores in zip(order, found, strict=True)
        ]

    seconds: list[list[float]] = [[], []]
    for _ in range(rounds):
        for contender, taken in zip((ours, pass_by_pass), seconds, strict=True):
            taken.append(timed(contender, model.device))
    differences = [
        abs(a - b)
        for scores, theirs in zip(found, expected, strict=True)
        for a, b in zip(flat(scores), theirs, strict=True)
    ]
    ratios = [a / b for a, b in zip(*seconds, strict=True)]
    middle = [statistics.median(taken) for taken in seconds]
    return (
        f"{middle[0]:.1f} | {middle[1]:.1f} | **{statistics.median(ratios):.0%}** "
        f"({min(ratios):.0%} … {max(ratios):.0%}) | {max(differences):.1e}"
    )


if __name__ == "__main__":
    sys.exit(main())
