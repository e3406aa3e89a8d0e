"""What it costs to score given turns, against one forward pass per context and turn.

    python -m benchmarks.scoring                 about ten minutes on two cores
    python -m benchmarks.scoring --rounds 1      a quick look

One workload, one process, the same model object: built-in conversations, each with its reference
turn, its rivals, four swapped responses, an empty one and the bare header; then half of them with
25 generations of 24 tokens each, as ``--score-generations`` scores them. Contexts are computed in
the units of a default run, whose prefill is there already. "Pass by pass" runs every (context,
turn) whole through the model, alone, and reads the same log-probabilities, those of the candidates
at all temperatures: what a script without a shared prefill does. The contenders take turns, and
must agree. Prints Markdown.
"""

import argparse
import itertools
import os
import platform
import statistics

import numpy as np
import torch
import transformers

from benchmarks.sampling.peers import timed
from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import open_conversations
from ia_mech.data.formats import ColumnMap
from ia_mech.engine.decode import decode
from ia_mech.engine.loop import Row
from ia_mech.engine.plan import OomBackoff, contexts_per_batch, plan_units
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.likelihood.scorer import (
    Contrasts,
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
    """Every turn after every context, each a forward pass of its own."""

    def __init__(self, model, chat, donors) -> None:
        self.model, self.chat, self.donors = model, chat, donors
        self.end = [chat.closing_id]

    @torch.inference_mode()
    def logprobs(self, context: list[int], turn: list[int], temperatures=(1.0,)) -> list[float]:
        """Of a whole turn after a context at each temperature, nats."""
        ids = torch.tensor([[*context, *turn]], device=self.model.device)
        keep = len(turn) + 1
        logits = self.model(input_ids=ids, use_cache=False, logits_to_keep=keep).logits[0, :-1]
        chosen = torch.tensor(turn, device=logits.device)
        at = torch.arange(len(turn))
        return [
            float((logits.float() / t).log_softmax(-1)[at, chosen].double().sum())
            for t in temperatures
        ]

    def score(self, item: Scorable, candidates: list[ScoredCandidate], decoded) -> list[float]:
        """All log-probabilities of one context, in the order of :func:`said`."""
        conversation = item.conversation
        lenders = self.donors.responses(item.order, SWAPS)
        others = [
            self.chat.context(conversation.with_response("").messages).ids,
            *(
                self.chat.context(conversation.with_response(d.response).messages).ids
                for d in lenders
            ),
            self.chat.opening(conversation.messages),
        ]
        found = [
            value
            for one in candidates
            for value in self.logprobs(list(item.ids), [*one.ids, *self.end], TEMPERATURES)
        ]
        turns = [[*one.ids, *self.end] for one in candidates if one.contrasts is not None]
        turns += [row.token_ids.tolist() for row in decoded]
        return found + [self.logprobs(other, turn)[0] for turn in turns for other in others]


def said(contrasts: Contrasts) -> list[float]:
    """The log-probabilities of a turn after everything that stands in the response's place."""
    whole = [contrasts.empty, *contrasts.swapped, contrasts.header]
    return [one.content if one.whole is None else one.whole for one in whole]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="of every contender (default: 3)")
    parser.add_argument("--contexts", type=int, default=4, help="2 or more (default: 4)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: auto)")
    args = parser.parse_args()
    subject = load(ModelSpec(device=args.device, dtype="float32"))
    chat = ChatFormat(subject.tokenizer)
    source = open_conversations("builtin", limit=None, columns=ColumnMap(), split=None, subset=None)
    conversations = list(enumerate(source))
    donors = SwapSources.of(((o, c, None) for o, c in conversations), subject.tokenizer, seed=0)
    items = []
    for order, conversation in conversations[: args.contexts]:
        context = chat.context(conversation.messages)
        ids = chat.reference_ids(conversation.messages, context, conversation.reference)
        items.append(Scorable(order, conversation, context.ids, ids))
    print(
        f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        f"{torch.get_num_threads()} threads, float32 on {subject.model.device.type}, torch "
        f"{torch.__version__}, transformers {transformers.__version__}; {len(items)} contexts of "
        f"{np.mean([len(item.ids) for item in items]):.0f} tokens, {args.rounds} rounds, medians.\n"
    )
    print("| | ours, s | pass by pass, s | ours / pass by pass (min … max) | differ by, nats |")
    print("|---|---|---|---|---|")
    for name, part, count in (
        (f"references and candidates of {len(items)} contexts", items, 0),
        ("half of them, with 25 generations each", items[: len(items) // 2], GENERATIONS),
    ):
        found = compare(subject.model, chat, donors, part, count, args.rounds)
        print(f"| {name} | {found} |", flush=True)


def compare(model, chat, donors, items: list[Scorable], generations: int, rounds: int) -> str:
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
        model,
        chat,
        donors,
        TEMPERATURES,
        swaps=SWAPS,
        generations=generations > 0,
        own=None,
        limit=None,
        rows_limit=OomBackoff(BATCH_ROWS, lambda size: None),
        note=lambda kind, problem: None,
    )
    size = contexts_per_batch(GENERATIONS, BATCH_ROWS)
    units = plan_units([len(item.ids) for item in items], size)
    made_anyway = [prefill(model, [prefixes[i] for i in unit]) for unit in units]
    found = {}

    def ours() -> None:
        found["ours"] = []
        for unit, prefilled in zip(units, made_anyway, strict=True):
            members = [items[i] for i in unit]
            scores = scorer.score_candidates(prefilled, members)
            scorer.add_contrasts(members, scores, [of_context[i] for i in unit])
            found["ours"] += scores

    plain = PassByPass(model, chat, donors)

    def alone() -> None:
        found["alone"] = [
            plain.score(items[i], scores.candidates, of_context[i])
            for i, scores in zip(itertools.chain(*units), found["ours"], strict=True)
        ]

    seconds = {ours: [], alone: []}
    for _ in range(rounds):
        for contender, taken in seconds.items():
            taken.append(timed(contender))
    differences = [
        abs(a - b)
        for scores, alone_said in zip(found["ours"], found["alone"], strict=True)
        for a, b in zip(flat(scores), alone_said, strict=True)
    ]
    ratios = [a / b for a, b in zip(*seconds.values(), strict=True)]
    middle = [statistics.median(taken) for taken in seconds.values()]
    return (
        f"{middle[0]:.1f} | {middle[1]:.1f} | **{statistics.median(ratios):.0%}** "
        f"({min(ratios):.0%} … {max(ratios):.0%}) | {max(differences):.1e}"
    )


def flat(scores) -> list[float]:
    """Our log-probabilities in the order of :meth:`PassByPass.score`."""
    candidates = [
        float(total)
        for one in scores.candidates
        for total in one.scored.logprobs_tempered.astype(float).sum(-1)
    ]
    turns = [one.contrasts for one in scores.candidates if one.contrasts is not None]
    turns += scores.generations or []
    return candidates + [value for contrasts in turns for value in said(contrasts)]


if __name__ == "__main__":
    main()
