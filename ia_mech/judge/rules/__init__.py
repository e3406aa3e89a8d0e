"""The embedded judge: offline, deterministic, explainable, and a heuristic.

Plain rules settle clear cases (empty and looping turns, thinking markers, closings, copies, the
assistant's voice); the rest goes to a small multinomial logistic regression on features of the
three texts (``features.py``), fitted on annotated turns and shipped as numbers in ``model.json``.
Beside the category stands a score of the turn's belonging to this conversation
(``grounding.py``). ``CARD.md`` has what the classifier was fitted on and how good both are.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version
from importlib.resources import files
from typing import Any

import numpy as np

from ia_mech.judge.rubric import CANNOT_ASSESS, VERSION, heading
from ia_mech.judge.rules import grounding
from ia_mech.judge.rules.features import (
    FUNCTION_WORDS,
    clear_case,
    content,
    measure,
    stem,
    words,
)
from ia_mech.judge.verdict import Item, Judge, Verdict

MODEL = "model.json"
CODE = ("features.py", "grounding.py", "__init__.py")


@dataclass(frozen=True)
class Classifier:
    """Multinomial logistic regression on standardised features.

    Attributes:
        features: names, in the order of the columns.
        classes: categories, in the order of the rows.
        mean, scale: ``[features]``, of the training turns.
        coefficients: ``[classes, features]``; intercepts: ``[classes]``.
    """

    features: tuple[str, ...]
    classes: tuple[str, ...]
    mean: np.ndarray
    scale: np.ndarray
    coefficients: np.ndarray
    intercepts: np.ndarray

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Classifier":
        arrays = {
            key: np.array(content[key]) for key in ("mean", "scale", "coefficients", "intercepts")
        }
        return cls(tuple(content["features"]), tuple(content["classes"]), **arrays)

    def probabilities(self, features: dict[str, float]) -> np.ndarray:
        """``[classes]``."""
        logits = self.coefficients @ self.standardised(features) + self.intercepts
        odds = np.exp(logits - logits.max())
        return odds / odds.sum()

    def standardised(self, features: dict[str, float]) -> np.ndarray:
        """``[features]``, in training standard deviations from the training mean."""
        return (np.array([features[name] for name in self.features]) - self.mean) / self.scale


@cache
def _shipped() -> tuple[Classifier, dict[str, Any], dict[str, Any]]:
    """The classifier, what decides a verdict, and the record of the fit."""
    folder = files("ia_mech.judge.rules")
    model = json.loads((folder / MODEL).read_bytes())
    code = hashlib.sha256()
    for name in CODE:
        code.update((folder / name).read_bytes())
    identity = {
        "model": hashlib.sha256((folder / MODEL).read_bytes()).hexdigest()[:16],
        "grounding": hashlib.sha256((folder / grounding.TABLE).read_bytes()).hexdigest()[:16],
        "code": code.hexdigest()[:16],
        "libraries": {name: version(name) for name in ("rapidfuzz", "snowballstemmer")},
    }
    return Classifier.from_json(model), identity, model


@cache
def _fitted_items() -> frozenset[str]:
    """The ids of the items that the classifier was fitted on."""
    return frozenset(_shipped()[2]["fitted_on"])


class RulesJudge(Judge):
    """Clear cases by rule, others by the fitted classifier, with the evidence; see the package."""

    def __init__(self) -> None:
        self._classifier, decisive, about = _shipped()
        accuracy = about["accuracy"]
        self.identity = {"kind": "rules", "rubric": VERSION, **decisive}
        smollm, qwen = (accuracy[name] for name in ("others", "qwen"))
        self.caveat = (
            "the rules judge is a heuristic: balanced accuracy against a language model's labels "
            f"{smollm['balanced_accuracy']} (SmolLM2), {qwen['balanced_accuracy']} "
            "(Qwen2.5-Coder); ia_mech/judge/rules/CARD.md"
        )

    def fitted_on(self, items: Sequence[Item]) -> list[bool]:
        known = _fitted_items()
        return [item.id in known for item in items]

    def judge(self, items: Sequence[Item]) -> list[Verdict]:
        return [self.verdict(item) for item in items]

    def verdict(self, item: Item) -> Verdict:
        """The verdict on one item; without a grounding score for one that it can't assess."""
        verdict = self._category(item)
        if verdict.category == CANNOT_ASSESS:
            return verdict
        score, word = grounding.rarest_shared(item, grounding.ranks())
        shared = f"rarest shared word {word!r}" if word else "no rare word shared"
        return replace(verdict, rationale=f"{verdict.rationale}; {shared}", grounding=float(score))

    def _category(self, item: Item) -> Verdict:
        """The rubric's category, and why."""
        clear = clear_case(item)
        if clear is not None:
            category, evidence = clear
            return Verdict(category, rationale=f"rule: {evidence}", mode="rule")
        features = measure(item)
        probabilities = self._classifier.probabilities(features)
        order = np.argsort(-probabilities, kind="stable")
        best, second = (self._classifier.classes[i] for i in order[:2])
        evidence = "; ".join(self._evidence(features, order[0], order[1]))
        rationale = f"{heading(best)} rather than {heading(second)}: {evidence}"
        shared = _shared_words(item)
        if shared:
            rationale += f"; from the response alone: {', '.join(shared)}"
        scores = dict(
            zip(self._classifier.classes, (round(float(p), 4) for p in probabilities), strict=True)
        )
        return Verdict(best, rationale=rationale, scores=scores, mode="classifier")

    def _evidence(self, features: dict[str, float], best: int, second: int) -> list[str]:
        """The three features that speak most for the verdict and against the next category."""
        difference = self._classifier.coefficients[best] - self._classifier.coefficients[second]
        weights = difference * self._classifier.standardised(features)
        evidence = []
        for i in np.argsort(-weights, kind="stable")[:3]:
            name = self._classifier.features[i]
            evidence.append(
                f"{name.replace('_', ' ')} {features[name]:.2f} "
                f"(usually {self._classifier.mean[i]:.2f})"
            )
        return evidence


def _shared_words(item: Item) -> list[str]:
    """Up to four words of the turn that the response has and the query has not."""
    only = set(content(words(item.response))) - set(content(words(item.query)))
    tokens = [w for w in words(item.turn) if w not in FUNCTION_WORDS and stem(w) in only]
    return list(dict.fromkeys(tokens))[:4]
