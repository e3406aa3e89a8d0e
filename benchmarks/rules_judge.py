"""How good the rules judge is, and how its classifier was fitted.

Usage::

    python -m benchmarks.rules_judge measure NAME=FILE...   # annotated turns -> numbers, no texts
    python -m benchmarks.rules_judge evaluate               # nested, grouped cross-validation
    python -m benchmarks.rules_judge fit                    # the same, then writes model.json

``measure`` keeps the features, category and source of every annotated turn in
``rules_judge_turns.parquet`` beside this file, without texts, so that anyone can evaluate and fit
again. Sets that aren't given keep their numbers. FILE is JSON lines with query, response,
user_turn, category and source_id. ``close`` marks a turn that a careful reader could have labelled
otherwise. ``weight`` is the number of turns that this one stands for, if a sheet was drawn with
unequal probabilities. The set ``lead`` has no close calls and is scored first.
"""

import argparse
import json
import sys
import warnings
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import confusion_matrix
from sklearn.model_selection import StratifiedGroupKFold
from sklearn.preprocessing import StandardScaler

from ia_mech.judge import rules
from ia_mech.judge.rubric import ASSESSED, FOLLOW_UP
from ia_mech.judge.rules.features import clear_case, measure
from ia_mech.judge.verdict import Item
from ia_mech.stats import cluster_bootstrap, kappa_of

TABLE = Path(__file__).with_name("rules_judge_turns.parquet")
MODEL = Path(rules.__file__).with_name(rules.MODEL)
LEAD = "lead"
# Turns of Qwen2.5-Coder-1.5B-Instruct. Texts and errors of the first half of the queries were read
# while rules and features were made; those of the other half were not.
QWEN = ("qwen_dev", "qwen_held")
HELD_OUT = QWEN[1]
FOLDS, REPEATS = 5, 5
STRENGTHS = (0.01, 0.03, 0.1)  # C of the logistic regression
EVENING = (0.0, 0.5)  # a category's weight is its size to the power of 1 minus this
RULES_ONLY = ("generic",)  # too few to learn from; rules find the clear cases
CLOSE = 0.5  # of a turn that a careful reader could have labelled otherwise


@dataclass(frozen=True)
class Turns:
    """Annotated turns: ``features [n, features]``; category, source, set, close ``[n]``;
    ``clear [n]``: the category that a rule gives, or ''; ``weight [n]``: the turns that this one
    stands for, in figures, not in the fit."""

    names: tuple[str, ...]
    features: np.ndarray
    category: np.ndarray
    source: np.ndarray
    set: np.ndarray
    close: np.ndarray
    clear: np.ndarray
    weight: np.ndarray

    def rows(self, index: np.ndarray) -> "Turns":
        return Turns(
            self.names,
            *(
                getattr(self, name)[index]
                for name in ("features", "category", "source", "set", "close", "clear", "weight")
            ),
        )


def measure_files(pairs: list[str]) -> None:
    """Write the table of numbers."""
    rows = []
    for pair in pairs:
        name, _, file = pair.partition("=")
        for line in Path(file).read_text(encoding="utf-8").splitlines():
            turn = json.loads(line)
            item = Item(turn["query"], turn["response"], turn["user_turn"])
            clear = clear_case(item)
            rows.append(
                {
                    "set": name,
                    "source": turn["source_id"],
                    "category": turn["category"],
                    "close": bool(turn.get("close", False)),
                    "weight": float(turn.get("weight", 1.0)),
                    "item": item.id,
                    "clear": clear[0] if clear else "",
                    **measure(item),
                }
            )
    measured = pd.DataFrame(rows)
    kept = pd.read_parquet(TABLE)
    if list(kept) != list(measured):
        raise SystemExit("the features have changed: give the files of all sets")
    kept = kept[~kept["set"].isin(measured["set"])]
    pd.concat([kept, measured], ignore_index=True).to_parquet(TABLE)
    print(f"{len(measured)} turns measured, {len(kept)} of other sets kept: {TABLE}")


def read_turns() -> Turns:
    table = pd.read_parquet(TABLE)
    facts = ["set", "source", "category", "close", "clear", "item", "weight"]
    names = tuple(column for column in table if column not in facts)
    return Turns(
        names,
        table[list(names)].to_numpy(float),
        *(table[key].to_numpy(str) for key in ("category", "source", "set")),
        table["close"].to_numpy(bool),
        table["clear"].to_numpy(str),
        table["weight"].to_numpy(float),
    )


@dataclass(frozen=True)
class Hyperparameters:
    """What the inner cross-validation chooses among; see the constants above."""

    strength: float
    evening: float


def fitted(turns: Turns, settings: Hyperparameters) -> rules.Classifier:
    """The classifier, from the turns that no rule settles."""
    turns = turns.rows((turns.clear == "") & ~np.isin(turns.category, RULES_ONLY))
    weights = np.where(turns.close, CLOSE, 1.0)
    totals = {c: weights[turns.category == c].sum() for c in np.unique(turns.category)}
    weights = weights * np.array([totals[c] ** -settings.evening for c in turns.category])
    weights *= len(weights) / weights.sum()
    scaler = StandardScaler().fit(turns.features)
    model = LogisticRegression(C=settings.strength, max_iter=5000)
    model.fit(scaler.transform(turns.features), turns.category, sample_weight=weights)
    return rules.Classifier(
        turns.names,
        tuple(model.classes_),
        scaler.mean_,
        scaler.scale_,
        model.coef_,
        model.intercept_,
    )


def predicted(classifier: rules.Classifier, turns: Turns) -> np.ndarray:
    """Category of each turn by the judge: rules first, then the classifier."""
    scores = (turns.features - classifier.mean) / classifier.scale @ classifier.coefficients.T
    best = np.array(classifier.classes)[np.argmax(scores + classifier.intercepts, axis=1)]
    return np.where(turns.clear == "", best, turns.clear)


def quality(truth: np.ndarray, guess: np.ndarray) -> float:
    """The settings are chosen by this: the mean of the three figures that are reported."""
    table = confusion_matrix(truth == FOLLOW_UP, guess == FOLLOW_UP)
    return float(balanced_accuracy_of(table) + kappa_of(table) + np.mean(truth == guess)) / 3


def balanced_accuracy_of(tables: np.ndarray) -> np.ndarray:
    """Mean recall of ``[..., c, c]`` confusion matrices."""
    return (np.diagonal(tables, axis1=-2, axis2=-1) / tables.sum(-1)).mean(-1)


def folds(turns: Turns, seed: int):
    """Grouped by source; a source that several sets share is in one fold."""
    split = StratifiedGroupKFold(FOLDS, shuffle=True, random_state=seed)
    label = np.char.add(turns.category, np.where(turns.set == LEAD, "*", ""))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a category with fewer turns than folds
        yield from split.split(turns.features, label, turns.source)


def chosen(turns: Turns, seed: int) -> Hyperparameters:
    """The best settings in an inner grouped cross-validation, scored on turns that aren't close."""
    clear = ~turns.close
    parts = list(folds(turns, seed))
    results = {}
    for settings in (Hyperparameters(*values) for values in product(STRENGTHS, EVENING)):
        guess = np.empty(len(turns.category), dtype="<U40")
        for train, test in parts:
            guess[test] = predicted(fitted(turns.rows(train), settings), turns.rows(test))
        results[settings] = quality(turns.category[clear], guess[clear])
    return max(results, key=results.get)


def cross_validated(turns: Turns) -> np.ndarray:
    """``[repeats, turns]``: each turn's category by a judge that never saw its source."""
    guesses = np.empty((REPEATS, len(turns.category)), dtype="<U40")
    for repeat in range(REPEATS):
        for train, test in folds(turns, repeat):
            known = turns.rows(train)
            judge = fitted(known, chosen(known, repeat))
            guesses[repeat, test] = predicted(judge, turns.rows(test))
        print(f"repeat {repeat + 1} of {REPEATS}", file=sys.stderr, flush=True)
    return guesses


def without(turns: Turns, *names: str) -> np.ndarray:
    """``[1, turns]``: categories by a judge fitted on the other sets' other sources alone."""
    left_out = np.isin(turns.set, names)
    known = turns.rows(~left_out & ~np.isin(turns.source, turns.source[left_out]))
    return predicted(fitted(known, chosen(known, 0)), turns)[None]


def report(turns: Turns, guesses: np.ndarray, which: np.ndarray, title: str) -> dict[str, str]:
    """Print and return the figures of some turns, with intervals over their sources."""
    at = np.flatnonzero(which)
    repeats = len(guesses)
    truth, sources, weights = (
        np.tile(values[at], repeats) for values in (turns.category, turns.source, turns.weight)
    )
    guess = guesses[:, at].ravel()

    # Truth, guess and whether the category is right: eight kinds of turns.
    kind = 4 * (truth == FOLLOW_UP) + 2 * (guess == FOLLOW_UP) + (truth == guess)

    def statistic(counts: np.ndarray) -> np.ndarray:
        right = counts[:, 1::2].sum(1) / counts.sum(1)
        tables = counts.reshape(-1, 2, 2, 2).sum(3)
        return np.stack([balanced_accuracy_of(tables), kappa_of(tables), right], axis=1)

    estimates = cluster_bootstrap(statistic, sources, kind, weights=weights, number=8)
    texts = [estimate.text() for estimate in estimates]
    figures = dict(zip(("balanced_accuracy", "kappa", "category_accuracy"), texts, strict=True))
    figures["turns"] = len(at)
    print(f"\n### {title}: {len(at)} turns of {len(np.unique(turns.source[at]))} sources\n")
    print("balanced accuracy {}, kappa {} (follow-up), category accuracy {}\n".format(*texts))
    print("| category | n | recall | precision |\n|---|---|---|---|")
    for category in ASSESSED:
        n = int(np.sum(truth == category)) // repeats
        recall = _share(guess == category, truth == category, weights)
        precision = _share(truth == category, guess == category, weights)
        print(f"| {category} | {n} | {recall} | {precision} |")
    return figures


def _share(part: np.ndarray, of: np.ndarray, weights: np.ndarray) -> str:
    return f"{np.average(part[of], weights=weights[of]):.2f}" if of.any() else "–"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["measure", "evaluate", "fit"])
    parser.add_argument("files", nargs="*", metavar="NAME=FILE")
    args = parser.parse_args()
    if args.command == "measure":
        measure_files(args.files)
        return
    turns = read_turns()
    guesses = cross_validated(turns)
    lead, qwen = turns.set == LEAD, np.isin(turns.set, QWEN)
    others = ~lead & ~qwen
    accuracy = {
        LEAD: report(turns, guesses, lead, "lead, nested cross-validation"),
        "others": report(turns, guesses, others, "SmolLM2's other sets, nested cross-validation"),
        "qwen": report(turns, guesses, qwen, "Qwen's turns, nested cross-validation"),
    }
    held = turns.set == HELD_OUT
    report(turns, without(turns, HELD_OUT), held, "qwen_held, fitted without it and its sources")
    report(turns, without(turns, *QWEN), held, "qwen_held, fitted on SmolLM2's turns alone")
    report(turns, without(turns, LEAD), lead, "lead, fitted without it and its sources")
    clear = others & ~turns.close
    report(turns, guesses, clear, "SmolLM2's other sets, turns that aren't close")
    for name in sorted(set(turns.set) - {LEAD}):
        report(turns, guesses, turns.set == name, f"{name}, nested cross-validation")
    if args.command == "fit":
        settings = chosen(turns, 0)
        classifier = fitted(turns, settings)
        numbers = ("mean", "scale", "coefficients", "intercepts")
        content = {
            "accuracy": accuracy,
            "settings": asdict(settings) | {"close": CLOSE},
            "fitted_on": sorted(set(pd.read_parquet(TABLE)["item"])),
            "features": classifier.features,
            "classes": classifier.classes,
            **{key: np.round(getattr(classifier, key), 5).tolist() for key in numbers},
        }
        MODEL.write_text(json.dumps(content, indent=None) + "\n", encoding="utf-8")
        print(f"\n{settings}: {MODEL}")


if __name__ == "__main__":
    main()
