"""Do user turns need the response's last sentence?

Turns are sampled after each response without its last sentence. How often a judge calls them
follow-ups is compared with turns after the whole response, paired by query. The control leaves out
the first sentence instead: such a response is shorter, too, but ends as before.

Needs: a judged run. Cost: twice that of sampling the run's turns.

    python docs/worked_arm.py cache/RUN
"""

import sys

import pandas as pd

from experiments.arms import Arm, conversations_of, verdicts_of
from experiments.change import sentences
from experiments.control import arm_estimates
from experiments.experiment import Conclusion, Experiment
from experiments.outcome import RATE
from experiments.shown import only, tables_of

WHOLE, NO_LAST, NO_FIRST = "whole response", "without its last sentence", "without its first one"
LESS = "minus the whole response's"
KEPT = {NO_LAST: slice(None, -1), NO_FIRST: slice(1, None)}


class LastSentence(Experiment):
    name = "last_sentence"
    judged = True
    queries_used = 40

    def arms(self):
        contexts = pd.concat([query.contexts for query in self.queries], ignore_index=True)
        self.used = [one for one in conversations_of(contexts) if len(sentences(one.response)) > 1]
        return {
            name: Arm(
                [one.with_response("".join(sentences(one.response)[kept])) for one in self.used]
            )
            for name, kept in KEPT.items()
        }

    def rows(self):
        """A row per turn: 1 if the judge calls it a follow-up, else 0."""
        judge, ids, parts = self.judge_arms(), {one.id for one in self.used}, []
        for term, run in {WHOLE: self.runs[0], **self.sampled}.items():
            turns = verdicts_of([run], judge).turns
            turns = turns.loc[turns["context_id"].isin(ids), ["source", "temperature", "follow_up"]]
            parts.append(turns.rename(columns={"follow_up": RATE}).assign(term=term))
        return pd.concat(parts, ignore_index=True)

    def estimate(self, rows):
        by, less = ["temperature", "term"], {LESS: {"term": WHOLE}}
        yield from arm_estimates(rows, by, {RATE: (0, 1)}, less, self.options)

    def tables(self, found):
        columns = {RATE: ("follow-ups", 2), f"{RATE}, {LESS}": (LESS, "+.2f")}
        index = ("temperature", "term")
        return tables_of("follow-ups by the judge", found, columns, index=index)

    def conclude(self, found):
        change = f"{RATE}, {LESS}"
        return Conclusion(
            self.tested(f"follow-ups {NO_LAST}, {LESS}", only(found, change, term=NO_LAST)),
            self.tested(NO_FIRST, only(found, change, term=NO_FIRST)),
        )


if __name__ == "__main__":
    sys.exit(LastSentence.main())
