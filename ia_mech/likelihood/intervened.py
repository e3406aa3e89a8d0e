"""How likely given turns are after one context, under interventions.

What precedes the first token that an intervention may touch is computed once. Only the tokens from
there on are computed again: of every row, and from the first layer on that its interventions touch.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.capture import ResidualCapture, find_blocks
from ia_mech.engine.intervene import Intervention, from_layer, intervene
from ia_mech.engine.memory import Backoff
from ia_mech.engine.sampling import log_sum_exp
from ia_mech.engine.state import Prefix, State, expand, forward, prefill

ROWS = 16  # of a pass: some 500 tokens, at which a CPU is at its best

Read = TypeVar("Read")
Row = tuple[int, Sequence[Intervention]]  # the number of a turn, and what is done in its row


class IntervenedTurns:
    """Turns after a context, whose tokens from ``start`` on may be touched.

    Args:
        model: the subject model.
        context: ids, with the open header.
        start: index of the first token that an intervention may touch.
        turns: ids of each turn; their last tokens are predicted only.
        on_tokens: called after each pass with how many tokens were computed.

    Attributes:
        states: ``[turns, layers + 1, tokens, d_model]`` from ``start`` on, without intervention.
    """

    states: Tensor

    def __init__(
        self,
        model: PreTrainedModel,
        context: Sequence[int],
        start: int,
        turns: Sequence[Sequence[int]],
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self.model, self.start, self.turns = model, start, turns
        self._on_tokens = on_tokens or (lambda count: None)
        self._blocks = find_blocks(model)
        self._header = len(context) - start
        self._before = prefill(model, [Prefix(context[:start])]) if start else None
        self._on_tokens(start)
        longest = max(map(len, turns))
        width = self._header + longest - 1
        ids, mask = torch.zeros(2, len(turns), width, dtype=torch.long)
        for row, turn in enumerate(turns):
            tokens = [*context[start:], *turn[:-1]]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        self._lengths = mask.sum(1).tolist()
        self._ids, self._mask = ids.to(model.device), mask.to(model.device)
        # Padding is captured, too: what begins in a layer has to begin with numbers.
        everywhere = torch.arange(width).expand(len(turns), -1)
        with ResidualCapture(self._blocks, everywhere) as capture:
            self._pass(range(len(turns)))
        self.states = capture.residuals()

    def score(self, rows: Sequence[Row], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-likelihoods of turns under interventions.

        Args:
            rows: the number of a turn and the interventions in its row, which may differ.
            temperature: of the distribution that tokens are scored under.

        Returns:
            For each row ``[tokens]`` of its turn, in nats.
        """
        return self.read(rows, partial(self._logprobs, temperature=temperature))

    def read(
        self, rows: Sequence[Row], read: Callable[[Tensor, Sequence[int]], Sequence[Read]]
    ) -> list[Read]:
        """What is read of the logits under interventions.

        Args:
            rows: as of :meth:`score`.
            read: takes logits ``[rows, turn tokens, vocab]`` of some of the rows, which predict
                each turn's tokens, and the numbers of their turns; returns something of each.
        """
        depth = len(self._blocks)
        begins = [min((one.layer for one in some), default=depth) for _, some in rows]
        order = sorted(range(len(rows)), key=begins.__getitem__)

        def read_batch(batch: Sequence[int]) -> Sequence[Read]:
            some = [rows[i] for i in batch]
            logits = self._logits(some, begins[batch[0]])
            return read(logits, [number for number, _ in some])

        by_row = dict(zip(order, Backoff(ROWS).map(read_batch, order), strict=True))
        return [by_row[i] for i in range(len(rows))]

    def differentiable(self, rows: Sequence[Row]) -> Tensor:
        """``[rows, turn tokens, vocab]`` logits as :meth:`read` gives them, of one pass through
        which gradients reach the tensors that interventions hold."""
        layer = min((one.layer for _, some in rows for one in some), default=len(self._blocks))
        return self._logits(rows, layer, gradients=True)

    def _logits(self, rows: Sequence[Row], layer: int, gradients: bool = False) -> Tensor:
        """Of a batch of rows that nothing touches below the layer."""
        turns = [number for number, _ in rows]
        with (
            intervene(self.model, [some for _, some in rows], [self.start] * len(rows)),
            from_layer(self.model, layer, self.states[turns, layer]),
        ):
            return self._pass(turns, gradients)

    def _pass(self, turns: Sequence[int], gradients: bool = False) -> Tensor:
        """``[rows, turn tokens, vocab]`` logits of a batch of these turns."""
        if self._before is None:
            begin = torch.zeros(len(turns), dtype=torch.long, device=self.model.device)
            cache = DynamicCache(config=self.model.config)
            state = State(cache, self._mask[list(turns), :0], begin)
        else:
            state = expand([self._before], [0] * len(turns), share=False)
        keep = self._ids.shape[1] - self._header + 1
        ids, mask = self._ids[list(turns)], self._mask[list(turns)]
        logits = forward(self.model, state, ids, mask, keep=keep, gradients=gradients)
        self._on_tokens(sum(self._lengths[turn] for turn in turns))
        return logits

    def _logprobs(
        self, logits: Tensor, turns: Sequence[int], temperature: float
    ) -> list[np.ndarray]:
        found = []
        for row, number in enumerate(turns):
            turn = torch.tensor(self.turns[number], device=logits.device)[:, None]
            own = logits[row, : len(turn)]
            below = own - own.amax(-1, keepdim=True)
            total = log_sum_exp(below, temperature, out=torch.empty_like(below))
            found.append((below.gather(-1, turn) / temperature - total)[:, 0].cpu().numpy())
        return found
