"""The built-in judge: an encoder's reading of the three texts, and a classifier fitted on labels.

Rules settle what no classifier should: empty and looping turns, thinking markers, plans, closings,
other scripts (``features.settled``). For all others a support-vector machine on what
``features.py`` measures gives a probability of each category. ``CARD.md`` says what it was fitted
on and how good it is; ``benchmarks/builtin_judge.py`` fits it.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, cached_property
from importlib.resources import files
from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from ia_mech.judge.builtin.features import evidence, form, relations, settled, spoken
from ia_mech.judge.rubric import FOLLOW_UP, VERSION
from ia_mech.judge.verdict import Item, Judge, Verdict
from ia_mech.models import embedded

if TYPE_CHECKING:
    from ia_mech.judge.builtin.encoder import Encoder
    from ia_mech.judge.builtin.features import Text

NAME = "builtin"  # of its verdicts
CATEGORIES = (  # that the classifier tells apart
    *(FOLLOW_UP, "new_topic", "speaks_as_assistant", "repeats_query", "repeats_response"),
    *("degenerate", "generic"),
)
MODEL = "model.npz"
_READ_WITH = ("__init__.py", "encoder.py", "features.py", "words.toml", MODEL)
_KEPT = 150_000  # word pieces of texts that were read and are kept, in case they come again


class Classifier:
    """A support-vector machine with a Gaussian kernel, and probabilities from its decisions.

    A decision is between two categories; a multinomial logistic regression on all 21 of them gives
    the probabilities. Arrays: ``axes`` ``[components, width]`` and ``origin`` (principal components
    of turns' meanings), ``mean`` and ``scale`` (of features, then components), ``vectors``
    ``[vectors, features]`` (standardised), ``gamma``, ``weights`` ``[vectors, pairs]`` and ``bias``
    (of pairs of categories), ``slopes`` ``[pairs, categories]`` and ``levels``.
    """

    clip = 6.0  # standard deviations

    def __init__(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.arrays = arrays

    def standardised(self, features: np.ndarray, meanings: np.ndarray) -> np.ndarray:
        """``[turns, features + components]``."""
        a = self.arrays
        both = np.hstack([features, (meanings - a["origin"]) @ a["axes"].T])
        return np.clip((both - a["mean"]) / a["scale"], -self.clip, self.clip)

    def decisions(self, x: np.ndarray) -> np.ndarray:
        """``[turns, pairs]``, positive for the first of a pair."""
        a = self.arrays
        far = (x**2).sum(1)[:, None] + (a["vectors"] ** 2).sum(1) - 2 * x @ a["vectors"].T
        return np.exp(-a["gamma"] * np.maximum(far, 0)) @ a["weights"] + a["bias"]

    def probabilities(self, features: np.ndarray, meanings: np.ndarray) -> np.ndarray:
        """``[turns, categories]``."""
        decided = self.decisions(self.standardised(features, meanings))
        odds = decided @ self.arrays["slopes"] + self.arrays["levels"]
        odds = np.exp(odds - odds.max(1, keepdims=True))
        return odds / odds.sum(1, keepdims=True)


@cache
def _shipped() -> tuple[dict[str, np.ndarray], str]:
    """The arrays of ``model.npz``, and a hash of all that decides a verdict but the encoder."""
    folder, digest = files("ia_mech.judge.builtin"), hashlib.sha256()
    for name in _READ_WITH:
        digest.update((folder / name).read_bytes())
    with (folder / MODEL).open("rb") as file, np.load(file, allow_pickle=False) as arrays:
        return dict(arrays), digest.hexdigest()[:16]


class BuiltInJudge(Judge):
    """Rules, then the classifier; see the package. The encoder is fetched when it is first needed,
    which raises ``UserError`` where it can't be had.
    """

    batch = 256
    caveat = (
        "The built-in judge was fitted on English turns of SmolLM2-135M and Qwen2.5-Coder-1.5B at "
        "T ≤ 0.7. At higher temperatures it may take nonsense for a new topic. It takes most "
        "queries that are asked again in other words for follow-ups, which wrong conversations "
        "don't show. On a study that was left out of the fit, it agrees with a language model's "
        "labels (follow-up or not): κ from 0.59 [0.51, 0.67] (SmolLM2) to 0.75 [0.65, 0.83] "
        "(Qwen, maths). See ia_mech/judge/builtin/CARD.md."
    )

    def __init__(self) -> None:
        arrays, digest = _shipped()
        self._classifier, self._fitted = Classifier(arrays), {*arrays["items"].tolist()}
        self._kept: dict[str, Text] = {}
        encoder = embedded.ENCODER.sha256
        self.identity = {"kind": NAME, "rubric": VERSION, "model": digest, "encoder": encoder}

    @cached_property
    def encoder(self) -> "Encoder":
        from ia_mech.judge.builtin.encoder import Encoder  # torch takes a while

        return Encoder(embedded.encoder_directory())

    def prepare(self) -> None:
        _ = self.encoder
        self.prepared = True

    def fitted_on(self, items: Sequence[Item]) -> list[bool]:
        return [int(item.id, 16) in self._fitted for item in items]

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        rules = [settled(item.query, item.response, spoken(item.turn)) for item in items]
        rest = [item for item, rule in zip(items, rules, strict=True) if rule is None]
        parts = (rest[at : at + self.batch] for at in range(0, len(rest), self.batch))
        others = chain.from_iterable(map(self._classified, parts))
        return [
            Verdict(rule[0], rationale=rule[1], mode="rule") if rule else next(others)
            for rule in rules
        ]

    def measured(self, items: Sequence[Item]) -> tuple[list[dict[str, float]], np.ndarray]:
        """The features of turns, and ``[turns, width]`` their meanings."""
        if sum(len(text.ids) for text in self._kept.values()) > _KEPT:
            self._kept.clear()
        read, turns = self._kept, [spoken(item.turn) for item in items]
        texts = dict.fromkeys((*turns, *(t for i in items for t in (i.query, i.response))))
        new = [text for text in texts if text not in read]
        read |= zip(new, self.encoder.read(new), strict=True)
        found = [
            form(turn, item.turn) | relations(read[turn], read[item.query], read[item.response])
            for item, turn in zip(items, turns, strict=True)
        ]
        return found, np.array([read[turn].meaning for turn in turns])

    def _classified(self, items: Sequence[Item]) -> Iterator[Verdict]:
        """A follow-up if that is more likely than not, else the likeliest other category."""
        found, meanings = self.measured(items)
        names = self._classifier.arrays["features"].tolist()
        rows = np.array([[each[name] for name in names] for each in found])
        odds = self._classifier.probabilities(rows, meanings)
        for item, each, p in zip(items, found, odds, strict=True):
            order = np.argsort(-p, kind="stable").tolist()
            best = 0 if p[0] > 0.5 else next(i for i in order if i)
            seen = evidence(each, spoken(item.turn), item.query, item.response)
            why = f"p(follow-up) {p[0]:.2f}: {seen}"
            scores = {name: round(float(of), 4) for name, of in zip(CATEGORIES, p, strict=True)}
            yield Verdict(CATEGORIES[best], rationale=why, scores=scores, mode="classifier")
