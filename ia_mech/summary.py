"""Tables of a run, from its files alone."""

from dataclasses import dataclass

import numpy as np
import pandas as pd

from ia_mech.run import Run
from ia_mech.stats import Estimate, cluster_mean


@dataclass(frozen=True)
class TemperatureRow:
    """One line of the table per temperature; greedy is temperature 0.

    ``tokens`` are the mean length; ``ended`` the share of rows that a turn-end token ended (the
    others reached the token limit); ``logprob`` the mean raw log-probability per token and
    ``entropy`` that of the first token at this temperature, both in nats. ``cut_off`` rows follow a
    response that was cut off, which is a different stimulus.
    """

    temperature: float
    rows: int
    cut_off: int
    tokens: Estimate
    ended: Estimate
    logprob: Estimate
    entropy: Estimate | None


def temperature_table(run: Run) -> list[TemperatureRow]:
    """What was decoded at each temperature, with intervals over sources."""
    contexts = run.contexts
    table = []
    for temperature, rows in run.generations.groupby("temperature"):
        sources = rows["source_id"]
        entropy = None
        if temperature:
            at = run.config["grid"]["temperatures"].index(temperature)
            values = np.stack(contexts["first_token_entropy_tempered"])[:, at]
            entropy = cluster_mean(values, contexts["source_id"])
        table.append(
            TemperatureRow(
                temperature=temperature,
                rows=len(rows),
                cut_off=int(rows["response_cut_off"].sum()),
                tokens=cluster_mean(rows["tokens"], sources),
                ended=cluster_mean(rows["finish_reason"] == "turn_end", sources, proportion=True),
                logprob=cluster_mean(rows["logprob_raw"] / rows["tokens"], sources),
                entropy=entropy,
            )
        )
    return table


@dataclass(frozen=True)
class ReferenceRow:
    """How the model likes the users' real follow-ups, per dataset.

    ``logprob``: mean raw log-probability per token of a reference turn, in nats. ``contrast``: mean
    response contrast in bits (``scoring.columns``). ``greedy``: share of references that greedy
    decoding writes whole, turn-end included. ``cut_off`` of them follow a response that was cut
    off.
    """

    dataset: str
    references: int
    cut_off: int
    logprob: Estimate
    bits_per_byte: Estimate
    contrast: Estimate
    greedy: Estimate


def reference_table(run: Run) -> list[ReferenceRow]:
    """Scores of the reference user turns; empty if the data has none."""
    scored = run.contexts[run.contexts["reference_logprob"].notna()]
    table = []
    for dataset, rows in scored.groupby("dataset"):
        sources, tokens = rows["source_id"], rows["reference_token_ids"].map(len)
        table.append(
            ReferenceRow(
                dataset=dataset,
                references=len(rows),
                cut_off=int(rows["response_cut_off"].sum()),
                logprob=cluster_mean(rows["reference_logprob"] / tokens, sources),
                bits_per_byte=cluster_mean(rows["reference_bits_per_byte"], sources),
                contrast=cluster_mean(
                    rows["reference_response_contrast_bits"].astype(float), sources
                ),
                greedy=cluster_mean(
                    rows["reference_greedy"].astype(float), sources, proportion=True
                ),
            )
        )
    return table


def examples(run: Run, count: int = 3) -> list[tuple[pd.Series, pd.Series]]:
    """(context, generation) pairs spread over contexts and temperatures, chosen without looking.

    The i-th example is sample 0 of the i-th of ``count`` evenly spaced contexts, at the i-th of as
    many evenly spaced temperatures, so that nobody picked the good ones.
    """
    contexts, generations = run.contexts, run.generations
    temperatures = sorted(generations["temperature"].unique())
    picked = []
    count = min(count, len(contexts))
    for i in range(count):
        context = contexts.iloc[i * len(contexts) // count]
        temperature = temperatures[min(i * len(temperatures) // count, len(temperatures) - 1)]
        rows = generations[
            (generations["order"] == context["order"]) & (generations["temperature"] == temperature)
        ]
        picked.append((context, rows.iloc[0]))
    return picked
