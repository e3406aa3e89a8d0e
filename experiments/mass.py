"""How much of the first token's distribution leads to a follow-up?

After each response, the likeliest first tokens of the user turn are taken that together hold 90% of
the probability at T = 0.7 (at most 40). Each is gone on from greedily, and the turn is judged. The
follow-up mass is the probability of the first tokens whose turn is a follow-up: what the rate would
be if the first token were drawn, and no other. Greedy decoding sees the likeliest one alone. First
tokens that aren't covered can only add to it. The control is the mass of the same turns after a
wrong conversation.

An annotator's labels correct the mass: draw a sheet of the run of first tokens with ia-mech
annotate export, import it, and give this command again.

Needs: a judged run. Cost: up to 40 greedy turns a query (60 queries of the embedded model: ten
minutes on two cores).

    ia-mech mass cache/RUN
    ia-mech annotate export cache/RUN-mass/turns/run --n 300
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import Arm, conversations_of
from experiments.control import ratio
from experiments.experiment import Conclusion, Experiment, flag
from experiments.grid import TEMPERATURE
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE, lens_masses, lens_of, parts_of
from experiments.shown import Bars, Drawing, Lines, only, tables_of, told
from ia_mech.cli import above_zero, coverage, whole_from
from ia_mech.errors import UserError
from ia_mech.estimates import (
    Group,
    TidyEstimate,
    all_datasets,
    by_dataset,
    holm_corrected,
    paired_row,
)
from ia_mech.judge.decoys import WRONG
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.rates.compute import MIN_ANNOTATED, MIN_ANNOTATED_SOURCES
from ia_mech.rates.load import choose_annotator, unlabelled
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import MOST_FIRST
from ia_mech.stats import corrected_labels, corrected_mean

TURNS = "turns"  # the arm
GREEDY, FIRST, WHOLE = DECODINGS = ("greedy", "first token drawn", "all tokens drawn")
SHARE, RATE, AFTER_WRONG = "share", "follow-ups", "after a wrong conversation"
REST, LESS = "not covered", " minus greedy's"
HELD = "share of the rise"  # that the first token holds
EVERY = "all conversations"
NONE, IS = "the greedy turn is no follow-up", "the greedy turn is a follow-up"
LENS = {SHARE: "mass by the lens", REST: "covered by the lens"}
OF_COVERED = "mass by the lens, of what is covered"
LEAST_COVERED = 0.1  # on average, for a share of it
CORRECTED, NOTED = "corrected", "annotated"
ROUNDING = 1e-4  # of a sum of probabilities


def first_tokens(run: Run, judge: str, annotator: str | None = None) -> pd.DataFrame:
    """A row per first token of a context, of a run that goes on greedily from each.

    ``context_id``, ``dataset``, ``source``, ``token`` (its id), ``p`` (its probability at the run's
    temperature), ``greedy`` (whether it is the likeliest), ``text`` (the turn), ``category``; and
    as 1, 0, or NaN if it wasn't assessed, whether the turn is a follow-up (:data:`SHARE`), is
    :data:`IN_ROLE`, and is a follow-up :data:`AFTER_WRONG`. With an annotator, also the columns of
    :func:`corrected`.
    """
    turns = run.labelled(judge, annotator, texts=False)
    written = run.generations[[*KEY, "text", "token_ids", "logprob_tempered"]]
    turns = turns.merge(written, on=list(KEY), how="left", validate="one_to_one")
    turns = turns.join(parts_of(turns, FOLLOW_UP))
    decoys = run.decoys(judge)
    decoys = decoys[decoys["decoy"].astype(object) == WRONG]
    turns[AFTER_WRONG] = decoys.set_index("row")["follow_up"].reindex(turns.index)
    turns = turns[turns["temperature"] > 0].assign(
        token=[int(ids[0]) for ids in turns["token_ids"][turns["temperature"] > 0]],
        p=np.exp(turns["logprob_tempered"].astype(float)),
        greedy=turns["sample"] == 0,
    )
    texts = ["context_id", "dataset", "source", "category", "text"]
    kept = [*texts, "token", "p", "greedy", SHARE, IN_ROLE, AFTER_WRONG]
    if annotator is not None:
        turns = turns.join(corrected(turns))
        kept += [CORRECTED, NOTED]
    return turns[kept].astype(dict.fromkeys(texts, object)).reset_index(drop=True)


def corrected(turns: pd.DataFrame) -> pd.DataFrame:
    """Of first tokens with an annotator's labels, :data:`CORRECTED`: labels in sums of which, by
    probability, the judge's errors cancel (:func:`ia_mech.stats.corrected_labels`); and whether a
    turn is :data:`NOTED`."""
    by_judge, noted = (
        parts_of(turns.assign(category=turns[name]), FOLLOW_UP)[SHARE]
        for name in ("category", "truth_category")
    )
    how = {"inclusion": turns["inclusion"], "worth": turns["p"]}
    kinds = turns["category"].astype(str)
    labels = corrected_labels(by_judge, kinds, noted, turns["source"], **how)
    return pd.DataFrame({CORRECTED: labels, NOTED: by_judge.notna() & noted.notna()})


def masses(tokens: pd.DataFrame) -> pd.DataFrame:
    """A row per context of :func:`first_tokens`: ``dataset``, ``source``, ``context_id``;
    ``first token drawn share``, its follow-up mass, and with the names of :data:`DECODINGS` what
    else there is of it and of greedy turns; and :data:`REST`, the probability of tokens without an
    assessed turn."""
    found = tokens.groupby("context_id", sort=False)[["dataset", "source"]].first()
    likeliest = tokens[tokens["greedy"]].set_index("context_id")

    def summed(values: pd.Series) -> pd.Series:
        """By context; NaN where all are."""
        return values.groupby(tokens["context_id"], sort=False).sum(min_count=1)

    for name in (SHARE, IN_ROLE, AFTER_WRONG):
        held = summed(tokens["p"] * tokens[name])
        found[f"{FIRST} {name}"] = held.mask((held - 1).abs() < ROUNDING, 1.0)
        found[f"{GREEDY} {name}"] = likeliest[name]
    covered, shown = (
        summed(tokens["p"].where(tokens[name].notna(), 0.0)) for name in (SHARE, AFTER_WRONG)
    )
    found[REST] = (1 - covered).clip(lower=0)
    # Of turns that weren't assessed after a wrong conversation nothing is known, either.
    wrong = found[f"{FIRST} {AFTER_WRONG}"] * covered / shown.where(shown > 0)
    found[f"{FIRST} {AFTER_WRONG}"] = wrong.clip(upper=1)
    return found.reset_index()


def in_parts(
    group: Group, share: pd.Series, role: pd.Series, **names: Any
) -> Iterator[TidyEstimate]:
    """Follow-ups, in role, and once in role (follow-ups by what is in role) of ``[rows]`` shares;
    NaN in both where there is no telling."""
    yield group.mean(RATE, share, proportion=True, **names)
    yield group.mean(IN_ROLE, role, proportion=True, **names)
    if role.sum() > 0:
        once = ratio(share.fillna(0), role.fillna(0), group.sources, group.options)
        yield group.row(ONCE_IN_ROLE, once.clip(0, 1), int(role.notna().sum()), **names)


def by_greedy(each: pd.DataFrame) -> Iterator[tuple[str, pd.DataFrame]]:
    """Contexts whose greedy turn was assessed: all, and by what it is."""
    greedy = each[f"{GREEDY} {SHARE}"]
    for term, kept in ((EVERY, greedy.notna()), (NONE, greedy == 0), (IS, greedy == 1)):
        if kept.any():
            yield term, each[kept]


class Mass(Experiment):
    name = "mass"
    judged = True
    queries_used = 60
    corrected_by: str | None = None  # the annotator
    labels = 0  # of first tokens by the annotator
    columns: ClassVar[Mapping[str, str]] = {
        **Experiment.columns,
        "decoding": "str",
        "layer": "Int64",
    }

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add = partial(flag, parser)
        add("--temperature", above_zero, TEMPERATURE, "of the first token", metavar="T")
        what = "probability that the first tokens hold together, at least"
        add("--share", coverage, 0.9, what, metavar="SHARE")
        add("--responses", whole_from(1), 1, "finished ones to each query, at most", metavar="N")
        what = "whose labels of first tokens correct the masses (default: the only one)"
        add("--annotator", str, None, what, metavar="NAME")

    def arms(self) -> Mapping[str, Arm]:
        settings = {"temperatures": (self.args.temperature,), "first_tokens": self.args.share}
        each, queries = self.args.responses, [one for one in self.queries if any(one.complete)]
        if not queries:
            raise UserError("no response is finished", "sample with a larger --max-response-tokens")
        contexts = pd.concat([one.contexts[one.complete].iloc[:each] for one in queries])
        return {TURNS: Arm(conversations_of(contexts), settings, turns=1 + MOST_FIRST)}

    # -- read -------------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        """A row per first token, as of :func:`first_tokens`, with ``opening``, its text."""
        run, judge = self.sampled[TURNS], self.judge_arms()
        found = first_tokens(run, judge, self._annotator(run, judge))
        texts = {i: repr(self.chat.text([i])) for i in set(found["token"])}
        return found.assign(opening=found["token"].map(texts))

    @property
    def labellers(self) -> list[str]:
        return super().labellers + ([self.corrected_by] if self.corrected_by else [])

    def _annotator(self, run: Run, judge: str) -> str | None:
        """Whose labels correct the masses; None, with a note, where they can't."""
        name = choose_annotator([run], self.args.annotator)
        if name is None:
            return None
        turns = run.labelled(judge, name, texts=False)
        noted, missing = turns.dropna(subset="truth"), unlabelled(run, turns, name, judge)
        queries = noted["source"].nunique()
        if missing or len(noted) < MIN_ANNOTATED or queries < MIN_ANNOTATED_SOURCES:
            self.notes.append(
                f"{name}'s labels don't correct the masses: it takes {MIN_ANNOTATED} of "
                f"{MIN_ANNOTATED_SOURCES} queries, some in each stratum, and there are "
                f"{len(noted)} of {queries}{missing and ', none of '}{missing}."
            )
            return None
        self.corrected_by, self.labels = name, len(noted)
        return name

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        each = masses(rows)
        found = holm_corrected(self._estimated(each))
        if self.corrected_by:
            assessed = each.loc[each[f"{GREEDY} {SHARE}"].notna(), "context_id"]
            found += self._corrected(rows[rows["context_id"].isin(assessed)])
        return [*found, *self._by_lens(rows, each)]

    def _estimated(self, each: pd.DataFrame) -> Iterator[TidyEstimate]:
        turns, names = self.verdicts.turns, [SHARE, IN_ROLE]
        turns = turns[turns["temperature"] == self.args.temperature]
        parts = parts_of(turns, FOLLOW_UP)[names].groupby(turns["context_id"].astype(object))
        whole = parts.mean().reindex(each["context_id"])  # NaN if none is at this temperature
        each[[f"{WHOLE} {name}" for name in names]] = whole.to_numpy(float)
        for dataset, here in by_dataset(each):
            for term, own in by_greedy(each[here]):
                group = Group(own["source"], self.options, {"dataset": dataset, "term": term})
                yield from self._decodings(own, group)
                if term == EVERY:
                    yield from self._differences(own, group)

    def _decodings(self, own: pd.DataFrame, group: Group) -> Iterator[TidyEstimate]:
        """Follow-ups and their two parts, by how much of a turn is drawn."""
        yield group.mean(REST, own[REST], least=0, most=1, decoding=FIRST)
        for decoding in DECODINGS:
            share = own[f"{decoding} {SHARE}"]
            if share.notna().any():
                yield from in_parts(group, share, own[f"{decoding} {IN_ROLE}"], decoding=decoding)
            if (wrong := f"{decoding} {AFTER_WRONG}") in own and own[wrong].notna().any():
                yield group.mean(AFTER_WRONG, own[wrong], proportion=True, decoding=decoding)

    def _differences(self, own: pd.DataFrame, group: Group) -> Iterator[TidyEstimate]:
        """What drawing adds to greedy turns, and how much of that the first token does. Of first
        tokens it is a share of what is covered: what isn't counts neither way."""
        shares = own[["source"]].assign(**{name: own[f"{name} {SHARE}"] for name in DECODINGS})
        shares[FIRST] /= (1 - own[REST]).where(own[REST] < 1)
        for decoding in (FIRST, WHOLE):
            if shares[decoding].notna().any():
                pair = shares[decoding], own["source"], shares[GREEDY], own["source"]
                yield paired_row(group, f"{RATE}{LESS}", *pair, decoding=decoding)
        shares = shares.dropna()
        if len(shares):
            rise, whole = (shares[one] - shares[GREEDY] for one in (FIRST, WHOLE))
            held = ratio(rise, whole, shares["source"], self.options)
            yield group.row(HELD, held, len(shares), decoding=FIRST)

    def _corrected(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        """The rate of greedy turns and the follow-up mass, corrected by an annotator's labels."""
        likeliest = rows[rows["greedy"]]
        weighted = rows.assign(**{CORRECTED: rows["p"] * rows[CORRECTED]})
        by = weighted.groupby("context_id", sort=False)
        firsts = by[["dataset", "source"]].first().join(by[CORRECTED].sum()).join(by[NOTED].any())
        for decoding, own in ((GREEDY, likeliest), (FIRST, firsts)):
            for dataset, here in by_dataset(own):
                values, noted, sources = (own[here][n] for n in (CORRECTED, NOTED, "source"))
                found = corrected_mean(values, noted, sources, level=self.args.level)
                names = {"dataset": dataset, "term": EVERY, "decoding": decoding}
                group = Group(sources, self.options, names)
                yield group.row(f"{RATE}, {CORRECTED}", found, int(values.notna().sum()))

    def _by_lens(self, rows: pd.DataFrame, each: pd.DataFrame) -> Iterator[TidyEstimate]:
        """What the header's last state has after each layer, of all datasets together."""
        run = self.sampled[TURNS]
        if (lens := lens_of(run, self.notes)) is None:
            return
        openings = rows[rows[SHARE].notna()].set_index(["context_id", "token"])
        openings = openings[[SHARE]].assign(**{REST: 1.0})
        found = lens_masses(run, openings, lens, self.args.temperature)
        at = pd.Index(run.contexts["context_id"]).get_indexer(each["context_id"])
        *_, (dataset, _) = by_dataset(each)  # all together, or the only one
        for term, own in by_greedy(each):
            if term == IS:
                continue
            for layer, values in zip(run.layers, found[:, :, at[own.index]], strict=True):
                names = {"dataset": dataset, "term": term, "layer": layer}
                group = Group(own["source"], self.options, names)
                share, covered = values
                yield group.mean(LENS[SHARE], share, least=0, most=1)
                yield group.mean(LENS[REST], covered, least=0, most=1)
                if covered.mean() >= LEAST_COVERED:
                    part = ratio(share, covered, group.sources, self.options)
                    yield group.row(OF_COVERED, part, len(own))

    # -- shown ------------------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        parts = {
            RATE: ("follow-ups", 2),
            f"{RATE}, {CORRECTED}": (CORRECTED, 2),
            IN_ROLE: ("in role", 2),
            ONCE_IN_ROLE: ("once in role", 2),
        }
        every, t = found[found["term"] == EVERY], f"T = {self.args.temperature:g}"
        title = f"follow-ups by how much of a turn is drawn at {t}"
        whole = tables_of(
            f"{title} ({self.intervals})",
            every,
            parts | {RATE + LESS: ("minus greedy", "+.2f")},
            index=("dataset", "decoding"),
            rows="conversations",
            legend=f"{FIRST}: the follow-up mass, to which what isn't covered may add. For minus "
            "greedy it is divided by what is covered before. Once in role: follow-ups by turns "
            "that neither repeat the conversation nor speak as the assistant. Corrected: by an "
            "annotator's labels, if there are any.",
        )
        return [
            *whole[:1],
            *tables_of(
                f"{title}, by what the greedy turn is",
                all_datasets(found[found["term"].isin([NONE, IS])]),
                parts,
                index=("term", "decoding"),
                rows="conversations",
            ),
            *whole[1:],
            *tables_of(
                f"by the logit lens at header_last, {t} ({self.intervals})",
                found,
                {
                    LENS[SHARE]: ("follow-up mass", 2),
                    LENS[REST]: ("covered", 2),
                    OF_COVERED: ("of what is covered", 2),
                },
                index=("term", "layer"),
                rows="conversations",
                full=True,
                legend="Covered: the probability of all first tokens that were gone on from. Where "
                "it is small, the mass says nothing of follow-ups: the lens reads other tokens "
                "there, often other spellings of these words. Of what is covered: mass / covered, "
                f"where {LEAST_COVERED} or more is.",
            ),
        ]

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(found[found["term"] == EVERY])
        rows = rows[rows["quantity"].isin([RATE, IN_ROLE])]
        title = f"{self.runs[0].model['name']}, T = {self.args.temperature:g}"
        drawn: Drawing = Bars(title, "share of turns", rows, names="decoding", by="quantity")
        layers = all_datasets(found[found["layer"].notna()])
        layers = layers[layers["term"] == EVERY]
        if layers.empty:
            return {"drawn": drawn}
        words = title, "layer (0 = embeddings)", "probability by the lens", layers
        return {"drawn": drawn, "lens": Lines(*words, across="layer", by="quantity")}

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"first_tokens": rows.drop(columns="source"), "contexts": masses(rows)}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        whole = all_datasets(found[found["term"] == EVERY])

        def said(quantity: str, decoding: str, digits: int | str = 2) -> str:
            return told(whole, quantity, digits, decoding=decoding)

        rest = only(whole, REST)["value"].iloc[0]
        words = (
            f"Greedy turns are follow-ups at a rate of {said(RATE, GREEDY)}; with the first token "
            f"drawn at T = {self.args.temperature:g} it is {said(RATE, FIRST)} (at most "
            f"{rest:.2f} more)"
        )
        if all_drawn := said(RATE, WHOLE):
            words += f", with all tokens drawn {all_drawn}"
            words += f"; the first token's share of the difference: {said(HELD, FIRST, AS_SHARE)}"
        if self.corrected_by:
            greedy, first = (said(f"{RATE}, {CORRECTED}", one) for one in (GREEDY, FIRST))
            words += f". Corrected by {self.labels} labels of {self.corrected_by}, greedy turns "
            words += f"are follow-ups at a rate of {greedy}, and it is {first} with the first drawn"
        control = f"{self.gate.short}."
        if floor := said(AFTER_WRONG, FIRST):
            control = f"After a wrong conversation the follow-up mass is {floor}. {control}"
        return Conclusion(f"{words}.", control)


main = Mass.main

if __name__ == "__main__":
    sys.exit(main())
