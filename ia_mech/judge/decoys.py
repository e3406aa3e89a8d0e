"""Decoys: turns judged after a context that they did not follow.

A judge that can't tell a turn's own conversation from another calls decoys genuine as often as it
calls turns genuine. That share is the judge's floor, and what its rate exceeds the floor by is what
its labels show of the conversation. Decoys are drawn from the run alone, so that all judges and
annotators of a run see the same ones.
"""

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.run import Run
from ia_mech.run.labels import KEY

CONVERSATION, RESPONSE = KINDS = ("conversation", "response")


def draw_decoys(run: Run) -> pd.DataFrame:
    """The decoys of a run: which turn is shown after which context.

    Within a dataset, perturbation and temperature each source gives one turn, drawn at random from
    all of its turns. The sources are put into a random cycle: the context of each source's turn is
    shown with the turn of the next source (``conversation``). So every turn drawn is a decoy once,
    and what a judge likes about a turn, whatever its context, cancels between rate and floor. If
    the source has several responses to its query, the context is also shown with a turn, drawn at
    random, that followed another of them (``response``). A stratum with one source has no decoys.

    The draw is seeded by ``Run.identity_digest``.

    Returns:
        One row per decoy: the run's KEY columns (of the turn), ``decoy`` (its kind) and ``shown``
        (the id of the context it is shown after). In a stratum the context's own turn is the
        ``conversation`` decoy that was taken out of that context.
    """
    turns = run.turns
    perturbation = turns["perturbation"].astype(object).fillna(UNPERTURBED)
    responses = turns["response_index"].to_numpy(dtype=float, na_value=np.nan)
    contexts = turns["context_id"].to_numpy()
    rng = np.random.default_rng(int(run.identity_digest, 16))
    rows: list[int] = []
    kinds: list[str] = []
    shown: list[str] = []
    strata = turns.groupby([turns["dataset"], perturbation, turns["temperature"]])
    for _, stratum in sorted(strata.indices.items()):
        by_source = turns["source_id"].iloc[stratum].groupby(turns["source_id"].iloc[stratum])
        own = [stratum[at] for _, at in sorted(by_source.indices.items())]
        if len(own) < 2:
            continue
        drawn = np.array([rng.choice(at) for at in own])
        cycle = rng.permutation(len(drawn))
        rows += drawn[np.roll(cycle, -1)].tolist()
        shown += contexts[drawn[cycle]].tolist()
        kinds += [CONVERSATION] * len(drawn)
        for row, at in zip(drawn, own, strict=True):
            others = at[np.abs(responses[at] - responses[row]) > 0]  # not where either is missing
            if len(others):
                rows.append(int(rng.choice(others)))
                shown.append(contexts[row])
                kinds.append(RESPONSE)
    drawn_rows = turns[list(KEY)].iloc[rows].reset_index(drop=True)
    return drawn_rows.assign(
        decoy=pd.Series(kinds, dtype=object), shown=pd.Series(shown, dtype=object)
    )


def own_turns(decoys: pd.DataFrame) -> pd.MultiIndex:
    """``[rows]`` KEY of the own turn of the context that each decoy is shown after.

    That is the turn that was taken out of the context. Its sample is -1 where ``decoys`` (rows as
    of :func:`draw_decoys`) hold only a part of a run's.
    """
    lent = decoys[decoys["decoy"] == CONVERSATION]
    places = zip(lent["context_id"], lent["temperature"], strict=True)
    samples = dict(zip(places, lent["sample"], strict=True))
    shown = zip(decoys["shown"], decoys["temperature"], strict=True)
    own = [samples.get(place, -1) for place in shown]
    return pd.MultiIndex.from_arrays([decoys["shown"], decoys["temperature"], own], names=KEY)
