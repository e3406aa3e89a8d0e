"""Do a turn's first words tell which response it followed?

Every turn's first three tokens are scored after each of the K responses to its query. The estimate
is how many bits likelier they are after the response that they followed than after its siblings, on
average. The control compares one sibling, which they did not follow, with the others. It never
sees the own response, and is 0 if the turn fits all siblings equally well.

Needs: a run with three or more responses per query (sample with --response generate --responses 4).
Cost: about a second a query on a CPU (135M).

    python docs/worked_experiment.py cache/RUN
"""

import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment, Unit
from experiments.shown import Bars, tables_of
from ia_mech.engine.score import Turn
from ia_mech.estimates import Group, by_dataset

TOKENS = 3
OWN, CONTROL = "own response", "a sibling"


@dataclass(frozen=True)
class Opened(Unit):
    """A query's contexts and, for each turn, the response that it followed and its first tokens."""

    contexts: list[tuple[int, ...]]
    turns: list[tuple[int, tuple[int, ...]]]

    def rows(self, model):
        k = len(self.contexts)
        wanted = [Turn(j, ids) for _, ids in self.turns for j in range(k)]
        scored = model.score(self.contexts, wanted)
        bits = np.array([one.logprobs_raw.sum() for one in scored]).reshape(-1, k) / np.log(2)
        rows = []
        for (followed, _), each in zip(self.turns, bits, strict=True):
            siblings = np.roll(each, -followed)[1:]  # each comes first equally often
            rows.append({"term": OWN, "bits": each[followed] - siblings.mean()})
            rows.append({"term": CONTROL, "bits": siblings[0] - siblings[1:].mean()})
        return pd.DataFrame(rows)


class FirstWords(Experiment):
    name = "first_words"
    siblings = True
    queries_used = 40

    def units(self):
        for query in self.queries:
            if len(query.contexts) >= 3:  # a control needs two siblings
                firsts = [tuple(ids[:TOKENS].tolist()) for ids in query.turns["token_ids"]]
                turns = list(zip(query.turns["followed"].tolist(), firsts, strict=True))
                scored = len(turns) * len(query.contexts) * TOKENS
                tokens = sum(map(len, query.token_ids)) + scored
                yield Opened(query.source, query.dataset, tokens, query.token_ids, turns)

    def estimate(self, rows):
        for dataset, here in by_dataset(rows):
            for term, mine in rows[here].groupby("term", sort=False):
                group = Group(mine["source"].to_numpy(), self.options, {"dataset": dataset})
                yield group.mean("bits", mine["bits"], term=term)

    def tables(self, found):
        columns = {"bits": ("bits for it", 2)}
        return tables_of("the first three tokens", found, columns, index=("dataset", "term"))

    def figures(self, found):
        return {"bits": Bars("the first three tokens", "bits for a response", found)}

    def conclude(self, found):
        own, control = (found[found["term"] == term] for term in (OWN, CONTROL))
        return Conclusion(
            self.tested("bits for the response that a turn followed", own),
            self.tested("bits for a sibling that it did not follow", control),
        )


if __name__ == "__main__":
    sys.exit(FirstWords.main())
