"""How well the rules judge's ``grounding`` score tells a turn's own conversation from a wrong one.

Usage::

    python -m benchmarks.grounding measure --calibration NAME=RUN... --test NAME=RUN... --bare RUN
    python -m benchmarks.grounding evaluate

``measure`` writes ``grounding.json`` of the judge (common words) and, beside this file,
``grounding_scores.parquet``: the scores of all turns, and no text of anyone. ``evaluate`` makes all
tables of ``grounding.md`` from them. RUN is a run's folder; NAME is the name of its data set.

The p values are conformal (Vovk, Gammerman & Shafer 2005): the share of decoys that score at least
as high. There is one decoy per source, so that each source counts once ("subsampling once" of Dunn,
Wasserman & Ramdas 2023, J. Amer. Statist. Assoc. 118:2491). It is a turn beside the conversation
with the most similar query of its data set, so that p values stay valid in data sets whose
conversations are more alike. ``ia_mech.rates`` takes the decoys of the judged run instead.

Runs for the test hold several responses per query; their sources are left out of the calibration.
Runs with turns after the bare user header come from ``experiments.perturbations``.
"""

import argparse
import json
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import pandas as pd
from sklearn.feature_extraction.text import TfidfVectorizer

from benchmarks.coverage_data import table
from ia_mech.judge import rules
from ia_mech.judge.judging import items_of
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.judge.rules import grounding
from ia_mech.judge.rules.features import FUNCTION_WORDS, stem
from ia_mech.judge.verdict import GROUNDED_P, Item
from ia_mech.models import embedded
from ia_mech.run import Run
from ia_mech.stats import cluster_mean, paired_difference

SCORES = Path(__file__).with_name("grounding_scores.parquet")
TABLE = Path(rules.__file__).with_name(grounding.TABLE)
COMMON = 3000  # stems that get a rank
DRAWS = 2  # random decoys per turn
# Which conversation a turn is compared with, and whose turn it is.
OWN, WRONG, SIMILAR, SIBLING = "own", "wrong conversation", "similar query", "sibling"
PARTS = CALIBRATION, TEST, BARE, PERSON = "calibration", "test", "bare header", "person"


# -- words and scores ------------------------------------------------------------------------------


def common_stems() -> list[str]:
    """Stems in the order in which the embedded model's tokenizer learnt a word that has them.

    Byte-pair encoding merges frequent pairs first (Sennrich, Haddow & Birch 2016). So the order of
    the vocabulary is roughly the order of frequency in a large corpus. None of the data sets here
    is part of that corpus.
    """
    tokenizer = json.loads((embedded.directory() / "tokenizer.json").read_text("utf-8"))
    vocabulary = tokenizer["model"]["vocab"]
    tokens = (t[1:].lower() for t in sorted(vocabulary, key=vocabulary.get) if t.startswith("Ġ"))
    kept = (w for w in tokens if w.isascii() and w.isalpha() and len(w) > 1)
    return list(dict.fromkeys(stem(w) for w in kept if w not in FUNCTION_WORDS))[:COMMON]


def turns_of(name: str, folder: str, part: str) -> pd.DataFrame:
    """Different turns of a run: set, part, source, context, temperature, and the three texts."""
    run = Run.open(folder)
    rows, items = run.generations, items_of(run)
    frame = pd.DataFrame(
        {
            "set": name,
            "part": part,
            "source": rows["source_id"].astype(str),
            "context": rows["context_id"],
            "temperature": rows["temperature"],
            "perturbation": rows["perturbation"],
            "query": [item.query for item in items],
            "response": [item.response for item in items],
            "turn": [item.turn for item in items],
        }
    )
    return frame.drop_duplicates(["context", "temperature", "turn"], ignore_index=True)


def people_of(name: str, folder: str) -> pd.DataFrame:
    """The real follow-ups, one row per conversation that has one."""
    frame = turns_of(name, folder, PERSON).drop_duplicates("context")
    real = Run.open(folder).contexts.set_index("context_id")["reference"]
    frame = frame.assign(turn=frame["context"].map(real), temperature=np.nan)
    return frame[frame["turn"].notna()]


Pairs = tuple[str, pd.DataFrame, pd.DataFrame]  # kind, turns, and the contexts to compare them with


def pairs_of(turns: pd.DataFrame) -> Iterator[Pairs]:
    """A row per turn and context that it is compared with: its own, and others.

    A wrong conversation comes from the same data set: sources are put in a random circle, a new one
    for every temperature, and the turns of each source are compared with a context of the source
    before it. The conversation with a similar query is the one whose query has the largest TF-IDF
    cosine with the turn's query. The sibling is the next response to the same query.
    """
    yield OWN, turns, turns
    rng = np.random.default_rng(0)
    for _, group in turns.groupby(["set", "temperature"], dropna=False):
        by_source = dict(list(group.groupby("source")))
        for _ in range(DRAWS):
            circle = rng.permutation(sorted(by_source))
            before = dict(zip(circle, np.roll(circle, 1), strict=True))
            one = {source: rows.iloc[rng.integers(len(rows))] for source, rows in by_source.items()}
            yield WRONG, group, pd.DataFrame([one[before[source]] for source in group["source"]])
    contexts = turns.drop_duplicates("context").set_index("context")
    for _, group in turns.groupby("set"):
        one = group.drop_duplicates("source").set_index("source")
        weights = TfidfVectorizer(stop_words="english", sublinear_tf=True).fit_transform(
            one["query"]
        )
        similarity = (weights @ weights.T).toarray() - 2 * np.eye(len(one))
        nearest = dict(zip(one.index, one.index[similarity.argmax(1)], strict=True))
        yield SIMILAR, group, one.loc[group["source"].map(nearest)]
    for _, same in contexts.groupby(["set", "source"]):
        if len(same) > 1:
            following = dict(zip(same.index, np.roll(same.index, 1), strict=True))
            there = turns[turns["context"].isin(same.index)]
            yield SIBLING, there, contexts.loc[there["context"].map(following)]


def bare_pairs(bare: pd.DataFrame, tests: pd.DataFrame) -> Iterator[Pairs]:
    """Every turn after the bare header with a random conversation of each data set."""
    rng = np.random.default_rng(0)
    for name, contexts in tests.drop_duplicates("context").groupby("set"):
        drawn = rng.integers(len(contexts), size=len(bare))
        yield WRONG, bare.assign(set=name), contexts.iloc[drawn]


def scored(pairs: Iterable[Pairs], ranks: dict[str, int]) -> pd.DataFrame:
    """The score of every pair, and whether the judge calls it a follow-up."""
    judge, frames = rules.RulesJudge(), []
    for kind, turns, contexts in pairs:
        texts = zip(contexts["query"], contexts["response"], turns["turn"], strict=True)
        items = [Item(*each) for each in texts]
        frames.append(
            turns[["set", "part", "source", "temperature"]].assign(
                kind=kind,
                score=np.array([grounding.rarest_shared(i, ranks)[0] for i in items], np.int16),
                follow_up=[judge.verdict(item).category == FOLLOW_UP for item in items],
            )
        )
    return pd.concat(frames, ignore_index=True)


def measure(args: argparse.Namespace) -> None:
    """Write the judge's table and the scores."""
    stems = common_stems()
    ranks = {word: rank for rank, word in enumerate(stems, start=1)}
    named = {
        part: [one.split("=", 1) for one in getattr(args, part)] for part in (CALIBRATION, TEST)
    }
    tests = pd.concat([turns_of(name, folder, TEST) for name, folder in named[TEST]])
    known = set(zip(tests["set"], tests["source"], strict=True))
    rest, people = [], []
    for name, folder in named[CALIBRATION]:
        frame = turns_of(name, folder, CALIBRATION)
        rest.append(frame[[(name, source) not in known for source in frame["source"]]])
        people.append(people_of(name, folder))
    bare = pd.concat([turns_of("", folder, BARE) for folder in args.bare])
    bare = bare[bare["perturbation"] == "header_only"]
    pairs = chain(
        *(pairs_of(frame.reset_index(drop=True)) for frame in (*rest, tests, *people)),
        bare_pairs(bare.drop_duplicates(["source", "temperature", "turn"]), tests),
    )
    scores = scored(pairs, ranks).astype(dict.fromkeys(("set", "part", "kind"), "category"))
    scores.to_parquet(SCORES)
    TABLE.write_text(json.dumps({"common": " ".join(stems)}) + "\n", encoding="utf-8")
    print(f"{len(scores)} scores: {SCORES}\n{len(stems)} words: {TABLE}")


def one_per_source(scores: pd.DataFrame, without: str = "") -> np.ndarray:
    """``[sources]`` ascending scores: one random turn of every source, with the similar query."""
    decoys = scores[(scores["part"] == CALIBRATION) & (scores["kind"] == SIMILAR)]
    decoys = decoys[decoys["set"] != without].sort_values(["set", "source", "temperature", "score"])
    return np.sort(decoys.groupby(["set", "source"])["score"].sample(1, random_state=0).to_numpy())


def p_value(score: int, decoys: np.ndarray) -> float:
    """``(1 + number of decoys that score as high) / (1 + number of decoys)``.

    Args:
        score: of the turn; higher is better grounded.
        decoys: ``[sources]`` scores, ascending.
    """
    above = len(decoys) - int(np.searchsorted(decoys, score, side="left"))
    return (1 + above) / (1 + len(decoys))


# -- what is reported ------------------------------------------------------------------------------

COUNTED = ["sources", "decoys, p ≤ 0.05", "own turns, p ≤ 0.05", "own follow-ups, p ≤ 0.05"]


def with_p_values(scores: pd.DataFrame, decoys: np.ndarray) -> pd.DataFrame:
    """The scores, with ``small`` (whether the p value is small) and ``grounded``."""
    small = np.array([p_value(score, decoys) for score in scores["score"]])
    small = small <= GROUNDED_P
    return scores.assign(small=small, grounded=small & scores["follow_up"].to_numpy())


def share(rows: pd.DataFrame, what: str) -> str:
    """Share of rows with an interval over sources."""
    return cluster_mean(rows[what].astype(float), rows["source"], proportion=True).text(3)


def counted(rows: pd.DataFrame) -> list[object]:
    """Floor and power of some turns: cells of :data:`COUNTED`."""
    own, other = rows[rows["kind"] == OWN], rows[rows["kind"] == WRONG]
    follow_up = own[own["follow_up"]]
    return [
        own["source"].nunique(),
        share(other, "small"),
        share(own, "small"),
        share(follow_up, "small"),
    ]


def leave_one_set_out(scores: pd.DataFrame) -> Iterator[list[object]]:
    """Floor and power in each data set, with decoys of the three others alone."""
    for name in sorted(scores.loc[scores["part"] == CALIBRATION, "set"].unique()):
        judged = with_p_values(scores[scores["set"] == name], one_per_source(scores, name))
        for part in (CALIBRATION, TEST):
            yield [name, part, *counted(judged[judged["part"] == part])]


def by_temperature(judged: pd.DataFrame) -> Iterator[list[object]]:
    """Floor and power of all data sets together, with the shipped decoys."""
    turns = judged[judged["part"].isin([CALIBRATION, TEST])]
    for (part, temperature), rows in turns.groupby(["part", "temperature"]):
        yield [part, f"{temperature:g}", *counted(rows)]


def others(judged: pd.DataFrame, part: str) -> Iterator[list[object]]:
    """Figures of real follow-ups, and of turns that the model wrote without a conversation."""
    for (name, kind), rows in judged[judged["part"] == part].groupby(["set", "kind"]):
        shares = (share(rows, what) for what in ("small", "follow_up", "grounded"))
        yield [name, kind, len(rows), *shares]


def excess(judged: pd.DataFrame) -> Iterator[list[object]]:
    """Rate, floor and excess on the test queries, of follow-ups and of grounded ones."""
    tests = judged[judged["part"] == TEST]
    for what in ("follow_up", "grounded"):
        for shown in ("all", *sorted(tests["temperature"].unique())):
            rows = tests if shown == "all" else tests[tests["temperature"] == shown]
            kinds = dict(list(rows.groupby("kind")))
            cells = [share(kinds[OWN], what), share(kinds[WRONG], what)]
            for kind in (WRONG, SIBLING):
                columns = [of[at] for of in (kinds[OWN], kinds[kind]) for at in (what, "source")]
                cells.append(paired_difference(*columns).difference.text(3))
            yield [what, shown, *cells]


def evaluate() -> None:
    """Print all tables, from the scores alone."""
    scores = pd.read_parquet(SCORES)
    decoys = one_per_source(scores)
    judged = with_p_values(scores, decoys)
    smallest = min(score for score in set(decoys) if p_value(score, decoys) <= GROUNDED_P)
    print(f"{len(decoys)} decoys; p ≤ 0.05 from a score of {smallest} on.\n")
    print("### Data sets absent from the calibration\n")
    table(["left out", "turns of", *COUNTED], leave_one_set_out(scores), 8, "left out")
    print("### By temperature\n")
    table(["turns of", "T", *COUNTED], by_temperature(judged), 7, "temperature")
    header = ["compared with", "turns", "p ≤ 0.05", "follow_up", "grounded"]
    print("### Turns after the bare user header\n")
    table(["set", *header], others(judged, BARE), 4, "bare header")
    print("### What people wrote next\n")
    table(["set", *header], others(judged, PERSON), 4, "people")
    print("### Rate, floor and excess on the test queries\n")
    header = ["verdict", "T", "rate", "floor", "excess", "excess over another response"]
    table(header, excess(judged), 8, "excess")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=["measure", "evaluate"])
    parser.add_argument(f"--{CALIBRATION}", nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument(f"--{TEST}", nargs="+", default=[], metavar="NAME=RUN")
    parser.add_argument("--bare", nargs="+", default=[], metavar="RUN")
    args = parser.parse_args()
    if args.command == "measure":
        measure(args)
    evaluate()


if __name__ == "__main__":
    main()
