"""How much of a part is computed at once: the second step of a plan, once weights are there."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from ia_mech.collect.parts import QUEUE
from ia_mech.collect.plan import Plan
from ia_mech.engine.memory import Footprint

# Where memory allows only a few long responses at a time, so many times more are begun: those that
# wait take the places of those that end.
WAITING = 4


class Memory:
    """How many rows of a part are computed together, once the model's sizes are known.

    Args:
        plan: of the run.
        size: what the model's contexts and rows hold.
        room: bytes that a part may take.

    Attributes:
        waiting: how many times more responses are begun than are decoded together.
    """

    def __init__(self, plan: Plan, size: Footprint, room: int) -> None:
        self.plan, self.size, self.room = plan, size, room
        prompt = max(len(one.prompt) for one in plan.contexts)
        row = size.row(prompt, plan.settings.max_response_tokens)
        # Not where prompts fill the memory.
        self.waiting = WAITING if row > WAITING**2 * size.context(prompt) else 1

    def together(self, kind: str, orders: Sequence[int]) -> tuple[int, int]:
        """The most rows of a part that are decoded together, and the bytes that the part takes."""
        settings, contexts = self.plan.settings, [self.plan.contexts[order] for order in orders]
        if kind == "responses":
            each, queue, new = 1, self.waiting, settings.max_response_tokens
            lengths = [len(one.prompt) for one in contexts if one.prompt]
        else:
            each, queue = len(settings.rows()), QUEUE[self.plan.device.type]
            lengths, new = [one.tokens for one in contexts], settings.max_new_tokens
        row = self.size.row(max(lengths, default=0), new)
        longest = sorted(map(self.size.context, lengths), reverse=True)
        held = list(accumulate(longest, initial=0))  # by so many contexts, the longest first

        def taken(limit: int) -> int:
            begun = min(len(lengths), max(1, queue * limit // each))
            return held[begun] + min(limit, each * len(lengths)) * row

        limit = max(1, bisect_right(range(1, self.plan.batch_rows + 1), self.room, key=taken))
        return limit, taken(limit)

    @property
    def part_bytes(self) -> int:
        """About how much memory the largest part takes."""
        parts = self.plan.parts
        kinds = {"responses": parts.responses, "contexts": parts.contexts}
        return max(
            self.together(kind, part)[1] for kind, named in kinds.items() for part in named.values()
        )
