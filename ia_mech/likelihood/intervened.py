"""How likely given turns are after one context, under interventions.

What precedes the first token that an intervention may touch is computed once. Only the tokens from
there on are computed again: of every row, and from the first layer on that its interventions touch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from ia_mech.engine.capture import ResidualCapture, find_blocks
from ia_mech.engine.intervention import Intervention, from_layer, intervene
from ia_mech.engine.plan import OomBackoff
from ia_mech.engine.prefill import Prefix, State, expand, forward, prefill
from ia_mech.engine.sampling import log_sum_exp

ROWS = 16  # of a pass: some 500 tokens, at which a CPU is at its best


class Continued:
    """Turns after a context, whose tokens from ``start`` on may be touched.

    Args:
        model: the subject model.
        context: ids, with the open header.
        start: index of the first token that an intervention may touch.
        turns: ids of each turn; their last tokens are predicted only.

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
    ) -> None:
        self.model, self.start, self.turns = model, start, turns
        self._blocks = find_blocks(model)
        self._header = len(context) - start
        self._before = prefill(model, [Prefix(context[:start])]).state if start else None
        longest = max(map(len, turns))
        width = self._header + longest - 1
        ids, mask = torch.zeros(2, len(turns), width, dtype=torch.long)
        for row, turn in enumerate(turns):
            tokens = [*context[start:], *turn[:-1]]
            ids[row, : len(tokens)] = torch.tensor(tokens)
            mask[row, : len(tokens)] = 1
        self._ids, self._mask = ids.to(model.device), mask.to(model.device)
        # Padding is captured, too: what begins in a layer has to begin with numbers.
        everywhere = torch.arange(width).expand(len(turns), -1)
        with ResidualCapture(self._blocks, everywhere) as capture:
            self._pass(range(len(turns)))
        self.states = capture.residuals()

    def score(
        self,
        rows: Sequence[tuple[int, Sequence[Intervention]]],
        temperature: float = 1.0,
    ) -> list[np.ndarray]:
        """Log-likelihoods of turns under interventions.

        Args:
            rows: the number of a turn and the interventions in its row, which may differ.
            temperature: of the distribution that tokens are scored under.

        Returns:
            For each row ``[tokens]`` of its turn, in nats.
        """
        return self._of_rows(rows, partial(self._logprobs, temperature=temperature))

    def first_tokens(self, rows: Sequence[Sequence[Intervention]]) -> np.ndarray:
        """``[rows, vocab]`` log-probabilities of the turn's first token at T = 1, in nats."""

        def first(logits: Tensor, turns: Sequence[int]) -> list[np.ndarray]:
            return list(logits[:, 0].log_softmax(-1).cpu().numpy())

        return np.stack(self._of_rows([(0, some) for some in rows], first))

    def _of_rows(
        self,
        rows: Sequence[tuple[int, Sequence[Intervention]]],
        read: Callable[[Tensor, Sequence[int]], list[np.ndarray]],
    ) -> list[np.ndarray]:
        """What ``read`` makes of the logits ``[rows, turn tokens, vocab]`` of rows of turns."""
        depth = len(self._blocks)
        begins = [min((one.layer for one in some), default=depth) for _, some in rows]
        order = sorted(range(len(rows)), key=begins.__getitem__)

        def scored(part: Sequence[int]) -> list[np.ndarray]:
            turns = [rows[i][0] for i in part]
            layer = begins[part[0]]
            with (
                intervene(self.model, [rows[i][1] for i in part], [self.start] * len(part)),
                from_layer(self.model, layer, self.states[turns, layer]),
            ):
                logits = self._pass(turns)
            return read(logits, turns)

        found = OomBackoff(ROWS).map(scored, order)
        of = dict(zip(order, found, strict=True))
        return [of[i] for i in range(len(rows))]

    def _pass(self, turns: Sequence[int]) -> Tensor:
        """``[rows, turn tokens, vocab]`` logits of a batch of these turns."""
        index = torch.zeros(len(turns), dtype=torch.long, device=self.model.device)
        if self._before is None:
            cache = DynamicCache(config=self.model.config)
            state = State(cache, self._mask[list(turns), :0], index)
        else:
            state = expand(self._before, index)
        keep = self._ids.shape[1] - self._header + 1
        ids, mask = self._ids[list(turns)], self._mask[list(turns)]
        return forward(self.model, state, ids, mask, keep=keep)

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
