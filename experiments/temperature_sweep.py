"""What does temperature change in user turns, and how far from the greedy turn are follow-ups?

- Follow-up rates by temperature, and their difference from greedy turns of the same queries. The
  control is how often the judge calls the same turns follow-ups after a wrong conversation.
- The first token's distribution at many temperatures, from the header's logits.
- The first token at which a sampled turn differs from the greedy one, and whether follow-ups lie
  deeper (the greedy token is likelier there) than other turns after the same response at the same
  temperature.
- From which layer on, by the logit lens at header_last, the token that opens the greedy turn stays
  ahead of those that open follow-ups of other queries.

Needs: judged runs with two temperatures or more and all header logits; for the last point the
model's lens (its final norm and unembedding, which sampling writes), not the model. Cost: a minute
for 100 contexts on a CPU.

    ia-mech temperature-sweep cache/RUN
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.experiment import Conclusion, Experiment
from experiments.outcome import (
    BEST,
    GREEDY,
    ahead_for_good,
    first_token_curves,
    lens_curves,
    lens_of,
    openings_of,
    with_token_scores,
)
from experiments.shown import FLOOR, Bars, Drawing, Lines, only, sentence_of, tables_of
from ia_mech.errors import UserError
from ia_mech.estimates import (
    ALL,
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    could_show,
    holm_corrected,
    paired_row,
    shown_changes,
)
from ia_mech.judge.decoys import WRONG
from ia_mech.rates.compute import differences, floors, rates
from ia_mech.results import Table
from ia_mech.run.labels import KEY

GRID = (*(round(0.1 * step, 1) for step in range(3, 16)), 1.75, 2.0)
GARBLED = "degenerate"
RATE = "follow-up rate"
RATE_DIFFERENCE = f"{RATE}: difference"
DEEPER = "gap where greedy leaves minus other turns'"  # after the same response and temperature
OTHER_TURNS = ("all others", "others but degenerate ones")
LEFT = {  # medians, by the column of :func:`leaving_point`
    "token": "token where greedy leaves",
    "rank": "rank where greedy leaves",
    "gap": "median gap where greedy leaves",
}
TOKENS, MASS = "effective number of first tokens", "mass on openings"
LENS, AHEAD = "log p by the lens", "greedy ahead for good"


# -- where greedy leaves ---------------------------------------------------------------------------


def leaving_point(turn: Any, greedy: Any) -> dict[str, float]:
    """Where greedy decoding leaves a sampled turn after the same response: ``token`` and ``rank``
    there (from 1), and ``gap``, the log-probability of greedy's token minus that of the turn's at
    T = 1, in nats; NaN where greedy writes the same turn.

    Before that token both are the same, so the stored log-probabilities are of one distribution.
    """
    ids, others = np.asarray(turn.token_ids), np.asarray(greedy.token_ids)
    shared = min(len(ids), len(others))
    differ = np.flatnonzero(ids[:shared] != others[:shared])
    if not len(differ):  # the same turn, to its end or to the limit of tokens
        return dict.fromkeys(("token", "rank", "gap"), np.nan)
    at = int(differ[0])
    gap = float(greedy.logprobs_raw[at]) - float(turn.logprobs_raw[at])
    return {"token": at + 1.0, "rank": float(turn.ranks[at]), "gap": gap}


def against_others(frame: pd.DataFrame, column: str) -> tuple[np.ndarray, np.ndarray]:
    """``[follow-ups]`` values of a column, minus the mean of the turns of the same context and
    temperature that aren't follow-ups; and their sources.

    Contexts or temperatures with many follow-ups are so never compared with ones that have few.
    Contexts without both kinds of turns are left out.
    """
    kept = frame[frame[column].notna()]
    cells = kept.groupby(["context", "temperature"])["follow_up"]
    kept = kept[(cells.transform("min") == 0) & (cells.transform("max") == 1)]
    others = kept[column].where(kept["follow_up"] == 0)
    mean = others.groupby([kept["context"], kept["temperature"]]).transform("mean")
    more = (kept[column] - mean)[kept["follow_up"] == 1]
    return more.to_numpy(), kept.loc[more.index, "source"].to_numpy()


# -- the experiment --------------------------------------------------------------------------------


class TemperatureSweep(Experiment):
    name = "temperature_sweep"
    judged, loads, mixed = True, False, True
    columns: ClassVar = {
        **dict.fromkeys(("dataset", "term", "outcome", "decoy"), "str"),
        **{"temperature": "float64", "layer": "Int64", "level": "float64", "events": "Int64"},
    }

    # -- read -------------------------------------------------------------------------------------

    def read(self) -> None:
        from ia_mech.run.reader import EXACT_FROM

        judged = self.verdicts
        sampled = sorted(set(judged.turns["temperature"]) - {0})
        if len(sampled) < 2:
            at = f"at T = {sampled[0]:g} only" if sampled else "greedily only"
            raise UserError(
                f"user turns were sampled {at}: of one temperature there is no sweep",
                "sample the same conversations with --temperatures 0.7 1 1.3, or give such a run "
                "too",
            )
        self.grid = sorted({*GRID, *(t for t in sampled if t >= EXACT_FROM)})
        self.decoys = judged.decoys
        self.turns = with_token_scores(judged.turns, self.runs)
        greedy = self.turns[self.turns["temperature"] == 0].reset_index(drop=True)  # once each
        self.contexts = (
            greedy[["dataset", "source", "run"]]
            .astype(object)
            .assign(at=greedy["at"], greedy=[int(ids[0]) for ids in greedy["token_ids"]])
        )
        self.notes += judged.notes
        if missing := int(self.turns["follow_up"].isna().sum()):
            self.notes.append(f"{missing} of {len(self.turns)} turns were not assessed.")
        if unfinished := int(self.turns["unfinished"].sum()):
            self.notes.append(
                f"{unfinished} of {len(self.turns)} turns follow an unfinished response: ia-mech "
                "rates --after complete leaves them out."
            )

    def rows(self) -> pd.DataFrame:
        """A row per sampled turn that was assessed: of ``turns``, with :func:`leaving_point`."""
        openings = openings_of(self.turns)
        self.first = first_token_curves(self.runs, self.contexts, openings, self.grid)
        self.log_p: dict[str, np.ndarray] = {}
        if lens := lens_of(self.runs[0], self.notes):
            self.log_p = lens_curves(self.runs, self.contexts, openings, lens)
        sampled = self.turns[self.turns["follow_up"].notna() & (self.turns["temperature"] > 0)]
        greedy = {
            (str(run.path), row.context_id): row
            for run in self.runs
            for row in run.generations.query("temperature == 0").itertuples()
        }
        left = [
            leaving_point(turn, greedy[turn.run, turn.context_id]) for turn in sampled.itertuples()
        ]
        names = ["run", "dataset", "source", "context", *KEY, "category", "follow_up"]
        frame = sampled[names].astype(dict.fromkeys(names[:5], object)).reset_index(drop=True)
        return pd.concat([frame.astype({"category": object}), pd.DataFrame(left)], axis=1)

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        """Holm-corrected in families: the rate, and follow-ups against others; all datasets
        together are a family of their own in each."""
        found: list[TidyEstimate] = []
        for dataset, here in by_dataset(self.turns):
            turns, by, greedy = self.turns[here], ["temperature"], {"temperature": 0.0}
            decoys = self.decoys[(self.decoys["dataset"] == dataset) | (dataset == ALL)]
            names: dict[str, Any] = {"dataset": dataset, "level": self.args.level}
            found += rates(turns, by, quantity=RATE, **names)
            options = {"within": "context", "seed": self.args.seed, "quantity": RATE_DIFFERENCE}
            found += differences(turns, by, greedy, **options, **names)
            found += floors(decoys, WRONG, by, **names)
        for dataset, here in by_dataset(self.contexts):
            sources = self.contexts["source"].to_numpy()[here]
            group = Group(sources, self.options, {"dataset": dataset})
            first = {term: at[here] for term, at in self.first.items()}
            found += first_token_estimates(group, first, self.grid)
            if self.log_p:
                found += lens_estimates(group, {term: at[here] for term, at in self.log_p.items()})
        for dataset, here in by_dataset(rows):
            own = rows[here]
            group = Group(own["source"].to_numpy(), self.options, {"dataset": dataset})
            for t, at in own.groupby("temperature"):
                found += depth_estimates(group, at, temperature=float(t))
        return holm_corrected(found)

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        tested = "Holm-corrected p."
        follow_up = found[found["outcome"] == "follow_up"]
        made = tables_of(
            f"follow-ups by temperature ({self.intervals})",
            follow_up,
            {
                RATE: ("follow-ups", 2),
                RATE_DIFFERENCE: ("minus greedy", 2),
                "floor": ("after a wrong conversation", 2),
                "beyond": ("minus that", 2),
            },
            rows="turns",
            legend=f"Minus greedy's: the difference, paired by query. {tested} After a wrong "
            "conversation: how often the judge calls the same turns follow-ups there.",
        )
        made += tables_of(
            f"where greedy decoding leaves a turn ({self.intervals})",
            found,
            {LEFT[name]: (name, 2 * (name == "gap")) for name in LEFT},
            index=("dataset", "temperature", "term"),
            rows="turns",
            legend="Medians at the first token that differs from the greedy turn's: its number, "
            "its rank, and the gap (log p of the greedy token minus that of this token at T = 1, "
            "in nats).",
        )
        made += tables_of(
            f"do follow-ups lie deeper? ({self.intervals})",
            found,
            {DEEPER: ("gap minus others'", 2)},
            index=("dataset", "temperature", "term"),
            rows="follow-ups",
            legend="Gap minus others': by how many nats the greedy token is likelier where a "
            "follow-up leaves the greedy turn, minus the same number for other turns after the "
            f"same response at the same temperature. {tested}",
        )
        first: dict[str, tuple[str, int | str]] = {
            "first token's entropy": ("entropy", 2),
            TOKENS: ("effective tokens", 1),
            "mass on turn-end": ("turn-end", ".0e"),
        }
        made += tables_of(
            f"the first token by temperature ({self.intervals})",
            all_datasets(found),
            first,
            rows="conversations",
            legend="Entropy in nats; effective tokens: exp(entropy); turn-end: probability of "
            "ending the turn at once.",
            full=True,
        )
        return made + tables_of(
            f"greedy's opening by layer, logit lens ({self.intervals})",
            all_datasets(found),
            {AHEAD: ("ahead for good", 2)},
            index=("layer",),
            rows="conversations",
            legend="From this layer on to the last, greedy's opening is likelier than the best "
            "follow-up opening (header_last).",
            full=True,
        )

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        from ia_mech.rates.figures import gate_title  # loads matplotlib

        title, pooled = gate_title(self.runs[0].model["name"], self.gate), all_datasets(found)
        floor = only(pooled, "floor").assign(dataset=FLOOR)
        shares = pd.concat([only(found, RATE), floor])
        t, tokens = "temperature (0 = greedy)", only(found, TOKENS)
        made: dict[str, Drawing] = {
            "rates": Lines(title, t, "share of turns (0 to 1)", shares, by="dataset"),
            "first_token": Lines(title, "temperature", TOKENS, tokens, by="dataset", log=True),
        }
        if (mass := only(pooled, MASS))["value"].notna().any():
            made["openings"] = Lines(title, "temperature", "probability", mass)
        if len(deep := only(pooled, DEEPER)):
            words = "gap to the greedy turn: follow-ups minus other turns, nats"
            made["hidden"] = Bars(title, words, deep, names="temperature", by="term")
        if len(lens := only(pooled, LENS)):
            up = "log p at header_last, nats"
            made["lens"] = Lines(title, "layer (0 = embeddings)", up, lens, across="layer")
        return made

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": rows.drop(columns=["source", "context"])}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        rates = sentence_of(f"{RATE} by temperature", only(found, RATE))
        less, deeper = only(found, RATE_DIFFERENCE), only(found, DEEPER, term=OTHER_TURNS[0])
        changed = shown_changes(
            less,
            "Sampled turns are follow-ups less often than greedy turns, by",
            "Sampled turns are follow-ups more often than greedy turns, by",
        )
        could = could_show(all_datasets(less)["detectable"].max(), most=1) if len(less) else ""
        null = f"No temperature is shown to change the follow-up rate{f' ({could})' * bool(could)}"
        said = [changed or null, rates]
        if len(deeper):
            turns = "than other turns after the same response, by"
            apart = shown_changes(
                deeper,
                f"Follow-ups lie nearer to the greedy turn {turns}",
                f"Follow-ups lie farther from the greedy turn {turns}",
                unit=" nats",
            )
            said.append(
                apart
                or "No difference is shown between follow-ups and other turns in how likely the "
                "greedy token was where they left the greedy turn"
            )
        return Conclusion(" ".join(f"{text.rstrip('.')}." for text in said), f"{self.gate.short}.")


# -- estimates -------------------------------------------------------------------------------------


def first_token_estimates(
    group: Group, first: dict[str, np.ndarray], temperatures: Sequence[float]
) -> Iterator[TidyEstimate]:
    """Of ``[contexts, temperatures]`` arrays, as :func:`first_token_curves` makes them."""
    for quantity, term, values, least, most in (
        ("first token's entropy", None, first["entropy"], 0, np.inf),
        (TOKENS, None, np.exp(first["entropy"]), 1, np.inf),
        ("mass on turn-end", None, first["turn_end"], 0, 1),
        (MASS, "follow-ups' openings", first["follow_up"], 0, 1),
        (MASS, "repetitions' openings", first["restated"], 0, 1),
    ):
        names: dict[str, Any] = {"term": term, "least": least, "most": most}
        for t, column in zip(temperatures, values.T, strict=True):
            yield group.mean(quantity, column, temperature=float(t), **names)


def depth_estimates(group: Group, turns: pd.DataFrame, **names: Any) -> Iterator[TidyEstimate]:
    """Of follow-ups and of others: where greedy leaves them, and how far below it. And the gap of
    follow-ups minus that of the others of the same context and temperature.

    Noise that leads far from greedy also garbles, and what is garbled isn't a follow-up. So
    follow-ups are also compared with the well-formed others alone.
    """
    for kind, term in ((1.0, "follow-ups"), (0.0, "others")):
        at = turns[turns["follow_up"] == kind]
        own = replace(group, sources=at["source"].to_numpy())
        for column, quantity in LEFT.items() if len(at) else ():
            yield own.median(quantity, at[column], term=term, **names)
    for term, rows in zip(OTHER_TURNS, (turns, turns[turns["category"] != GARBLED]), strict=True):
        more, sources = against_others(rows, "gap")
        if len(more):
            yield paired_row(group, DEEPER, more, sources, 0 * more, sources, term=term, **names)


def lens_estimates(group: Group, log_p: dict[str, np.ndarray]) -> Iterator[TidyEstimate]:
    """By layer, the lens's log-probability of both openings, and whether greedy's stays ahead."""
    for term, values in log_p.items():
        for layer in range(values.shape[1]):
            yield group.mean(LENS, values[:, layer], most=0, term=term, layer=layer)
    ahead = ahead_for_good(log_p[GREEDY], log_p[BEST])
    if not np.isnan(ahead).all():
        for layer in range(ahead.shape[1]):
            yield group.mean(AHEAD, ahead[:, layer], proportion=True, layer=layer)


main = TemperatureSweep.main

if __name__ == "__main__":
    sys.exit(main())
