"""Sample under steering, judge, and score what was sampled by the unsteered model."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd

from experiments.given_turns import computed_once
from experiments.resample import conversations_of, resampled
from experiments.steering.controls import PROMPT, asked
from experiments.steering.read import Query
from experiments.steering.steer import Arm
from ia_mech.chat.format import ChatFormat
from ia_mech.display import Bar
from ia_mech.judge.label import label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.likelihood.intervened import Continued
from ia_mech.models.load import Subject
from ia_mech.rates.load import NO_ANNOTATOR, Judged, read_runs
from ia_mech.run import Run

JUDGE = "rules"
FILE = "vector.safetensors"
REPEATED = 0.5  # of a degenerate turn, fewer of its runs of three words differ


def sampled_under(
    arm: Arm,
    queries: Sequence[Query],
    runs: Sequence[Run],
    subject: Subject,
    chat: ChatFormat,
    samples: int,
    folder: Path,
) -> tuple[Judged, pd.DataFrame]:
    """Turns that are sampled under an arm after contexts of queries.

    Args:
        arm: with a vector, or :data:`PROMPT`, or the model as it is.
        queries: whose contexts.
        runs: that they are from; the first one's settings and seed are used, at T = 1 or the
            highest temperature.
        subject: the model.
        chat: its format.
        samples: per context, besides greedy.
        folder: where the arm's run is made, or gone on with.

    Returns:
        Verdicts of the rules judge, and the turns as :func:`described`, with ``of``, ``draw`` and
        ``dose`` of the arm.
    """
    folder /= f"{arm.of} {arm.draw} {arm.dose:g}".replace(" ", "-")
    conversations = []
    for query in queries:
        for context in query.contexts:
            rows = runs[context.run].contexts
            (one,) = conversations_of(rows[rows["context_id"] == context.id])
            if arm.of == PROMPT:
                one = replace(one, messages=asked(chat, context).messages)
            conversations.append(one)
    file = None
    folder.mkdir(parents=True, exist_ok=True)
    if arm.vector is not None:
        file = folder.resolve() / FILE
        arm.vector.save(file)
    given = runs[0].settings["temperatures"]
    decoding = {"temperatures": 1.0 if 1.0 in given else max(given), "samples": samples}
    run = resampled(runs[0], conversations, folder, ("header_last",), file, subject, **decoding)
    if JUDGE not in run.labels.judges:
        label_run(run, RulesJudge(), JUDGE, Bar())
    judged = read_runs([run], JUDGE, NO_ANNOTATOR)
    return judged, described(judged, subject, folder).assign(
        of=arm.of, draw=arm.draw, dose=arm.dose
    )


def described(judged: Judged, subject: Subject, folder: Path) -> pd.DataFrame:
    """The sampled turns of a run; what was scored of them is kept in the folder.

    Returns:
        A row per turn: ``source``, ``dataset``, ``genuine``, ``grounded``, ``degenerate``,
        ``cost`` (log-probability under the unsteered model, in nats a token) and ``text``.
    """
    (run,) = judged.runs
    rows = run.generations.assign(
        genuine=judged.turns["genuine"].to_numpy(), grounded=judged.turns["grounded"].to_numpy()
    )
    rows = rows[rows["temperature"] > 0].reset_index(drop=True)
    ids = dict(zip(run.contexts["context_id"], run.contexts["token_ids"], strict=True))

    def scored() -> pd.DataFrame:
        cost = np.empty(len(rows))
        for context, mine in rows.groupby("context_id").groups.items():
            turns = [rows.at[i, "token_ids"].tolist() for i in mine]
            tokens = ids[context].tolist()
            after = Continued(subject.model, tokens, len(tokens) - 1, turns)
            cost[mine] = [one.mean() for one in after.score([(n, ()) for n in range(len(turns))])]
        return pd.DataFrame({"cost": cost})

    pairs = zip(rows["context_id"], rows["token_ids"], strict=True)
    key = [subject.weights_hash, [[ids[name].tolist(), turn.tolist()] for name, turn in pairs]]
    cost = computed_once(folder / "parts", key, scored)["cost"]
    return pd.DataFrame(
        {
            "source": rows["dataset"] + "\x1f" + rows["source_id"],
            "dataset": rows["dataset"],
            "genuine": rows["genuine"],
            "grounded": rows["grounded"],
            "degenerate": [float(degenerate(text)) for text in rows["text"]],
            "cost": cost,
            "text": rows["text"],
        }
    )


def degenerate(text: str) -> bool:
    """Whether a turn says nothing, or mostly repeats itself."""
    words = text.split()
    if not any(map(str.isalnum, text)):
        return True
    threes = list(zip(words, words[1:], words[2:], strict=False))
    return len(threes) >= 6 and len(set(threes)) < REPEATED * len(threes)


def distinct_pairs(texts: Sequence[str]) -> float:
    """Distinct pairs of words as a share of all, of the turns of a source (distinct-2; Li et al.
    2016, arXiv 1510.03055); NaN of none."""
    pairs: Counter[tuple[str, str]] = Counter()
    for text in texts:
        words = text.lower().split()
        pairs.update(pairwise(words))
    return len(pairs) / pairs.total() if pairs else np.nan
