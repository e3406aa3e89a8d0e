"""Judge all published turns again by the built-in judge, each by a fit without its query.

    python docs/results/data/verdicts.py

The queries, grouped by their text in all studies, are in ten folds (``fold`` in contexts.parquet).
The verdicts on the turns of a fold's queries come from a classifier that is fitted on
labels.parquet without the turns and the conversations of these queries. The script replaces the
verdicts in turns.parquet, and ``judged`` in labels.parquet. It takes ten minutes of one core, most
of it for the encoder.
"""

from pathlib import Path

import numpy as np
import pandas as pd
from make import write

from benchmarks.builtin_judge import CLOSE, fit
from ia_mech.judge.builtin import CATEGORIES, BuiltInJudge
from ia_mech.judge.builtin.features import settled, spoken
from ia_mech.judge.verdict import Item

DATA = Path(__file__).parent
FOLDS = 10
TURN = ["study", "source_context", "temperature", "sample"]
PAIR = [*TURN, "context"]  # a turn, and the conversation that it is shown after
KINDS = {"own": "", "sibling": "_after_siblings", "wrong_conversation": "_after_wrong"}


def published(name: str) -> pd.DataFrame:
    """A table of all studies; temperatures are rounded, since files have single precision."""
    files = sorted(DATA.glob(f"*/{name}.parquet"))
    table = pd.concat([pd.read_parquet(file).assign(study=file.parent.name) for file in files])
    if "temperature" in table:
        table["temperature"] = table["temperature"].astype(float).round(3)
    return table.reset_index(drop=True)


def of_each(rows: pd.DataFrame, keys: list[str], values: pd.Series) -> np.ndarray:
    """``[rows]`` of the values, which are named by ``study`` and other columns."""
    return values.reindex(pd.MultiIndex.from_frame(rows[keys])).to_numpy()


def groups(texts: pd.Series) -> np.ndarray:
    """``[queries]``, equal for the same words."""
    plain = texts.str.lower().str.replace(r"\W+", " ", regex=True).str.strip()
    return np.unique(plain, return_inverse=True)[1]


def shown(turns: pd.DataFrame, contexts: pd.DataFrame) -> pd.DataFrame:
    """Which turn is shown after which conversation: its own, its siblings (other responses to the
    query, unless they are worded alike), and a wrong one.

    Within a study and a dataset the queries are put into a random cycle. A turn is shown after a
    conversation of the query before its own; the four conversations take turns.
    """
    rng = np.random.default_rng(0)
    mine = turns.rename(columns={"context": "source_context"})[TURN]
    found = [mine.assign(context=mine["source_context"], kind="own")]
    for (study, _), of in contexts.groupby(["study", "dataset"], sort=True):
        by_query = dict([*of.groupby("query", sort=True)])
        cycle = rng.permutation(len(by_query))
        names = [*by_query]
        for at, before in zip(cycle, np.roll(cycle, 1), strict=True):
            here, there = by_query[names[at]], by_query[names[before]]["context"].to_list()
            response = dict(zip(here["context"], here["response"], strict=True))
            asked = mine[(mine["study"] == study) & mine["source_context"].isin(response)]
            for other, said in response.items():
                differs = asked["source_context"].map(response) != said
                found.append(asked[differs].assign(context=other, kind="sibling"))
            rank = asked.groupby("temperature").cumcount() % len(there)
            wrong = [there[k] for k in rank]
            found.append(asked.assign(context=wrong, kind="wrong_conversation"))
    return pd.concat(found, ignore_index=True)


def items_of(pairs: pd.DataFrame, turns: pd.DataFrame, contexts: pd.DataFrame) -> list[Item]:
    said = contexts.set_index(["study", "context"])
    written = turns.set_index(["study", "context", "temperature", "sample"])["text"]
    columns = [of_each(pairs, ["study", "context"], said[of]) for of in ("query_text", "response")]
    return [Item(*texts) for texts in zip(*columns, of_each(pairs, TURN, written), strict=True)]


def measured(judge: BuiltInJudge, items: list[Item]) -> tuple[np.ndarray, np.ndarray]:
    """``[items, features]``, and ``[items, width]`` the turns' meanings."""
    rows, meanings = [], []
    for at in range(0, len(items), judge.batch):
        found, vectors = judge.measured(items[at : at + judge.batch])
        rows += [[*one.values()] for one in found]
        meanings.append(vectors)
    return np.array(rows), np.concatenate(meanings)


def judged(
    judge: BuiltInJudge, pairs: pd.DataFrame, items: list[Item], labels: pd.DataFrame
) -> tuple[np.ndarray, np.ndarray]:
    """The category of each pair and its probability of a follow-up, by fits without its query.

    ``pairs`` have ``fold`` and ``shown_fold``, the folds of the query that the turn was written
    after and of the one that it is shown after; ``labels`` have ``row``, their place in ``pairs``,
    and ``group``, of the query.
    """
    rules = [settled(one.query, one.response, spoken(one.turn)) for one in items]
    category = np.array([rule[0] if rule else "" for rule in rules], dtype=object)
    chance, by_rule = np.zeros(len(items)), category != ""
    features, meanings = measured(judge, items)
    row, fold, other = (x.to_numpy() for x in (labels["row"], pairs["fold"], pairs["shown_fold"]))
    # The labels have two plans, which rules find; for the classifier they speak as the assistant.
    known = labels["category"].replace({"plans": "speaks_as_assistant"}).map(CATEGORIES.index)
    weights = np.where(labels["close"], CLOSE, 1.0)
    turn, group = labels.groupby(TURN).ngroup().to_numpy(), labels["group"].to_numpy()
    data = features[row], meanings[row], known.to_numpy(), weights, group, turn
    for one in range(FOLDS):
        kept = (fold[row] != one) & (other[row] != one)
        mine = np.flatnonzero((fold == one) & ~by_rule)
        classifier = fit(tuple(of[kept] for of in data))
        odds = classifier.probabilities(features[mine], meanings[mine])
        best = np.where(odds[:, 0] > 0.5, 0, 1 + odds[:, 1:].argmax(1))
        category[mine], chance[mine] = np.array(CATEGORIES, dtype=object)[best], odds[:, 0]
    return category, chance


def with_verdicts(turns: pd.DataFrame, pairs: pd.DataFrame) -> pd.DataFrame:
    """The turns' texts and verdicts."""
    key = ["study", "context", "temperature", "sample"]
    table = turns[[*key, "text"]].copy()
    for kind, name in KINDS.items():
        of = pairs[pairs["kind"] == kind]
        rates = of.groupby(TURN)["follow_up"].mean()
        of = of.set_index(TURN)
        if kind == "own":
            for column in ("category", "probability"):
                table[column] = of_each(table, key, of[column])
        table[f"follow_up{name}"] = of_each(table, key, rates)
        if kind == "wrong_conversation":
            table["wrong"] = of_each(table, key, of["context"])
    return table


def main() -> None:
    contexts, turns, labels = map(published, ("contexts", "turns", "labels"))
    contexts["group"] = groups(contexts["query_text"])
    drawn = np.random.default_rng(0).permutation(contexts["group"].max() + 1) % FOLDS
    contexts["fold"] = drawn[contexts["group"]]
    pairs = shown(turns, contexts)
    every = pd.concat([pairs, labels])[PAIR].drop_duplicates().sort_values(PAIR, ignore_index=True)
    of = contexts.set_index(["study", "context"])
    every["fold"] = of_each(every, ["study", "source_context"], of["fold"])
    every["shown_fold"] = of_each(every, ["study", "context"], of["fold"])
    place = pd.Series(every.index, pd.MultiIndex.from_frame(every[PAIR]))
    labels["row"] = of_each(labels, PAIR, place)
    labels["group"] = of_each(labels, ["study", "context"], of["group"])
    items = items_of(every, turns, contexts)
    category, chance = judged(BuiltInJudge(), every, items, labels)
    at = of_each(pairs, PAIR, place)
    pairs["category"], pairs["probability"] = category[at], chance[at].round(3)
    pairs["follow_up"] = (pairs["category"] == "follow_up").astype(float)
    unknown = pairs["category"] == "cannot_assess"
    pairs.loc[unknown, ["follow_up", "probability"]] = np.nan
    tables = {
        "turns": with_verdicts(turns, pairs),
        "contexts": contexts.drop(columns="group"),
        "labels": labels.assign(judged=category[labels["row"]]).drop(columns=["row", "group"]),
    }
    for name, table in tables.items():
        for study, one in table.groupby("study"):
            write({name: one.drop(columns="study").reset_index(drop=True)}, DATA / str(study))


if __name__ == "__main__":
    main()
