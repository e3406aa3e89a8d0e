"""What does temperature do to the user turn, and how deep does greedy decoding hide follow-ups?

- Rates of genuine turns and their floor by temperature, each also against greedy turns of the same
  queries.
- The first token's distribution at any temperature, from the header's logits.
- Where greedy decoding leaves each sampled turn, and whether genuine turns lie deeper than others
  after the same response at the same temperature.
- At which temperature users' real follow-ups are likeliest.
- From which layer on, by the logit lens at header_last, the token that opens the greedy turn stays
  ahead of those that open genuine turns of other queries.

Needs: judged runs with two temperatures or more; the model's lens (its final norm and unembedding,
which sampling writes), not the model. Cost: a minute for 100 contexts on a CPU.

    python -m experiments.temperature_sweep cache/RUN
    python -m experiments.temperature_sweep cache/RUN-A cache/RUN-B --temperatures 0.5 1 2
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.first_token import (
    BEST,
    COLDEST_STORED,
    GREEDY,
    check_logits,
    first_token_curves,
    lens_curves,
    openings_of,
    overtaking_layer,
)
from experiments.tables import sentence_of, tables_of, with_detectable
from ia_mech.errors import UserError
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    holm_corrected,
    paired_row,
)
from ia_mech.judge.rubric import ASSESSED, GENUINE, heading
from ia_mech.rates.compute import rates
from ia_mech.rates.gate import CONVERSATION
from ia_mech.run.labels import KEY

if TYPE_CHECKING:
    from collections.abc import Mapping

    from experiments.figures import Drawing
    from experiments.likelihood import References
    from ia_mech.results import Table
    from ia_mech.run import Run

GRID = (*(round(0.1 * step, 1) for step in range(3, 16)), 1.75, 2.0)
GARBLED = "degenerate"
RATE, FAILURE = "follow-up rate", "share of turns"
RATE_DIFFERENCE = f"{RATE}: difference"
LESS = " less other turns'"  # after the same response at the same temperature
DEEPER = f"gap where greedy leaves{LESS}"
OTHERS = ("all others", "others but degenerate ones")
TOKENS, MASS = "effective number of first tokens", "mass on openings"
LENS, OVERTAKES = "log p by the lens", "layer where greedy overtakes"
COLUMNS = {
    **dict.fromkeys(("dataset", "term", "outcome", "decoy"), "str"),
    **{"temperature": "float64", "layer": "Int64", "level": "float64", "events": "Int64"},
}


# -- where greedy leaves ---------------------------------------------------------------------------


def leaving_point(turn: Any, greedy: Any) -> dict[str, float]:
    """Where greedy decoding leaves a sampled turn after the same response.

    Up to that token both are the same, so their stored log-probabilities there are of one
    distribution, and their difference is exact.

    Args:
        turn: with ``token_ids``, ``logprobs_raw`` and ``ranks``.
        greedy: the greedy turn, likewise.

    Returns:
        ``follows`` (its first token is greedy's, 1 or 0), ``leaves`` (greedy leaves it, 1 or 0),
        and where it does, else NaN: ``token`` (its number, from 1), ``rank`` (from 1),
        ``probability`` and ``gap`` (log-probability of greedy's token less that of the turn's, in
        nats), all at T = 1.
    """
    ids, others = np.asarray(turn.token_ids), np.asarray(greedy.token_ids)
    shared = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:shared] != others[:shared])
    found = {"follows": float(ids[0] == others[0]), "leaves": float(len(differ) > 0)}
    if not len(differ):  # the same turn, to its end or to the limit of tokens
        return found | dict.fromkeys(("token", "rank", "probability", "gap"), np.nan)
    at = int(differ[0])
    log_p = float(turn.logprobs_raw[at])
    gap = float(greedy.logprobs_raw[at]) - log_p
    found |= {"token": at + 1.0, "rank": float(turn.ranks[at])}
    return found | {"probability": float(np.exp(log_p)), "gap": gap}


def against_others(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Genuine turns against the others of the same context at the same temperature.

    Every value is taken less the mean of those others, so that neither contexts nor temperatures
    with many genuine turns are compared with ones that have few. Turns of a context without both
    kinds are left out.

    Args:
        frame: ``context``, ``temperature``, ``source``, ``genuine`` and the column.
        column: of it; NaN is left out.

    Returns:
        ``[rows]`` centred values; which of them are genuine; their sources.
    """
    kept = frame[frame[column].notna()]
    cells = kept.groupby(["context", "temperature"])["genuine"]
    kept = kept[(cells.transform("min") == 0) & (cells.transform("max") == 1)]
    others = kept[column].where(kept["genuine"] == 0)
    mean = others.groupby([kept["context"], kept["temperature"]]).transform("mean")
    values, genuine = (kept[column] - mean).to_numpy(), (kept["genuine"] == 1).to_numpy()
    return values, genuine, kept["source"].to_numpy()


# -- the experiment --------------------------------------------------------------------------------


def temperature(text: str) -> float:
    """A temperature that a distribution can have, for argparse."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0.01 <= value <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature from 0.01 to 100")
    return value


class TemperatureSweep(Experiment):
    """See the module.

    Attributes:
        turns: one row per user turn: as ``JudgedTurns.turns``, with its tokens and what the model
            made of them.
        contexts: one row per context: ``dataset``, ``source``, ``run`` (number of a run that has
            it), ``at`` (its row there), ``greedy`` (the token that opens its greedy turn).
        first: name → ``[contexts, temperatures]``, of the first token.
        log_p: name → ``[contexts, layers]`` by the lens, in nats; empty without a lens.
        references: real follow-ups; None without any.
    """

    name = "temperature_sweep"
    judged, loads = True, False
    columns = COLUMNS

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--temperatures",
            nargs="+",
            type=temperature,
            metavar="T",
            help="of the first token (default: 0.3, 0.4 … 1.5, 1.75, 2 and the sampled ones)",
        )

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        from ia_mech.lens import Lens, NoLens
        from ia_mech.rates.load import NO_ANNOTATOR, read_runs

        judged = read_runs(self.runs, self.args.judge, NO_ANNOTATOR)
        check_temperatures(judged.turns)
        self.decoys = judged.decoys
        self.turns = with_tokens(judged.turns, self.runs)
        self.contexts = contexts_of(self.turns, self.runs)
        self.notes += judged.notes
        if missing := int(self.turns["genuine"].isna().sum()):
            self.notes.append(f"{missing} of {len(self.turns)} turns were not assessed.")
        if cut := int(self.turns["cut_off"].sum()):
            self.notes.append(
                f"{cut} of {len(self.turns)} turns come after a response that was cut off, another "
                "stimulus: python -m ia_mech.rates --responses complete leaves them out."
            )
        self.lens: Lens | None = None
        try:
            self.lens = Lens.load(self.runs[0].model["weights_hash"])
        except NoLens as why:
            self.notes.append(f"no logit lens: {why}.")
        sampled = {t for t in self.turns["temperature"] if t >= COLDEST_STORED}
        self.grid = sorted(set(self.args.temperatures or {*GRID, *sampled}))
        for run in self.runs:
            check_logits(run, self.lens, self.grid)

    def rows(self) -> pd.DataFrame:
        """A row per sampled turn that was assessed: of ``turns``, with :func:`leaving_point`."""
        openings = openings_of(self.turns)
        self.first = first_token_curves(self.runs, self.contexts, openings, self.grid, self.lens)
        self.log_p: dict[str, np.ndarray] = {}
        if self.lens is not None:
            self.log_p = lens_curves(self.runs, self.contexts, openings, self.lens)
        self.references = references(self.runs)
        both = ((openings.genuine.sum(0) > 0) & (openings.restated.sum(0) > 0)).sum()
        self.notes.append(
            f"openings: {len(openings.ids)} tokens opened {openings.genuine.sum():.0f} genuine "
            f"turns and {openings.restated.sum():.0f} restatements, {both} of them both kinds."
        )
        sampled = self.turns[self.turns["genuine"].notna() & (self.turns["temperature"] > 0)]
        greedy = {
            (str(run.path), row.context_id): row
            for run in self.runs
            for row in run.generations.query("temperature == 0").itertuples()
        }
        left = [
            leaving_point(turn, greedy[turn.run, turn.context_id]) for turn in sampled.itertuples()
        ]
        names = ["run", "dataset", "source", "context", *KEY, "category", "genuine"]
        frame = sampled[names].astype(dict.fromkeys(names[:5], object)).reset_index(drop=True)
        return pd.concat([frame.astype({"category": object}), pd.DataFrame(left)], axis=1)

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected in families: the rate, the failures, and genuine turns against others;
        all datasets together are a family of their own in each."""
        found: list[TidyEstimate] = []
        turns = self.turns[self.turns["genuine"].notna()]
        for dataset, here in by_dataset(turns):
            decoys = self.decoys
            own = decoys if dataset == ALL or decoys.empty else decoys[decoys["dataset"] == dataset]
            found += self._rates(turns[here], own, {"dataset": dataset, "level": self.args.level})
        for dataset, here in by_dataset(self.contexts):
            group = Group(
                self.contexts["source"].to_numpy()[here], self.options, {"dataset": dataset}
            )
            found += first_token(
                group, {term: at[here] for term, at in self.first.items()}, self.grid
            )
            if self.log_p:
                found += lens_estimates(group, {term: at[here] for term, at in self.log_p.items()})
        for dataset, here in by_dataset(rows):
            own = rows[here]
            group = Group(own["source"].to_numpy(), self.options, {"dataset": dataset})
            for t, at in own.groupby("temperature"):
                names = {"temperature": float(t)}
                found += depths(replace(group, names=group.names | names), at)
                found += deeper(group, at, **names)
            found += deeper(group, own)
        found += self._references()

        def family(row: TidyEstimate) -> tuple:
            of = LESS if row.quantity.endswith(LESS) else row.quantity
            return of, row.names["dataset"] == ALL

        return holm_corrected(found, family)

    def _rates(
        self, turns: pd.DataFrame, decoys: pd.DataFrame, names: dict[str, Any]
    ) -> Iterator[TidyEstimate]:
        by, greedy, seed = ["temperature"], {"temperature": 0.0}, self.args.seed
        yield from rates(turns, by, quantity=RATE, **names)
        yield from rates(turns, by, greedy, quantity=RATE, seed=seed, **names)
        if len(decoys):
            yield from rates(decoys, by, CONVERSATION, **names)
        for category in ASSESSED:
            if category != GENUINE:
                own = turns.assign(**{category: (turns["category"] == category).astype(float)})
                options: dict[str, Any] = {"outcome": category, "quantity": FAILURE, **names}
                yield from rates(own, by, **options)
                yield from rates(own, by, greedy, seed=seed, **options)

    def _references(self) -> Iterator[TidyEstimate]:
        from experiments.likelihood import by_temperature

        if self.references is None:
            return
        for dataset, here in by_dataset(self.references.frame):
            sources = self.references.frame["source"].to_numpy()[here]
            group = Group(sources, self.options, {"dataset": dataset})
            curve, temperatures = self.references.curve[here], self.references.temperatures
            yield from by_temperature(group, curve, temperatures)

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> "list[Table]":
        from ia_mech.results import table_of

        percent = f"{100 * self.args.level:g}% intervals over queries"
        tested = (
            "Holm-corrected p; shown if: the difference that would have been shown with 80% power."
        )
        once = found["temperature"].isna()
        genuine = found[found["outcome"] == "genuine"]
        made = tables_of(
            f"genuine turns by temperature ({percent})",
            with_detectable(genuine, RATE_DIFFERENCE),
            {
                RATE: ("rate", 2),
                RATE_DIFFERENCE: ("less greedy's", 2),
                "detectable": ("shown if", 2),
                "floor": ("floor", 2),
                "excess": ("excess", 2),
            },
            rows="turns",
            legend="Rate: share of turns that the judge calls genuine. Less greedy's: of the same "
            f"queries. {tested} Floor: the same turns shown after another conversation; excess: "
            "what their rate is above it.",
        )
        made += tables_of(
            f"where greedy decoding leaves a turn ({percent})",
            found[~once],
            {
                "token where greedy leaves": ("token", 0),
                "rank where greedy leaves": ("rank", 0),
                "median gap where greedy leaves": ("gap", 2),
            },
            index=("dataset", "temperature", "term"),
            rows="turns",
            legend="Medians at the first token that isn't greedy's: its number, its rank, and the "
            "gap, log p of greedy's token less its own at T = 1, nats.",
        )
        made += tables_of(
            f"do genuine turns lie deeper? ({percent})",
            with_detectable(found[~once], DEEPER),
            {DEEPER: ("gap less others'", 2), "detectable": ("shown if", 2)},
            index=("dataset", "temperature", "term"),
            rows="genuine turns",
            legend="Genuine turns' mean gap, nats, less that of other turns after the same "
            f"response at the same temperature. {tested}",
        )
        made += tables_of(
            f"over all temperatures ({percent})",
            found[once],
            {"best temperature": ("best T", 2), OVERTAKES: ("layer", 1)},
            index=("dataset",),
            rows="follow-ups",
            legend="Best T: at which users' real follow-ups are likeliest. Layer: from which on "
            "greedy's opening stays ahead of the best follow-up opening (median; header_last).",
        )
        first: dict[str, tuple[str, int | str]] = {
            "first token's entropy": ("entropy", 2),
            TOKENS: ("effective tokens", 1),
            "total variation from T = 1": ("variation", 2),
            "mass on turn-end": ("turn-end", ".0e"),
        }
        made.append(
            table_of(
                f"the first token by temperature ({percent})",
                all_datasets(found),
                first,
                rows="contexts",
                legend="Entropy in nats; effective tokens: exp(entropy); variation: total "
                "variation from T = 1; turn-end: probability of ending the turn at once.",
                full=True,
            )
        )
        made.append(
            table_of(
                "what the other turns are",
                all_datasets(found[found["quantity"] == FAILURE]),
                {name: (heading(name), 2) for name in ASSESSED if name != GENUINE},
                key="outcome",
                rows="turns",
                legend="Shares of the turns that the judge assessed, by its rubric.",
                full=True,
            )
        )
        return made

    def figures(self, found: pd.DataFrame) -> "Mapping[str, Drawing]":
        from experiments.figures import Bars, Lines
        from ia_mech.rates.figures import gate_title
        from ia_mech.results import label_of

        assert self.gate is not None
        title, pooled = gate_title(self.runs[0].model["name"], self.gate), all_datasets(found)

        def rows_of(rows: pd.DataFrame, quantity: str) -> pd.DataFrame:
            return rows[rows["quantity"] == quantity]

        floor = {"the judge's floor": self.gate.floor} if self.gate.decoys else None
        across, share = "temperature (0 = greedy)", "share of turns"
        made: dict[str, Drawing] = {
            "rates": Lines(title, across, share, rows_of(found, RATE), by="dataset", levels=floor),
            "failures": Lines(title, across, share, rows_of(pooled, FAILURE), by="outcome"),
            "first_token": Lines(
                title, "temperature", TOKENS, rows_of(found, TOKENS), by="dataset"
            ),
        }
        mass = rows_of(pooled, MASS)
        if mass["value"].notna().any():
            made["openings"] = Lines(title, "temperature", "probability", mass)
        deep = rows_of(pooled, DEEPER)
        if len(deep):
            at = [label_of(t, "temperature") for t in deep["temperature"]]
            words = "genuine turns' gap to greedy, less other turns', nats"
            made["hidden"] = Bars(title, words, deep.assign(at=at), names="at", by="term")
        lens = rows_of(pooled, LENS)
        if len(lens):
            up = "log p at header_last, nats"
            made["lens"] = Lines(title, "layer (0 = embeddings)", up, lens, across="layer")
        return made

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": rows.drop(columns=["source", "context"])}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        assert self.gate is not None
        options: dict[str, Any] = {"null": 0.0, "level": self.args.level}
        deep = found[(found["quantity"] == DEEPER) & (found["term"] == OTHERS[0])]
        said = [
            sentence_of(f"{RATE} by temperature", found[found["quantity"] == RATE]),
            sentence_of("less greedy's", found[found["quantity"] == RATE_DIFFERENCE], **options),
            sentence_of(
                "nats by which genuine turns lie further from greedy than others after the same "
                "response",
                deep[deep["temperature"].notna()],
                **options,
            ),
        ]
        return Conclusion(" ".join(text for text in said if text), f"{self.gate.sentence}.")


def check_temperatures(turns: pd.DataFrame) -> None:
    """Raise UserError if there is no curve, or one whose points are of different sources."""
    found = turns.groupby("source", observed=True)["temperature"].agg(lambda t: frozenset(t) - {0})
    every = sorted(frozenset().union(*found))
    if len(every) < 2:
        at = f"at T = {every[0]:g} only" if every else "greedily only"
        raise UserError(
            f"user turns were sampled {at}: of one temperature there is no sweep",
            "sample the same conversations with --temperatures 0.7 1 1.3, or give such a run too",
        )
    odd = found[found != frozenset(every)]
    if len(odd):
        has = ", ".join(f"{t:g}" for t in sorted(odd.iloc[0])) or "greedy only"
        raise UserError(
            f"the runs don't match: {len(odd)} of {len(found)} sources lack a temperature "
            f"(one has {has}, all together {', '.join(f'{t:g}' for t in every)})",
            "give runs in which every source is sampled at the same temperatures",
        )


def with_tokens(turns: pd.DataFrame, runs: "Sequence[Run]") -> pd.DataFrame:
    """The turns with their tokens and what the model made of them."""
    columns = [*KEY, "token_ids", "logprobs_raw", "ranks"]
    tokens = pd.concat([run.generations[columns].assign(run=str(run.path)) for run in runs])
    return turns.merge(tokens, on=["run", *KEY], how="left", validate="one_to_one")


def contexts_of(turns: pd.DataFrame, runs: "Sequence[Run]") -> pd.DataFrame:
    """Each context once: its greedy turn is there once, too."""
    greedy = turns[turns["temperature"] == 0]
    rows = {
        (str(run.path), name): (number, at)
        for number, run in enumerate(runs)
        for at, name in enumerate(run.contexts["context_id"])
    }
    places = [rows[key] for key in zip(greedy["run"], greedy["context_id"], strict=True)]
    return pd.DataFrame(
        {
            "dataset": greedy["dataset"].to_numpy(dtype=object),
            "source": greedy["source"].to_numpy(dtype=object),
            "run": [run for run, _ in places],
            "at": [at for _, at in places],
            "greedy": [int(ids[0]) for ids in greedy["token_ids"]],
        }
    )


def references(runs: "Sequence[Run]") -> "References | None":
    """Scored real follow-ups, each once."""
    from experiments.likelihood import references_of

    found = references_of(runs)
    if found is None:
        return None
    kept = ~found.frame.duplicated(["source", "context_id", "text"]).to_numpy()
    frame = found.frame[kept].reset_index(drop=True)
    return replace(found, frame=frame, curve=found.curve[kept])


# -- estimates -------------------------------------------------------------------------------------


def _mass(group: Group, quantity: str, values: Any, **names: Any) -> TidyEstimate:
    """The mean of values between 0 and 1 that aren't events, nor made of events.

    A rate's interval assumes the variance of events, which is far more than probabilities have.
    This is the interval of a mean, clipped to [0, 1].
    """
    row = group.mean(quantity, values, **names)
    return replace(row, estimate=row.estimate.clip(0, 1))


def first_token(
    group: Group, first: dict[str, np.ndarray], temperatures: Sequence[float]
) -> Iterator[TidyEstimate]:
    """Of ``[contexts, temperatures]`` arrays, as :func:`curves` makes them."""
    for column, t in enumerate(temperatures):
        at = {name: values[:, column] for name, values in first.items()}
        names: dict[str, Any] = {"temperature": float(t)}
        entropy = group.mean("first token's entropy", at["entropy"], **names)
        yield replace(entropy, estimate=entropy.estimate.clip(0))
        tokens = group.mean(TOKENS, np.exp(at["entropy"]), **names)
        yield replace(tokens, estimate=tokens.estimate.clip(1))
        yield _mass(group, "mass on turn-end", at["turn_end"], **names)
        yield _mass(group, "total variation from T = 1", at["variation"], **names)
        for term in ("genuine", "restated"):
            yield _mass(group, MASS, at[term], term=f"{term} turns' openings", **names)
        less = at["genuine"] - at["restated"]
        row = group.mean("mass on openings, genuine less restated", less, **names)
        yield replace(row, estimate=row.estimate.clip(-1, 1))


def depths(group: Group, turns: pd.DataFrame) -> Iterator[TidyEstimate]:
    """Of genuine turns and of others: whether and where greedy leaves them, how far below it."""
    for kind, term in ((1.0, "genuine"), (0.0, "not genuine")):
        at = turns[turns["genuine"] == kind]
        if at.empty:
            continue
        own = Group(at["source"].to_numpy(), group.options, group.names | {"term": term})
        yield own.mean("first token is greedy's", at["follows"], proportion=True)
        yield own.mean("greedy leaves it", at["leaves"], proportion=True)
        yield own.median("token where greedy leaves", at["token"])
        yield own.median("rank where greedy leaves", at["rank"])
        yield _mass(own, "probability where greedy leaves", at["probability"])
        gap = own.mean("gap where greedy leaves", at["gap"])
        yield replace(gap, estimate=gap.estimate.clip(0))  # no token is likelier than greedy's
        yield own.median("median gap where greedy leaves", at["gap"])


def deeper(group: Group, turns: pd.DataFrame, **names: Any) -> Iterator[TidyEstimate]:
    """Genuine turns less the others of the same context and temperature, and whether that is 0.

    Noise that leads far from greedy also garbles, and what is garbled isn't genuine. So genuine
    turns are also compared with the well-formed others alone.
    """
    for term, rows in zip(OTHERS, (turns, turns[turns["category"] != GARBLED]), strict=True):
        columns = {
            "first token is greedy's": rows["follows"],
            "token where greedy leaves": rows["token"],
            "log2 rank where greedy leaves": np.log2(rows["rank"]),
            "gap where greedy leaves": rows["gap"],
        }
        for quantity, values in columns.items():
            centred, genuine, sources = against_others(rows.assign(value=values), "value")
            if genuine.any():
                pair = centred[genuine], sources[genuine], centred[~genuine], sources[~genuine]
                yield paired_row(group, quantity + LESS, *pair, term=term, **names)


def lens_estimates(group: Group, log_p: dict[str, np.ndarray]) -> Iterator[TidyEstimate]:
    """By layer what the lens says of both openings, and from which on greedy's stays ahead."""
    for term, values in log_p.items():
        for layer in range(values.shape[1]):
            row = group.mean(LENS, values[:, layer], term=term, layer=layer)
            yield replace(row, estimate=row.estimate.clip(-np.inf, 0))
    first = overtaking_layer(log_p[GREEDY], log_p[BEST])
    if np.isnan(first).all():
        return
    for layer in range(log_p[GREEDY].shape[1]):
        ahead = np.where(np.isnan(first), np.nan, first <= layer)
        yield group.mean("greedy ahead for good", ahead, proportion=True, layer=layer)
    yield group.median(OVERTAKES, np.where(np.isfinite(first), first, np.nan))


main = TemperatureSweep.main

if __name__ == "__main__":
    sys.exit(main())
