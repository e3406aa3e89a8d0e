"""How likely turns are after each response to their query, as a model reads them."""

import re
from collections.abc import Sequence

import numpy as np
from torch import Tensor
from transformers import PreTrainedModel

from ia_mech.chat.format import ChatContext
from ia_mech.engine.intervene import Intervention, Replace
from ia_mech.likelihood.intervened import Continued

_WORD = re.compile(r"\w+")


class Reading:
    """Turns after each of the K responses to one query, read by one model.

    Args:
        model: a causal language model.
        contexts: with each of the responses.
        turns: ids of turns that followed any of them.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        contexts: Sequence[ChatContext],
        turns: Sequence[Sequence[int]],
    ) -> None:
        self._runs = []
        for context in contexts:
            start = context.positions.get("header_0", context.positions["header_last"])
            assert start is not None  # every context has a header
            self._runs.append(Continued(model, context.ids, start, turns))
        self._headers = [
            len(one.ids) - run.start for one, run in zip(contexts, self._runs, strict=True)
        ]
        self._count = len(turns)

    @property
    def header(self) -> list[Tensor]:
        """After each response ``[layers + 1, header tokens, d_model]`` states."""
        return [
            run.states[0, :, :length] for run, length in zip(self._runs, self._headers, strict=True)
        ]

    def logprobs(self, temperature: float, header: Sequence[Tensor] | None = None) -> np.ndarray:
        """``[turns, K]`` of whole turns, in nats.

        Args:
            temperature: that turns are scored at.
            header: states to put in place of the header's, after each response; all layers.
        """
        columns = []
        for k, (run, length) in enumerate(zip(self._runs, self._headers, strict=True)):
            at = tuple(range(run.start, run.start + length))
            own: tuple[Intervention, ...] = ()
            if header is not None:
                own = tuple(Replace(layer, at, some) for layer, some in enumerate(header[k]))
            found = run.score([(turn, own) for turn in range(self._count)], temperature)
            columns.append([float(one.sum(dtype=np.float64)) for one in found])
        return np.array(columns).T


def trigrams(text: str) -> list[tuple[str, ...]]:
    """Runs of three words, in their order."""
    words = _WORD.findall(text.lower())
    return list(zip(words, words[1:], words[2:], strict=False))


def restated(turn: str, query: str) -> float:
    """The share of the turn's trigrams that its query has; 0 of a turn without any."""
    found, asked = trigrams(turn), set(trigrams(query))
    return sum(one in asked for one in found) / len(found) if found else 0.0


def repeated(turn: str) -> float:
    """The share of the turn's trigrams that stand in it before; 0 of a turn without any."""
    found = trigrams(turn)
    return 1 - len(set(found)) / len(found) if found else 0.0


def stock(turns: Sequence[str], sources: Sequence[str]) -> list[float]:
    """Of each turn, the share of its trigrams that turns after other queries have, too.

    It is high for generic questions, and rises as a model's turns lose their diversity.
    """
    found = [trigrams(turn) for turn in turns]
    where: dict[tuple[str, ...], set[str]] = {}
    for some, source in zip(found, sources, strict=True):
        for one in some:
            where.setdefault(one, set()).add(source)
    return [sum(len(where[one]) > 1 for one in some) / max(len(some), 1) for some in found]
