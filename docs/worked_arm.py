"""Do user turns need the response's last sentence?

Turns are sampled after each response without its last sentence. How often a judge calls them
follow-ups is compared with turns after the whole response, paired by query. The control leaves out
the first sentence instead: such a response is shorter, too, but ends as before.

Needs: a judged run. Cost: twice that of sampling the run's turns.

    python docs/worked_arm.py cache/RUN
"""

import sys
from functools import cached_property

from experiments.arms import Arm, conversations_of
from experiments.change import sentences
from experiments.judged import Arms

NO_LAST, NO_FIRST = "without its last sentence", "without its first one"
KEPT = {NO_LAST: slice(None, -1), NO_FIRST: slice(1, None)}


class LastSentence(Arms):
    name = "last_sentence"
    queries_used = 40
    controls = (NO_FIRST,)

    @cached_property
    def contexts(self):
        """Those whose responses have several sentences."""
        found = super().contexts
        several = [len(sentences(one.response)) > 1 for one in conversations_of(found)]
        return found[several]

    def arms(self):
        def shorter(one, kept):
            return one.with_response("".join(sentences(one.response)[kept]))

        whole = conversations_of(self.contexts)
        return {name: Arm([shorter(one, kept) for one in whole]) for name, kept in KEPT.items()}


if __name__ == "__main__":
    sys.exit(LastSentence.main())
