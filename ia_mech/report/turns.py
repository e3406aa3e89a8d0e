"""The turns of runs as columns, for a page's browser."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from ia_mech.errors import UserError
from ia_mech.judge.decoys import DECOY_KINDS
from ia_mech.judge.judging import ON_UNPERTURBED
from ia_mech.judge.restated import restates
from ia_mech.judge.rubric import FOLLOW_UP, NAMES, heading, rubric_of
from ia_mech.models.load import load_files, recall
from ia_mech.page import packed
from ia_mech.rates.evidence import (
    CHANGE,
    DEPENDENT,
    FITS_ORIGINAL,
    UNCHANGED,
    changed_runs,
    table_of_run,
)
from ia_mech.run import Run
from ia_mech.run.labelled import FAILED, follow_up_probabilities
from ia_mech.run.labels import KEY
from ia_mech.run.layout import UNPERTURBED
from ia_mech.run.queries import exchange
from ia_mech.run.reader import HeaderLogits
from ia_mech.untrusted import visible

OTHERS = [FAILED, "not judged"]  # shown in place of a category where a turn has none
BITS, TOKEN_BITS = "reaction_bits", "bits_by_token"  # columns of an experiment's turns.parquet
VERDICT = ["rationale", "error", "scores", "mode"]  # what a judge says besides the category
WORDS = ["query", "response", "real_follow_up", "answer", "before", "after"]  # texts of a context
ABOUT = ["context_id", "dataset", "source_id", "perturbation", "response_unfinished"]
ABOUT += ["response_index"]
DECOY = ("row", "shown", "decoy")  # the columns that together name a decoy
MAX_TOKENS = 10_000_000  # in all turns of a page: some 100 MB, which a browser can still open

OPENINGS = 5  # likeliest first tokens that are shown of a context

Piece = Callable[[int], str]  # a token's text


def browser(
    runs: Sequence[Run],
    names: Sequence[str],
    folders: Sequence[Sequence[Path]],
    limit: int = MAX_TOKENS,
    judge: str | None = None,
) -> tuple[str, str]:
    """The packed data of the turn browser, and a sentence on how much it holds.

    If all turns may have more than ``limit`` tokens together, the page holds a random sample of
    whole contexts, with the same share of every run and dataset.

    ``folders`` are each run's results. They add to the turns of every run that they name: bits
    (``reaction_bits``, ``bits_by_token``) from ``turns.parquet``, from that of ``rates`` whether a
    turn is dependent, and a probe's ``probability`` from ``predictions.parquet``. The turns that an
    experiment sampled after changed conversations of a run are among those of the run, if they are
    on this machine.

    The labels of ``judge`` come first.

    Raises:
        UserError: a table of a result is damaged.
    """
    pieces = [_piece(run) for run in runs]
    all_folders = list(dict.fromkeys(folder for of_run in folders for folder in of_run))
    every: list[tuple[int, Run, pd.DataFrame | None]] = []  # place in ``runs``, turns if changed
    for number, (run, of_run) in enumerate(zip(runs, folders, strict=True)):
        every += [(number, run, None), *((number, *of) for of in changed_runs(run, of_run))]
    contexts = pd.concat(
        [
            run.turns.drop_duplicates("context_id")[["context_id", "dataset"]].assign(
                run=number, changed=table is not None
            )
            for number, run, table in every
        ]
    ).astype({"context_id": object, "dataset": object})
    contexts = contexts.drop_duplicates(["run", "context_id"])
    count = sum(len(run.turns) for _, run, _ in every)
    tokens = sum(len(run.turns) * run.settings["max_new_tokens"] for _, run, _ in every)
    share = min(1.0, limit / tokens)
    drawn = contexts.groupby(["run", "changed", "dataset"]).sample(frac=share, random_state=0)
    frames = []
    for number, run, table in every:
        of = drawn[(drawn["run"] == number) & (drawn["changed"] == (table is not None))]
        found = _frames(run, pieces[number], set(of["context_id"]), all_folders)
        if table is None:
            whole = found[0]
        else:
            found = _changed(*found, table, whole)
        frames.append(tuple(frame.assign(run=number) for frame in found))
    shown, turns = (pd.concat(of_runs) for of_runs in zip(*frames, strict=True))
    shown = shown.sort_values("order", kind="stable")  # runs meet after each query
    records = [run.labels.record("judgements", j) for run in runs for j in run.labels.judges]
    follow_ups = {name for record in records for name in rubric_of(record).follow_ups} | {FOLLOW_UP}
    if judge is not None:
        first = [name for name in turns if name == f"category {judge}"]
        turns = turns[[*first, *turns.columns.drop(first)]]
    data = packed(columns_of(shown, turns, names, sorted(follow_ups)))
    plain = sum(len(run.turns) for run in runs)
    changed = contexts["changed"].sum()
    note = f"{plain:,} turns after {len(contexts) - changed:,} conversations."
    if changed:
        note += (
            f" {count - plain:,} turns after {changed:,} changed conversations are hidden: "
            "“condition”, under “more filters”, shows them."
        )
    if share < 1:
        note = (
            f"This page holds {(turns['decoy'] == '').sum():,} of {count:,} turns, those after "
            f"{len(shown):,} of {len(contexts):,} conversations, drawn at random with the same "
            "share of every run and dataset, so that a browser can open it. The numbers above are "
            "of all turns."
        )
    unknown = [run.model["name"] for run, of in zip(runs, pieces, strict=True) if of is None]
    if unknown:
        note += (
            f" Single tokens of {', '.join(dict.fromkeys(unknown))} are not shown, since the "
            "tokenizer is not on this machine."
        )
    return data, note


def _frames(
    run: Run, piece: Piece | None, kept: set[str], folders: Sequence[Path]
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The ``kept`` contexts of a run, and the turns after them, with all that is known of each."""
    frames = []
    logits = _header_logits(run) if piece else None
    begin = 0
    for contexts, turns in run.windows(
        [*ABOUT, "order", "messages", "text", "real_follow_up", "answer"],
        [*KEY, "text", "logprob_raw", "logprobs_raw", "token_ids"],
    ):
        contexts = contexts.set_axis(range(begin, begin + len(contexts)))
        begin += len(contexts)
        contexts = contexts[contexts["context_id"].isin(kept)]
        first = [
            _openings(logits, at, piece) if logits and piece else None for at in contexts.index
        ]
        turns = turns[turns["context_id"].isin(kept)]
        cells = zip(turns["text"], turns["token_ids"], strict=True)
        pieces = [_lengths(piece, text, ids) if piece else None for text, ids in cells]
        messages = [list(all_) for all_ in contexts["messages"]]
        asked = [exchange(all_)[0] for all_ in messages]
        queries = turns["context_id"].map(dict(zip(contexts["context_id"], asked, strict=True)))
        around = [_around(*of) for of in zip(contexts["text"], messages, strict=True)]
        frames.append(
            (
                contexts.drop(columns=["messages", "text"]).assign(
                    query=[_query(all_[:-1]) for all_ in messages],
                    response=[all_[-1]["content"] for all_ in messages],
                    before=[before for before, _ in around],
                    after=[after for _, after in around],
                    first=pd.Series(first, contexts.index, dtype=object),
                ),
                turns.drop(columns="token_ids").assign(
                    pieces=pd.Series(pieces, turns.index, dtype=object),
                    restates=list(map(restates, queries, turns["text"])),
                ),
            )
        )
    contexts, turns = (pd.concat(of) for of in zip(*frames, strict=True))
    contexts = contexts.sort_values("order").astype({"context_id": object, "dataset": object})
    turns = turns.sort_index().astype({"context_id": object})
    contexts["condition"] = contexts["perturbation"].astype(object).fillna(UNPERTURBED)
    contexts["condition"] = contexts["condition"].replace(UNPERTURBED, UNCHANGED)
    for field, values in run.groups.items():
        contexts[f"field {field}"] = contexts["context_id"].map(values)
    for folder in folders:
        found = table_of_run(folder, run, "predictions", ["context_id", "probability"])
        if found is not None:
            of_context = found.drop_duplicates("context_id").set_index("context_id")["probability"]
            contexts[f"probe {folder.name}"] = contexts["context_id"].map(of_context)
    turns["drawn"] = turns["sampled_tokens"].where(~run.drawn(turns), 0)
    texts, decoys = turns[[*KEY, "text", "drawn"]], []
    for judge in run.labels.judges:
        counted = rubric_of(run.labels.record("judgements", judge)).follow_ups
        of_turns = run.labelled(judge, columns=VERDICT, texts=False)
        turns = turns.join(_labels(of_turns.loc[turns.index], judge, counted))
        of_decoys = run.decoys(judge, VERDICT).set_index(list(DECOY))
        decoys.append(_labels(of_decoys, judge, counted))
    for person in run.labels.annotators:
        said = run.labelled(annotator=person, texts=False).loc[turns.index]
        said = said.drop(columns="category", errors="ignore")
        said = said.rename(columns={"truth_category": "category", "note": "rationale"})
        turns = turns.join(_labels(said, f"{person} (annotator)"))
    named = {f"rates-{judge}": {DEPENDENT: f"{DEPENDENT} {judge}"} for judge in run.labels.judges}
    for folder in folders:
        found = table_of_run(folder, run, "turns", KEY)
        turns = _joined(turns, found, named.get(folder.name, {BITS: BITS, TOKEN_BITS: TOKEN_BITS}))
    turns = turns.assign(decoy="")
    if decoys:
        rows = pd.concat(decoys, axis=1).reset_index().join(texts, on="row", how="inner")
        rows = rows[rows["shown"].isin(kept)].assign(context_id=rows["shown"])
        turns = pd.concat([turns, rows.drop(columns=["row", "shown"])])
    return contexts, turns


def _changed(
    contexts: pd.DataFrame, turns: pd.DataFrame, table: pd.DataFrame, whole: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Changed conversations and the turns after them, with what an experiment's ``table`` says of
    each; they stand where the same query stands in the ``whole`` run."""
    order = whole.groupby(["dataset", "source_id"])["order"].max()
    at = pd.MultiIndex.from_frame(contexts[["dataset", "source_id"]])
    change = table.drop_duplicates("context_id").set_index("context_id")[CHANGE]
    contexts = contexts.assign(
        order=order.reindex(at).to_numpy(), condition=contexts["context_id"].map(change)
    )
    own = [name for name in contexts if name.startswith("field ") and name not in whole]
    contexts = contexts.drop(columns=own)  # how it was changed, which its condition says
    turns = turns.drop(columns=[name for name in turns if name.endswith(ON_UNPERTURBED)])
    turns = _joined(turns, table, {FITS_ORIGINAL: FITS_ORIGINAL})
    return contexts, turns.assign(
        **{FITS_ORIGINAL: turns[FITS_ORIGINAL].where(turns["decoy"] == "")}
    )


def _labels(rows: pd.DataFrame, judge: str, follow_ups: Sequence[str] = ()) -> pd.DataFrame:
    """Category, reason and probability of a follow-up of a judge's verdicts, where there is one."""
    none = pd.Series(None, rows.index, dtype=object)
    said, error, given, mode = (rows.get(name, none).astype(object) for name in VERDICT)
    scores = [json.loads(text) if isinstance(text, str) else {} for text in given]
    reasons = [
        " · ".join(part for part in parts if isinstance(part, str) and part)
        for parts in zip(
            *(said, error, map(_scores, scores)),
            mode.map(lambda how: f"judged by {how}" if isinstance(how, str) and how else ""),
            strict=True,
        )
    ]
    return pd.DataFrame(
        {
            f"category {judge}": rows["category"].astype(object),
            f"reason {judge}": pd.Series(reasons, rows.index, dtype=object),
            f"score {judge}": follow_up_probabilities(given, follow_ups),
        }
    )


def _scores(scores: dict[str, float]) -> str:
    """A verdict's scores, the largest first; scores near 0 are left out."""
    known = sorted(((value, name) for name, value in scores.items() if value), reverse=True)
    shown = ", ".join(f"{heading(name)} {value:.2f}" for value, name in known if value >= 0.05)
    return f"scores: {shown}" if shown else ""


def _around(rendered: str, messages: list[dict[str, str]]) -> tuple[str, str]:
    """The rendered text before the first message (a default system message, perhaps), and that
    after the response (the open header). Empty where a message's text isn't in the rendered one."""
    first, last = messages[0]["content"].strip(), messages[-1]["content"].strip()
    begin, end = rendered.find(first), rendered.rfind(last)
    return rendered[: max(begin, 0)], rendered[end + len(last) :] if end >= 0 and last else ""


def _query(messages: list[dict[str, Any]]) -> str:
    """The query; in a longer conversation all messages before the response, with tool calls."""
    if len(messages) == 1:
        return messages[0]["content"]
    said = []
    for message in messages:
        parts = [message["content"], *map(_call, message.get("tool_calls") or ())]
        said.append(f"{message['role']}: {' '.join(part for part in parts if part)}")
    return "\n\n".join(said)


def _call(call: Mapping[str, Any]) -> str:
    of = call["function"]
    return f"{of['name']}({json.dumps(of['arguments'], ensure_ascii=False)})"


def _joined(
    turns: pd.DataFrame, found: pd.DataFrame | None, columns: Mapping[str, str]
) -> pd.DataFrame:
    """Turns with ``columns`` of a result's table under new names. If several results have the same
    column, the last one counts."""
    if found is None:
        return turns
    found = found.drop_duplicates(list(KEY)).rename(columns=columns)
    kept = [name for name in columns.values() if name in found]
    found = found[[*KEY, *kept]]
    return turns.drop(columns=kept, errors="ignore").merge(found, "left", on=list(KEY))


def _piece(run: Run) -> Piece | None:
    """A function from a token's id to its text. None if the model's tokenizer isn't on this
    machine: it is not fetched, so that a page can be made without the model."""
    try:
        spec = recall(run.settings, run.model["weights_hash"])
        tokenizer = load_files(spec, fetch=False).tokenizer
    except UserError:
        return None
    return cache(lambda token: tokenizer.decode([token], clean_up_tokenization_spaces=False))


def _lengths(piece: Piece, text: str, ids: np.ndarray) -> list[int] | None:
    """Each token's length in a turn's shown text, in UTF-16 units; None if the tokens don't add up
    to the text."""
    found: list[int] = []
    at = 0
    for token in ids.tolist():
        part = piece(token)
        if not text.startswith(part, at):
            return found if at == len(text) else None  # the turn's end isn't in its text
        found.append(len(visible(part).encode("utf-16-le")) // 2)
        at += len(part)
    return found


def _header_logits(run: Run) -> HeaderLogits | None:
    try:
        return run.header_logits()
    except UserError:  # none were kept
        return None


def _openings(logits: HeaderLogits, at: int, piece: Piece) -> list[list[str | float]]:
    """The likeliest first tokens of the turn after a context with their probabilities at T = 1."""
    top = logits.log_probs(at).topk(OPENINGS)
    tokens, shares = top.indices.tolist(), top.values.exp().tolist()
    return [
        [visible(piece(token)), round(share, 3)]
        for token, share in zip(tokens, shares, strict=True)
    ]


def columns_of(
    contexts: pd.DataFrame,
    turns: pd.DataFrame,
    names: Sequence[str],
    follow_ups: Sequence[str] = (FOLLOW_UP,),
) -> dict[str, Any]:
    """What the page's script reads: a list or iterator per column. Texts are made visible."""
    places = pd.MultiIndex.from_frame(contexts[["run", "context_id"]])
    datasets = sorted(contexts["dataset"].unique())
    judges = [name.removeprefix("category ") for name in turns if name.startswith("category ")]
    labels = pd.unique(np.concatenate([turns[f"category {j}"].dropna() for j in judges] or [[]]))
    named = [*dict.fromkeys([*NAMES, *labels])]
    categories = [*(name for name in named if name not in OTHERS), *OTHERS]
    codes = {name: code for code, name in enumerate(categories)}
    columns: dict[str, Any] = {
        "context": places.get_indexer(
            pd.MultiIndex.from_frame(turns[["run", "context_id"]])
        ).tolist(),
        "temperature": turns["temperature"].tolist(),
        "drawn": turns["drawn"].tolist(),  # 0 where all tokens are sampled, or none
        "text": _texts(turns["text"]),
        "decoy": [DECOY_KINDS.index(kind) + 1 if kind else 0 for kind in turns["decoy"]],
        "restates": turns["restates"].eq(True).tolist(),  # their own query; of decoys none
        "labels": {
            visible(judge): {
                "category": [
                    codes.get(name, len(categories) - 1) for name in turns[f"category {judge}"]
                ],
                "reason": _texts(turns[f"reason {judge}"]),
                "score": _numbers(turns[f"score {judge}"], 2),
                **(
                    {DEPENDENT: _numbers(turns[f"{DEPENDENT} {judge}"], 0)}
                    if f"{DEPENDENT} {judge}" in turns
                    else {}
                ),
            }
            for judge in judges
        },
        "logprob": _numbers(turns["logprob_raw"], 2),
        "logprobs": map(_rounded, turns["logprobs_raw"]),
        "pieces": turns["pieces"].where(turns["pieces"].notna(), None).tolist(),
        "bits": _numbers(turns[BITS], 3) if BITS in turns else None,
        FITS_ORIGINAL: _numbers(turns[FITS_ORIGINAL], 0) if FITS_ORIGINAL in turns else None,
        "token_bits": map(_rounded, turns[TOKEN_BITS]) if TOKEN_BITS in turns else None,
    }
    return {
        "runs": [visible(name) for name in names],
        "datasets": [visible(name) for name in datasets],
        "categories": categories,
        "headings": [visible(heading(name)) for name in categories],
        "follow_ups": list(follow_ups),
        "contexts": {
            "id": _texts(contexts["context_id"]),
            "run": contexts["run"].tolist(),
            "dataset": [datasets.index(name) for name in contexts["dataset"]],
            "condition": _texts(contexts["condition"]),
            "response_index": _numbers(contexts["response_index"], 0),
            "unfinished": contexts["response_unfinished"].fillna(False).astype(bool).tolist(),
            **{name: _texts(contexts[name]) for name in WORDS},
            "first": contexts["first"].where(contexts["first"].notna(), None).tolist(),
            "fields": {
                visible(name.removeprefix("field ")): _texts(contexts[name].fillna("–"))
                for name in contexts
                if name.startswith("field ")
            },
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
