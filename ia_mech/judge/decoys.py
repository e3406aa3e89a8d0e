"""Decoys: turns that a judge is shown after a context that they did not follow, as its control.

They are drawn from the run alone, so that all judges and annotators of a run see the same ones.
``docs/judging.md`` says what they show.
"""

import json
from collections import defaultdict

import numpy as np
import pandas as pd

from ia_mech.data.conversations import UNPERTURBED
from ia_mech.run import Run
from ia_mech.run.labels import KEY

WRONG, SIBLING = DECOY_KINDS = ("wrong_conversation", "sibling")
AFTER = {WRONG: "a wrong conversation", SIBLING: "another response to their query"}


def draw_decoys(run: Run, per_source: int | None = None) -> pd.DataFrame:
    """The decoys of a run: which turn is shown after which context.

    Within a dataset, perturbation and temperature the turns of each source are drawn in random
    order, and the sources are put into a random cycle. A turn is shown

    - after a context of the source before its own (``wrong_conversation``). The contexts of that
      source take turns. A stratum with one source has no such decoys;
    - after every other response to its own query (``sibling``), if that is unfinished like the one
      that the turn followed, or finished like it. Responses that are worded alike count once, and
      one worded like the turn's own doesn't count.

    The draw is seeded by ``Run.identity_digest``. With ``per_source`` only so many turns of each
    source and temperature are drawn; these decoys are among those of a larger number.

    Returns:
        One row per decoy: the run's KEY columns (of the turn), ``decoy`` (its kind) and ``shown``
        (the id of the context it is shown after). KEY and ``shown`` together are unique.
    """
    turns = run.turns
    siblings = _siblings(run)
    contexts = turns["context_id"].to_numpy()
    perturbation = turns["perturbation"].astype(object).fillna(UNPERTURBED)
    rng = np.random.default_rng(int(run.identity_digest, 16))
    decoys: list[tuple[int, str, str]] = []  # row, kind, context shown
    by = [turns["dataset"], perturbation, turns["temperature"], turns["sampled_tokens"]]
    strata = turns.groupby(by, observed=True)
    for _, stratum in sorted(strata.indices.items()):
        sources = turns["source_id"].iloc[stratum]
        by_source = sources.groupby(sources, observed=True).indices
        own = [rng.permutation(stratum[at]) for _, at in sorted(by_source.items())]
        cycle = rng.permutation(len(own))
        for source, before in zip(cycle, np.roll(cycle, 1), strict=True):
            donors = list(dict.fromkeys(contexts[own[before]]))
            for rank, row in enumerate(own[source][:per_source]):
                if source != before:
                    decoys.append((row, WRONG, donors[rank % len(donors)]))
                decoys += [(row, SIBLING, other) for other in siblings[contexts[row]]]
    rows, kinds, shown = zip(*decoys, strict=True) if decoys else ((), (), ())
    keys = turns[list(KEY)].iloc[list(rows)].reset_index(drop=True)
    return keys.assign(decoy=pd.Series(kinds, dtype=object), shown=pd.Series(shown, dtype=object))


def _siblings(run: Run) -> dict[str, list[str]]:
    """The contexts with another response to the same query, by context; see :func:`draw_decoys`."""
    queries: dict[tuple, dict[str, list[str]]] = defaultdict(dict)  # contexts by response
    columns = ["context_id", "dataset", "source_id", "perturbation", "messages"]
    unfinished = run.contexts["response_unfinished"].fillna(False).astype(bool)
    rows = run.contexts[columns].assign(unfinished=unfinished)
    for row in rows.itertuples(index=False):
        *query, response = row.messages
        text = json.dumps([[message["role"], message["content"]] for message in query])
        key = row.dataset, row.source_id, row.perturbation or UNPERTURBED, row.unfinished, text
        queries[key].setdefault(response["content"], []).append(row.context_id)
    return {
        context: [others[0] for text, others in responses.items() if text != response]
        for responses in queries.values()
        for response, contexts in responses.items()
        for context in contexts
    }
