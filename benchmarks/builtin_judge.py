"""Fits the built-in judge on the labels of the published turns, and says how good it is.

    python -m benchmarks.builtin_judge           agreement out of fold, with intervals over queries
    python -m benchmarks.builtin_judge --write   also fit on all labels, and write model.npz

Labels are in ``docs/results/data/*/labels.parquet``. A query is in one fold, whatever study it is
in; a turn of a fold is nowhere among those fitted on, whatever it is shown after.

A last control is the shipped judge on paraphrases of the query (``paraphrases.toml``), which no
wrong conversation can catch.
"""

import argparse
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.resources import files
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression
from sklearn.svm import SVC

from ia_mech.data.conversations import open_conversations
from ia_mech.judge.builtin import CATEGORIES, MODEL, BuiltInJudge, Classifier
from ia_mech.judge.builtin.features import settled, spoken
from ia_mech.judge.verdict import Item
from ia_mech.stats.agreement import kappa_of

DATA = Path(__file__).parent.parent / "docs" / "results" / "data"
TURN = ["temperature", "sample"]
COMPONENTS = 8  # principal components of turns' meanings
COST = 2.0  # of the support-vector machine
CLOSE = 0.5  # weight of a close call
INNER, OUTER = 5, 10  # folds: for the probabilities, and for the figures
DRAWS = 1000  # of the bootstrap

Fit = tuple[np.ndarray, ...]  # see fit


def read_labels(data: Path = DATA) -> pd.DataFrame:
    """All labels, with the ``study``, the ``item``, the ``dataset`` of the query shown, its
    ``group`` (queries of one text), and ``turn``, equal for the same turn wherever it is shown."""
    tables = []
    for file in sorted(data.glob("*/labels.parquet")):
        shown = pd.read_parquet(file.with_name("contexts.parquet")).set_index("context")
        table = _read(file).assign(study=file.parent.name)
        texts = _read(file.with_name("turns.parquet")).set_index(["context", *TURN])
        keys = table[["source_context", *TURN]].itertuples(index=False, name=None)
        table["turn"] = [(file.parent.name, *key) for key in keys]
        of = shown.loc[table["context"], ["query_text", "response"]].itertuples(index=False)
        said = texts.loc[[turn[1:] for turn in table["turn"]], "text"]
        table["item"] = [Item(*pair, text) for pair, text in zip(of, said, strict=True)]
        table["dataset"] = shown.loc[table["context"], "dataset"].astype(str).to_numpy()
        tables.append(table)
    labels = pd.concat(tables, ignore_index=True)
    words = labels["item"].map(lambda item: item.query).str.lower()
    labels["group"] = words.str.replace(r"\W+", " ", regex=True).str.strip().factorize()[0]
    labels["turn"] = labels["turn"].factorize()[0]
    return labels


def _read(file: Path) -> pd.DataFrame:
    """A table; files may have temperatures in single precision."""
    table = pd.read_parquet(file)
    return table.assign(temperature=table["temperature"].astype(float).round(3))


def data_of(labels: pd.DataFrame, judge: BuiltInJudge) -> tuple[list[str], Fit]:
    """Names of features, and what :func:`fit` takes."""
    items, size = labels["item"].tolist(), judge.batch
    parts = [judge.measured(items[at : at + size]) for at in range(0, len(items), size)]
    found, meanings = [one for some, _ in parts for one in some], [some for _, some in parts]
    names = list(found[0])
    # The labels have two plans, which rules find; for the classifier they speak as the assistant.
    known = labels["category"].replace({"plans": "speaks_as_assistant"})
    features = np.array([[each[name] for name in names] for each in found])
    of = known.map(CATEGORIES.index), np.where(labels["close"], CLOSE, 1.0)
    of = *map(np.asarray, of), labels["group"].to_numpy(), labels["turn"].to_numpy()
    return names, (features, np.concatenate(meanings), *of)


# -- fit ------------------------------------------------------------------------------------------


def folds(groups: np.ndarray, n: int, seed: int) -> np.ndarray:
    """``[turns]``, the fold of each: all of a group in the same one."""
    unique, inverse = np.unique(groups, return_inverse=True)
    return (np.random.default_rng(seed).permutation(len(unique)) % n)[inverse]


def splits(fold: np.ndarray, groups: np.ndarray, turns: np.ndarray) -> Iterator[list[np.ndarray]]:
    """Rows to fit on, and rows of the fold; no turn or query of the fold is among the first."""
    for one in np.unique(fold):
        there = np.flatnonzero(fold == one)
        known = np.isin(turns, turns[there]) | np.isin(groups, groups[there])
        yield [np.flatnonzero((fold != one) & ~known), there]


def pair_weights(svc: SVC) -> np.ndarray:
    """``[vectors, pairs]``, each vector's weight in each pair's decision."""
    of = np.repeat(np.arange(len(svc.classes_)), svc.n_support_)  # its category
    weights = []
    for i in range(len(svc.classes_)):
        for j in range(i + 1, len(svc.classes_)):  # libsvm has a row for each other category
            own, other = np.where(of == i, svc.dual_coef_[j - 1], 0), svc.dual_coef_[i]
            weights.append(own + np.where(of == j, other, 0))
    return np.array(weights).T


def machine(
    features: np.ndarray, meanings: np.ndarray, labels: np.ndarray, weights: np.ndarray
) -> dict[str, np.ndarray]:
    """The arrays of a :class:`Classifier` but those of its probabilities."""
    components = PCA(COMPONENTS, random_state=0).fit(meanings)
    both = np.hstack([features, components.transform(meanings)])
    scaling = {"mean": both.mean(0), "scale": both.std(0) + 1e-6}
    scaling |= {"axes": components.components_, "origin": components.mean_}
    x = Classifier(scaling).standardised(features, meanings)
    gamma = 1 / x.shape[1]
    svc = SVC(C=COST, gamma=gamma).fit(x, labels, sample_weight=weights)
    assert svc.classes_.tolist() == [*range(len(CATEGORIES))], "a category without a turn"
    decisions = {"vectors": svc.support_vectors_, "gamma": np.array(gamma)}
    return scaling | decisions | {"weights": pair_weights(svc), "bias": svc.intercept_}


def fit(data: Fit) -> Classifier:
    """The classifier; its probabilities are fitted on decisions about queries not fitted on.

    ``data`` are ``[turns, features]``, ``[turns, width]`` meanings, and for each turn its place in
    ``CATEGORIES``, its weight, its group and which turn it is.
    """
    *seen, groups, turns = data
    features, meanings, labels, weights = seen
    decided = np.zeros((len(labels), len(CATEGORIES) * (len(CATEGORIES) - 1) // 2))
    for rows, there in splits(folds(groups, INNER, 0), groups, turns):
        inner = Classifier(machine(*(of[rows] for of in seen)))
        decided[there] = inner.decisions(inner.standardised(features[there], meanings[there]))
    odds = LogisticRegression(C=0.1, max_iter=1000).fit(decided, labels, sample_weight=weights)
    arrays = machine(features, meanings, labels, weights)
    arrays |= {"slopes": odds.coef_.T, "levels": odds.intercept_}
    return Classifier({name: value.astype(np.float32) for name, value in arrays.items()})


def out_of_fold(data: Fit, fold: np.ndarray) -> np.ndarray:
    """``[turns, categories]``, probabilities by fits without the turn's fold."""
    found = np.zeros((len(fold), len(CATEGORIES)))
    for rows, there in splits(fold, *data[-2:]):
        classifier = fit(tuple(of[rows] for of in data))
        found[there] = classifier.probabilities(data[0][there], data[1][there])
    return found


# -- figures --------------------------------------------------------------------------------------


def _kappa(cells: np.ndarray) -> float:
    return float(kappa_of(np.bincount(cells, minlength=4).reshape(2, 2)))


def interval(statistic: Callable[[np.ndarray], float], groups: np.ndarray) -> str:
    """A statistic of rows with its 95% interval, from a bootstrap over groups."""
    rng, unique = np.random.default_rng(0), np.unique(groups)
    rows = [np.flatnonzero(groups == one) for one in unique]
    draws = (rng.integers(len(rows), size=len(rows)) for _ in range(DRAWS))
    drawn = [statistic(np.concatenate([rows[k] for k in draw])) for draw in draws]
    low, high = np.nanquantile(drawn, [0.025, 0.975])
    return f"{statistic(np.arange(len(groups))):.3f} [{low:.3f}, {high:.3f}]"


def show(title: str, labels: pd.DataFrame, odds: np.ndarray) -> None:
    """Agreement and calibration after own conversations; follow-up rates by kind."""
    rules = [settled(one.query, one.response, spoken(one.turn)) for one in labels["item"]]
    by_rule = np.array([rule is not None for rule in rules])
    table = labels.assign(
        judge=(odds[:, 0] > 0.5) & ~by_rule, chance=np.where(by_rule, 0, odds[:, 0])
    )
    table["readers"] = labels["category"] == "follow_up"
    print(f"\n{title}")
    own = table[table["kind"] == "own"]
    for name, some in [("all", own), *own.groupby("study"), *own.groupby("dataset")]:
        both = 2 * some["readers"].to_numpy(int) + some["judge"].to_numpy(int)  # cell of a table
        found = interval(lambda rows, of=both: _kappa(of[rows]), some["group"].to_numpy())
        print(f"  κ, {name}: {found} ({len(some)} turns)")
    repeats = own[own["category"] == "repeats_query"]["judge"]
    print(f"  follow-ups: {own['judge'].sum()}; of {len(repeats)} repeated queries {repeats.sum()}")
    for (study, kind), some in table.groupby(["study", "kind"]):
        rates = f"judge {some['judge'].mean():.3f}, readers {some['readers'].mean():.3f}"
        print(f"  follow-up rate, {study}, {kind}: {rates} ({len(some)} turns)")
    for _, some in own.groupby((own["chance"] * 10).astype(int)):
        said = f"of {some['chance'].mean():.2f}: {some['readers'].mean():.2f}"
        print(f"  readers' follow-up rate where the probability is {said} ({len(some)} turns)")


# -- paraphrases ----------------------------------------------------------------------------------


def paraphrased() -> list[Item]:
    """Built-in conversations, each with its query in other words as the turn."""
    texts = tomllib.loads(Path(__file__).with_name("paraphrases.toml").read_text("utf-8"))
    said = {one.id: one.messages for one in open_conversations("builtin")}
    return [
        Item(*(message["content"] for message in said[name][:2]), text)
        for name, text in texts.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--write", action="store_true", help="write the model of all labels")
    write = parser.parse_args().write
    labels, judge = read_labels(), BuiltInJudge()
    names, data = data_of(labels, judge)
    if write:
        ids = sorted({int(item.id, 16) for item in labels["item"]})
        arrays = fit(data).arrays | {"features": np.array(names), "items": np.array(ids, np.uint64)}
        np.savez_compressed(str(files("ia_mech.judge.builtin") / MODEL), **arrays)  # type: ignore[arg-type]
    groups = labels["group"].to_numpy()
    show("out of fold", labels, out_of_fold(data, folds(groups, OUTER, 0)))
    for what in ("study", "dataset"):
        show(f"fitted without the {what}", labels, out_of_fold(data, labels[what].to_numpy()))
    said = Counter(verdict.category for verdict in BuiltInJudge().judge(paraphrased()))
    print(f"\nparaphrases of the query ({said.total()}): {dict(said.most_common())}")


if __name__ == "__main__":
    main()
