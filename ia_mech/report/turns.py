"""The turns of runs as columns, for a page's browser."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from ia_mech.errors import UserError
from ia_mech.judge.decoys import KINDS
from ia_mech.judge.rubric import GENUINE, NAMES
from ia_mech.judge.verdict import GROUNDED_P, JUDGED
from ia_mech.models.load import load_tokenizer_and_config, recalled
from ia_mech.page import packed
from ia_mech.rates.load import FAILED
from ia_mech.report.contents import TURNS, Results
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.untrusted import visible

CATEGORIES = [*NAMES, FAILED, "not judged"]
BITS, TOKEN_BITS = "reaction_bits", "bits_by_token"  # columns of an experiment's turns.parquet
SAID = [*KEY, "repeat", "category", "status", "rationale", "grounded_p"]
DECOY = (*KEY, "shown", "decoy")
MOST = 100_000_000  # bytes of a page's data
FEW = 100_000  # turns that are packed to see how many bytes turns take

Cutter = Callable[[str, np.ndarray], list[int] | None]  # of a turn's text and token ids


def browser(
    runs: Sequence[Run], names: Sequence[str], results: Sequence[list[Results]], most: int = MOST
) -> tuple[str, str]:
    """The packed data of the turn browser, and a sentence on how much it holds.

    Where all turns take more than ``most`` bytes, whole contexts are drawn at random, of every run
    and dataset the same share.

    Args:
        runs: the runs.
        names: what the page calls them.
        results: of experiments, by run. Bits of turns come from those with a ``turns.parquet`` that
            has the columns ``context_id``, ``temperature``, ``sample`` and ``reaction_bits``.
        most: bytes.
    """
    cutters = [_cutter(run) for run in runs]
    contexts = pd.concat(
        [
            run.turns.drop_duplicates("context_id")[["context_id", "dataset"]].assign(run=number)
            for number, run in enumerate(runs)
        ]
    ).astype({"context_id": object, "dataset": object})
    count = sum(len(run.turns) for run in runs)
    share, measured = min(1.0, FEW / count), False
    while True:
        drawn = contexts.groupby(["run", "dataset"]).sample(frac=share, random_state=0)
        if drawn.empty:
            raise UserError(f"not even one context fits a page of {most} bytes", "show fewer runs")
        kept = [set(drawn.loc[drawn["run"] == number, "context_id"]) for number in range(len(runs))]
        several = zip(runs, results, cutters, kept, strict=True)
        frames = [_frames(*of, number) for number, of in enumerate(several)]
        shown, turns = (pd.concat(of, ignore_index=True) for of in zip(*frames, strict=True))
        del frames
        data = packed(_columns(shown, turns, names))
        if len(data) <= most and (measured or share == 1):
            break
        share = min(1.0, share * most / len(data) * (1 if measured else 0.95))
        measured = True
    words = f"{count} turns after {len(contexts)} contexts."
    if share < 1:
        words = (
            f"This page holds {(turns['decoy'] == '').sum()} of {count} turns, those after "
            f"{len(shown)} of {len(contexts)} contexts, drawn at random with the same share of "
            f"every run and dataset: all of them would take more than {most / 1e6:g} MB. The "
            "numbers above are of all turns."
        )
    bare = [visible(run.model["name"]) for run, cut in zip(runs, cutters, strict=True) if not cut]
    if bare:
        words += (
            f" Tokens of {', '.join(dict.fromkeys(bare))} are not shaded, since the tokenizer is "
            "not on this machine."
        )
    return data, words


def _frames(
    run: Run, results: Sequence[Results], cut: Cutter | None, kept: set[str], number: int
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ``kept`` contexts of a run, and the turns after them, with all that is known of each."""
    frames = []
    for contexts, turns in run.windows(
        ["context_id", "dataset", "response_cut_off", "response_index", "messages", "order"],
        [*KEY, "text", "logprob_raw", "logprobs_raw", "token_ids"],
    ):
        contexts = contexts[contexts["context_id"].isin(kept)]
        turns = turns[turns["context_id"].isin(kept)]
        cells = zip(turns["text"], turns["token_ids"], strict=True)
        pieces = [cut(text, ids) if cut else None for text, ids in cells]
        messages = contexts["messages"]
        frames.append(
            (
                contexts.drop(columns="messages").assign(
                    run=number,
                    query=[_query(list(all_)[:-1]) for all_ in messages],
                    response=[all_[-1]["content"] for all_ in messages],
                ),
                turns.drop(columns="token_ids").assign(
                    run=number, pieces=pd.Series(pieces, turns.index, dtype=object)
                ),
            )
        )
    contexts, turns = (pd.concat(of) for of in zip(*frames, strict=True))
    contexts = contexts.sort_values("order").astype({"context_id": object, "dataset": object})
    turns = turns.sort_index().astype({"context_id": object})
    for file in sorted(run.path.glob("probes/*/predictions.parquet")):
        found = _read(file, "context_id", "probability").drop_duplicates("context_id")
        found = found.set_index("context_id")["probability"]
        contexts[f"probe {file.parent.name}"] = contexts["context_id"].map(found)
    labels, decoys = [], []
    for judge in run.labels.judges:
        said = run.labels.judgements(judge, SAID)
        labels.append(_said(said[said["context_id"].isin(kept)], judge, KEY))
        decoys.append(_said(run.labels.decoys(judge), judge, DECOY))
    texts = turns[[*KEY, "run", "text"]]
    for said in labels:
        turns = turns.join(said, on=list(KEY))
    for one in results:
        turns = _with_bits(turns, one.folder / TURNS)
    turns = turns.assign(decoy="")
    if decoys:
        rows = pd.concat(decoys, axis=1).reset_index().merge(texts, on=list(KEY))
        rows = rows[rows["shown"].isin(kept)].assign(context_id=rows["shown"])
        turns = pd.concat([turns, rows.drop(columns="shown")])
    return contexts, turns


def _said(rows: pd.DataFrame, judge: str, key: Sequence[str]) -> pd.DataFrame:
    """Category and reason of a judge's first verdicts, and whether a turn is genuine and grounded
    (NaN where the judge doesn't test it)."""
    rows = rows[rows["repeat"] == 0]
    rows = rows.astype({"context_id": object, "category": object}).set_index(list(key))
    p = rows["grounded_p"].astype(float)
    grounded = ((rows["category"] == GENUINE) & (p <= GROUNDED_P)).where(p.notna())
    columns = {
        f"category {judge}": rows["category"].where(rows["status"] == JUDGED, FAILED),
        f"reason {judge}": rows["rationale"],
        f"grounded {judge}": grounded.astype(float),
    }
    return pd.DataFrame(columns)


def _query(messages: list[dict[str, str]]) -> str:
    """The query; of a longer conversation, all that came before the response."""
    if len(messages) == 1:
        return messages[0]["content"]
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in messages)


def _with_bits(turns: pd.DataFrame, file: Path) -> pd.DataFrame:
    if not file.is_file():
        return turns
    found = _read(file)
    if not {*KEY, BITS} <= set(found):
        return turns
    found = found.drop_duplicates(list(KEY))
    kept = [name for name in (BITS, TOKEN_BITS) if name in found]
    return turns.drop(columns=kept, errors="ignore").merge(
        found[[*KEY, *kept]], "left", on=list(KEY)
    )


def _read(file: Path, *wanted: str) -> pd.DataFrame:
    try:
        found = pq.read_table(file).to_pandas()
    except (pa.ArrowException, OSError):
        found = None
    if found is None or not {*wanted} <= set(found):
        raise UserError(f"{file} is damaged", "remove it, or analyse again")
    return found


def _cutter(run: Run) -> Cutter | None:
    """Says how many UTF-16 units of its text each token of a turn is; None where it can't be told.

    None without the model's tokenizer, which is not fetched: a page can be made where the model
    isn't.
    """
    try:
        spec = recalled(run.settings, run.model["weights_hash"])
        tokenizer, _ = load_tokenizer_and_config(spec, fetch=False)
    except UserError:
        return None
    known: dict[int, str] = {}

    def piece(token: int) -> str:
        if token not in known:
            known[token] = tokenizer.decode([token], clean_up_tokenization_spaces=False)
        return known[token]

    def cut(text: str, ids: np.ndarray) -> list[int] | None:
        lengths: list[int] = []
        at = 0
        for token in ids.tolist():
            part = piece(token)
            if not text.startswith(part, at):
                return lengths if at == len(text) else None  # the turn's end isn't in its text
            lengths.append(len(part.encode("utf-16-le")) // 2)
            at += len(part)
        return lengths

    return cut


def _columns(contexts: pd.DataFrame, turns: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    """What the page's script reads: a list or iterator per column. Texts are made visible."""
    places = pd.MultiIndex.from_frame(contexts[["run", "context_id"]])
    datasets = sorted(contexts["dataset"].unique())
    judges = [name.removeprefix("category ") for name in turns if name.startswith("category ")]
    codes = {name: code for code, name in enumerate(CATEGORIES)}
    columns: dict[str, Any] = {
        "context": places.get_indexer(
            pd.MultiIndex.from_frame(turns[["run", "context_id"]])
        ).tolist(),
        "temperature": turns["temperature"].tolist(),
        "text": _texts(turns["text"]),
        "decoy": [KINDS.index(kind) + 1 if kind else 0 for kind in turns["decoy"]],
        "labels": {
            visible(judge): {
                "category": [
                    codes.get(name, len(CATEGORIES) - 1) for name in turns[f"category {judge}"]
                ],
                "reason": _texts(turns[f"reason {judge}"]),
                "grounded": _numbers(turns[f"grounded {judge}"], 0),
            }
            for judge in judges
        },
        "logprob": _numbers(turns["logprob_raw"], 2),
        "logprobs": map(_rounded, turns["logprobs_raw"]),
        "pieces": turns["pieces"].where(turns["pieces"].notna(), None).tolist(),
        "bits": _numbers(turns[BITS], 3) if BITS in turns else None,
        "token_bits": map(_rounded, turns[TOKEN_BITS]) if TOKEN_BITS in turns else None,
    }
    return {
        "runs": [visible(name) for name in names],
        "datasets": [visible(name) for name in datasets],
        "categories": CATEGORIES,
        "contexts": {
            "id": _texts(contexts["context_id"]),
            "run": contexts["run"].tolist(),
            "dataset": [datasets.index(name) for name in contexts["dataset"]],
            "response_index": _numbers(contexts["response_index"], 0),
            "cut_off": contexts["response_cut_off"].fillna(False).astype(bool).tolist(),
            "query": _texts(contexts["query"]),
            "response": _texts(contexts["response"]),
            "probes": {
                visible(name.removeprefix("probe ")): _numbers(contexts[name], 3)
                for name in contexts
                if name.startswith("probe ")
            },
        },
        "turns": columns,
    }


def _texts(values: pd.Series) -> Iterator[str]:
    return (visible(value) if isinstance(value, str) else "" for value in values)


def _numbers(values: pd.Series, digits: int) -> list[float | None]:
    numbers = values.astype(float).round(digits)
    return [None if np.isnan(value) else value for value in numbers.tolist()]


def _rounded(row: Any) -> list[float | None] | None:
    if row is None or np.ndim(row) == 0:
        return None
    return [None if np.isnan(x) else round(x, 2) for x in np.asarray(row, dtype=float).tolist()]
