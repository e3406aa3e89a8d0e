"""How much of the first token's distribution leads to a follow-up?

After each response, the command takes the likeliest first tokens of the user turn that together
have 90% of the probability at T = 0.7 (at most 40). The model continues each of them greedily, and
the judge labels these turns. The follow-up mass of a conversation is the probability of the first
tokens whose turn is a follow-up. Nothing is sampled, so the mass has no sampling noise. It is the
follow-up rate of turns whose first token alone is sampled. Tokens that aren't covered may lead to
follow-ups, too: the true mass lies between the number and the number plus the rest. The control is
the mass of the same turns after a wrong conversation.

The first response to each query is used, or more of them (--responses). A turn is in role if it
neither repeats the conversation nor speaks as the assistant. The mass is the probability of turns
in role, times the share of follow-ups among these.

The judge errs. An annotator's labels correct the masses: export a sheet of the turns with ia-mech
annotate export, import the filled sheet, and run this command again.

Needs: a judged run. Cost: up to 40 greedy turns a query (60 queries of the embedded model: ten
minutes on two cores).

    ia-mech mass cache/RUN
    ia-mech annotate export cache/RUN-mass/turns/run --n 300
"""

import argparse
import sys
from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from numpy.typing import ArrayLike

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
from ia_mech.rates.load import choose_annotator, read_runs, unlabelled
from ia_mech.results import SHARE as AS_SHARE
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.labels import KEY
from ia_mech.settings import MOST_FIRST
from ia_mech.stats import corrected_labels, corrected_mean

TURNS = "turns"  # the arm
GREEDY, FIRST, WHOLE = "greedy", "first token sampled", "all tokens sampled"
OF_COVERED = "first token, of covered"
DECODINGS = (GREEDY, FIRST, OF_COVERED, WHOLE)
SHARE, RATE, AFTER_WRONG = "share", "follow-ups", "after a wrong conversation"
REST, LESS = "not covered", " minus greedy"
HELD = "share of the rise"  # that the first token holds
EVERY = "all conversations"
NONE, IS = "the greedy turn is no follow-up", "the greedy turn is a follow-up"
CARRIED, PROBABILITY = "adds to the follow-up mass", "mean probability"
LENS = {SHARE: "mass by the lens", IN_ROLE: "in role by the lens", REST: "covered by the lens"}
LENS_COVERED = "mass by the lens, of what is covered"
LEAST_COVERED = 0.1  # on average, for a share of it
LISTED = 12  # first tokens that are shown
CORRECTED, NOTED = ", corrected", "annotated"
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
        turns = turns.join(corrected(turns, turns["p"]))
        kept += [SHARE + CORRECTED, IN_ROLE + CORRECTED, NOTED]
    return turns[kept].astype(dict.fromkeys(texts, object)).reset_index(drop=True)


def corrected(turns: pd.DataFrame, worth: ArrayLike) -> pd.DataFrame:
    """Of turns with an annotator's labels, :data:`SHARE` and :data:`IN_ROLE` in sums of which the
    judge's errors cancel (:func:`ia_mech.stats.corrected_labels`), and whether a turn is
    :data:`NOTED`."""
    by_judge, noted = (
        parts_of(turns.assign(category=turns[name]), FOLLOW_UP)
        for name in ("category", "truth_category")
    )
    found = pd.DataFrame(index=turns.index)
    for name in (SHARE, IN_ROLE):
        found[name + CORRECTED] = corrected_labels(
            by_judge[name],
            turns["category"].astype(str),
            noted[name],
            turns["source"],
            inclusion=turns["inclusion"],
            worth=worth,
        )
    return found.assign(**{NOTED: by_judge[SHARE].notna() & noted[SHARE].notna()})


def too_few_labels(turns: pd.DataFrame) -> str:
    """Why so few turns are annotated that no mass can be corrected; else empty."""
    noted = turns[turns["truth"].notna()]
    if len(noted) >= MIN_ANNOTATED and noted["source"].nunique() >= MIN_ANNOTATED_SOURCES:
        return ""
    return (
        f"it takes {MIN_ANNOTATED} of {MIN_ANNOTATED_SOURCES} queries, and there are {len(noted)}"
    )


def by_annotator(turns: pd.DataFrame) -> pd.DataFrame:
    """The same turns with what is :func:`corrected` in place of the judge's verdicts."""
    return turns.assign(**{name: turns[name + CORRECTED] for name in (SHARE, IN_ROLE)})


def masses(tokens: pd.DataFrame) -> pd.DataFrame:
    """A row per context of :func:`first_tokens`: ``dataset``, ``source``, ``context_id``;
    ``first token sampled share``, its follow-up mass, and with the names of :data:`DECODINGS` what
    else there is of it and of greedy turns; and :data:`REST`, the probability of tokens without an
    assessed turn."""
    by = tokens.groupby("context_id", sort=False)
    found = by[["dataset", "source"]].first()
    likeliest = tokens[tokens["greedy"]].set_index("context_id")
    for name in (SHARE, IN_ROLE, AFTER_WRONG):
        held = (tokens["p"] * tokens[name]).groupby(tokens["context_id"], sort=False)
        held = held.sum(min_count=1)
        found[f"{FIRST} {name}"] = held.mask((held - 1).abs() < ROUNDING, 1.0)
        found[f"{GREEDY} {name}"] = likeliest[name]
    covered, shown = (
        tokens["p"].where(tokens[name].notna(), 0.0).groupby(tokens["context_id"], sort=False).sum()
        for name in (SHARE, AFTER_WRONG)
    )
    found[REST] = (1 - covered).clip(lower=0)
    for name in (SHARE, IN_ROLE):
        part = found[f"{FIRST} {name}"] / covered.where(covered > 0)
        found[f"{OF_COVERED} {name}"] = part.mask((part - 1).abs() < ROUNDING, 1.0)
    # Of turns that weren't assessed after a wrong conversation nothing is known, either.
    wrong = found[f"{FIRST} {AFTER_WRONG}"] * covered / shown.where(shown > 0)
    found[f"{FIRST} {AFTER_WRONG}"] = wrong.clip(upper=1)
    if NOTED in tokens:
        found[f"{FIRST} {NOTED}"] = found[f"{OF_COVERED} {NOTED}"] = by[NOTED].any()
        found[f"{GREEDY} {NOTED}"] = likeliest[NOTED]
    return found.reset_index()


def in_parts(
    group: Group, share: pd.Series, role: pd.Series, noted: ArrayLike | None = None, **names: Any
) -> Iterator[TidyEstimate]:
    """Follow-ups, in role, and once in role (follow-ups by what is in role) of ``[rows]`` shares;
    NaN in both where there is no telling. Of shares that are :func:`corrected`, ``noted`` says into
    which of them annotations went."""
    for quantity, values in ((RATE, share), (IN_ROLE, role)):
        if noted is None:
            yield group.mean(quantity, values, proportion=True, **names)
        else:
            level = group.options["level"]
            estimate = corrected_mean(values, noted, group.sources, level=level)
            yield group.row(quantity, estimate, int(values.notna().sum()), **names)
    if role.sum() > 0:
        once = ratio(share.fillna(0), role.fillna(0), group.sources, group.options)
        yield group.row(ONCE_IN_ROLE, once.clip(0, 1), int(role.notna().sum()), **names)


class Mass(Experiment):
    name = "mass"
    judged = True
    queries_used = 60
    corrected_by: str | None = None  # the annotator
    labels = 0  # of first tokens by the annotator
    columns: ClassVar[Mapping[str, str]] = {
        **Experiment.columns,
        "decoding": "str",
        "opening": "str",
        "layer": "Int64",
    }

    @classmethod
    def add_flags(cls, parser: argparse.ArgumentParser) -> None:
        add = partial(flag, parser)
        add("--temperature", above_zero, TEMPERATURE, "of the first token", metavar="T")
        what = "least probability that the first tokens have together"
        add("--share", coverage, 0.9, what, metavar="SHARE")
        what = "at most N finished responses to each query"
        add("--responses", whole_from(1), 1, what, metavar="N")
        what = "whose labels of first tokens correct the masses (default: the only one)"
        add("--annotator", str, None, what, metavar="NAME")

    def arms(self) -> Mapping[str, Arm]:
        settings = {"temperatures": (self.args.temperature,), "first_tokens": self.args.share}
        each, queries = self.args.responses, [one for one in self.queries if any(one.complete)]
        if not queries:
            raise UserError("no response is finished", "sample with a larger --max-response-tokens")
        if left_out := len(self.queries) - len(queries):
            whose = "1 query has" if left_out == 1 else f"{left_out} queries have"
            self.notes.append(f"{whose} no finished response and no mass.")
        contexts = pd.concat([one.contexts[one.complete].iloc[:each] for one in queries])
        turns = 1 + self._first_tokens(contexts["context_id"])
        flags = {"temperatures": "--temperature", "first_tokens": "--share"}
        return {TURNS: Arm(conversations_of(contexts), settings, turns=turns, flags=flags)}

    def _first_tokens(self, contexts: pd.Series) -> int:
        """About how many there are after each context; at most, where the run doesn't say it."""
        import torch

        from ia_mech.engine.sampling import first_tokens_holding

        run, *others = self.runs
        if others or run.settings["opening"] or run.settings["header_logits"] == "none":
            return MOST_FIRST
        kept, at = run.header_logits(), pd.Index(run.contexts["context_id"]).get_indexer(contexts)
        logits = torch.stack([kept[int(row)] for row in at])
        share, t = self.args.share, self.args.temperature
        return round(np.mean(first_tokens_holding(share, logits, t, MOST_FIRST)))

    # -- read -------------------------------------------------------------------------------------

    def rows(self) -> pd.DataFrame:
        """A row per first token, as of :func:`first_tokens`, with ``opening``, its text."""
        run, judge = self.sampled[TURNS], self.judge_arms()
        found = first_tokens(run, judge, self._annotator(run, judge))
        if found.loc[found["greedy"], SHARE].isna().all():
            raise UserError(
                f"the judge assessed no greedy turn of {self.sampled[TURNS].path}",
                "have it judged again (ia-mech judge run)",
            )
        self.notes.append(f"these turns have a page of their own: ia-mech report {run.path}")
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
        why = too_few_labels(turns)
        if not why and (missing := unlabelled(run, turns, name, judge)):
            why = f"none is of {missing}"
        if why:
            self.notes.append(f"{name}'s labels don't correct the masses: {why}.")
            return None
        self.corrected_by, self.labels = name, int(turns["truth"].notna().sum())
        return name

    def drawn_turns(self, contexts: pd.Series, by: str) -> pd.DataFrame:
        """The run's turns at the temperature after some contexts: ``context_id``, ``source``,
        ``sample``, :data:`SHARE`, :data:`IN_ROLE`. There may be none; nor are there any that are
        :data:`CORRECTED` (``by``), with :data:`NOTED`, unless enough of them have labels of the
        same annotator."""
        turns = self.verdicts.turns
        none = turns.iloc[:0].assign(**{SHARE: np.nan, IN_ROLE: np.nan, NOTED: False})
        if by:
            if any(self.corrected_by not in run.labels.annotators for run in self.runs):
                return none
            turns = read_runs(self.runs, self.gate.judge, self.corrected_by).turns
        here = (turns["temperature"] == self.args.temperature) & turns["context_id"].isin(contexts)
        turns = turns[here].astype({"context_id": object, "source": object})
        turns = turns.join(parts_of(turns, FOLLOW_UP)[[SHARE, IN_ROLE]])
        if not by:
            return turns
        if too_few_labels(turns) or turns["unlabelled"].any():
            return none
        return by_annotator(turns.join(corrected(turns, np.ones(len(turns)))))

    # -- estimated --------------------------------------------------------------------------------

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        judged = masses(rows)
        found = holm_corrected(self._estimated(judged, judged))
        if NOTED in rows:
            unseen = rows.assign(**{AFTER_WRONG: np.nan})  # what no annotator's label is of
            found += holm_corrected(
                self._estimated(masses(by_annotator(unseen)), judged, CORRECTED)
            )
        return [*found, *self._openings(rows), *self._by_lens(rows, judged)]

    def _estimated(
        self, each: pd.DataFrame, judged: pd.DataFrame, by: str = ""
    ) -> Iterator[TidyEstimate]:
        """Of the masses of contexts, which are :data:`CORRECTED` if ``by`` says so. What their
        greedy turns are, the judge says in any case (``judged``)."""
        whole = self.drawn_turns(each["context_id"], by).groupby("context_id")
        names = [SHARE, IN_ROLE] + [NOTED] * bool(by)
        whole = whole[names].mean().reindex(each["context_id"])
        each[[f"{WHOLE} {name}" for name in names]] = whole.to_numpy(float)
        for dataset, here in by_dataset(each):
            greedy = judged[f"{GREEDY} {SHARE}"]
            for term, kept in ((EVERY, greedy.notna()), (NONE, greedy == 0), (IS, greedy == 1)):
                own = each[here & kept]
                if not len(own):
                    continue
                group = Group(own["source"], self.options, {"dataset": dataset, "term": term})
                yield from self._decodings(own, group, by)
                if term == EVERY:
                    yield from self._differences(own, group, by)

    def _decodings(self, own: pd.DataFrame, group: Group, by: str) -> Iterator[TidyEstimate]:
        """Follow-ups and their two parts, by how much of a turn is sampled. The mass itself has no
        parts: first tokens that aren't covered may be in role, too."""
        if not by:
            yield group.mean(REST, own[REST], least=0, most=1, decoding=FIRST)
        for decoding in DECODINGS:
            share = own[f"{decoding} {SHARE}"]
            if share.notna().any():
                noted = own[f"{decoding} {NOTED}"] > 0 if by else None
                parts = share, own[f"{decoding} {IN_ROLE}"], noted
                found = in_parts(group, *parts, decoding=f"{decoding}{by}")
                yield from islice(found, 1 if decoding == FIRST else None)
            if (wrong := f"{decoding} {AFTER_WRONG}") in own and own[wrong].notna().any():
                yield group.mean(AFTER_WRONG, own[wrong], proportion=True, decoding=decoding)

    def _differences(self, own: pd.DataFrame, group: Group, by: str) -> Iterator[TidyEstimate]:
        """What sampling adds to greedy turns, and how much of that the first token does. Of first
        tokens it is a share of what is covered: what isn't counts neither way."""
        for decoding in (OF_COVERED, WHOLE):
            for quantity, of in ((RATE, SHARE), (IN_ROLE, IN_ROLE)):
                sampled, greedy = own[f"{decoding} {of}"], own[f"{GREEDY} {of}"]
                if sampled.notna().any():
                    pair = sampled, own["source"], greedy, own["source"]
                    yield paired_row(group, f"{quantity}{LESS}", *pair, decoding=f"{decoding}{by}")
        both = own[[f"{decoding} {SHARE}" for decoding in (GREEDY, OF_COVERED, WHOLE)]].dropna()
        if len(both):
            base, first, whole = both.to_numpy(float).T
            sources = own.loc[both.index, "source"]
            apart = paired_row(group, HELD, whole, sources, base, sources).estimate
            if apart.low > 0 or apart.high < 0:
                held = ratio(first - base, whole - base, sources, self.options)
                yield group.row(HELD, held, len(both), decoding=f"{FIRST}{by}")

    def _openings(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        """Of the first tokens that carry most of the mass, what each adds to its mean, and its mean
        probability."""
        sources = rows.groupby("context_id", sort=False)["source"].first()
        *_, (dataset, _) = by_dataset(rows)  # all together, or the only one
        group = Group(sources.to_numpy(), self.options, {"dataset": dataset})
        rows = rows.assign(carried=rows["p"] * rows[SHARE].fillna(0))
        for opening in rows.groupby("opening")["carried"].sum().nlargest(LISTED).index:
            of = rows[rows["opening"] == opening].groupby("context_id")[["carried", "p"]].sum()
            of = of.reindex(sources.index, fill_value=0.0)
            yield group.mean(CARRIED, of["carried"], least=0, most=1, opening=opening)
            yield group.mean(PROBABILITY, of["p"], least=0, most=1, opening=opening)

    def _by_lens(self, rows: pd.DataFrame, each: pd.DataFrame) -> Iterator[TidyEstimate]:
        """What the header's last state has after each layer, of all datasets together."""
        run = self.sampled[TURNS]
        if (lens := lens_of(run, self.notes)) is None:
            return
        openings = rows[rows[SHARE].notna()].set_index(["context_id", "token"])
        openings = openings[[SHARE, IN_ROLE]].assign(**{REST: 1.0})
        found = lens_masses(run, openings, lens, self.args.temperature)
        at = pd.Index(run.contexts["context_id"]).get_indexer(each["context_id"])
        *_, (dataset, _) = by_dataset(each)
        greedy = each[f"{GREEDY} {SHARE}"]
        for term, kept in ((EVERY, greedy.notna()), (NONE, greedy == 0)):
            own = each[kept]
            if own.empty:
                continue
            for layer, values in zip(run.layers, found[:, :, at[kept]], strict=True):
                names = {"dataset": dataset, "term": term, "layer": layer}
                group = Group(own["source"], self.options, names)
                share, role, covered = map(pd.Series, values)
                yield group.mean(LENS[REST], covered, least=0, most=1)
                if covered.mean() >= LEAST_COVERED:  # else the lens reads other tokens there
                    yield group.mean(LENS[SHARE], share, proportion=True)
                    yield group.mean(LENS[IN_ROLE], role, proportion=True)
                    part = ratio(share.fillna(0), covered.fillna(0), group.sources, self.options)
                    yield group.row(LENS_COVERED, part, len(own))

    # -- shown ------------------------------------------------------------------------------------

    @property
    def _by(self) -> str:
        """By whose labels numbers are corrected; empty where they aren't."""
        who = self.corrected_by
        return f" Corrected by {self.labels} labels of {who}." if who else ""

    def tables(self, found: pd.DataFrame) -> list[Table]:
        parts = {
            RATE: ("follow-ups", 2),
            IN_ROLE: ("in role", 2),
            ONCE_IN_ROLE: ("once in role", 2),
        }
        every, t = found[found["term"] == EVERY], f"T = {self.args.temperature:g}"
        title = f"follow-ups by how many tokens are sampled at {t}"
        labelled = "The judge's label says what the greedy turn is."
        whole = tables_of(
            f"{title} ({self.intervals})",
            every,
            parts | {RATE + LESS: ("minus greedy", "+.2f")},
            index=("dataset", "decoding"),
            rows="conversations",
            legend=f"{FIRST}: the follow-up mass, to which first tokens that weren't continued "
            "(aren't covered) may add. Of covered: the mass divided by the probability of those "
            "that were. Once in role: the share of follow-ups among turns that neither repeat the "
            f"conversation nor speak as the assistant.{self._by}",
        )
        return [
            *whole[:1],
            *tables_of(
                f"{title}, by what the greedy turn is",
                all_datasets(found[found["term"].isin([NONE, IS])]),
                parts,
                index=("term", "decoding"),
                rows="conversations",
                legend=labelled if self.corrected_by else "",
            ),
            *whole[1:],
            *tables_of(
                f"by the logit lens at header_last, {t} ({self.intervals})",
                found,
                {
                    LENS[SHARE]: ("follow-up mass", 2),
                    LENS[IN_ROLE]: ("in role", 2),
                    LENS[REST]: ("covered", 2),
                    LENS_COVERED: ("of what is covered", 2),
                },
                index=("term", "layer"),
                rows="conversations",
                full=True,
                legend="Covered: the probability of all first tokens that were continued. Of what "
                f"is covered: mass / covered. Where less than {LEAST_COVERED} is covered, there is "
                "no mass: the lens reads other tokens there, often the same words in another "
                "spelling (' how' for 'How').",
            ),
            *tables_of(
                "the first tokens that carry most of the follow-up mass",
                found,
                {CARRIED: ("adds to the mass", 3), PROBABILITY: ("mean probability", 3)},
                index=("opening",),
                rows="conversations",
                full=True,
            ),
        ]

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = all_datasets(found[found["term"] == EVERY])
        rest = f"{FIRST} (up to {only(rows, REST)['value'].iloc[0]:.2f} more)"
        rows = rows[rows["quantity"].isin([RATE, IN_ROLE])].replace({"decoding": {FIRST: rest}})
        title = f"{self.runs[0].model['name']}, T = {self.args.temperature:g}"
        sampled: Drawing = Bars(
            title, "share of turns (0 to 1)", rows, names="decoding", by="quantity"
        )
        layers = all_datasets(found[found["layer"].notna()])
        layers = layers[layers["term"] == EVERY]
        if layers.empty:
            return {"sampled": sampled}
        words = title, "layer (0 = embeddings)", "probability by the lens", layers
        return {"sampled": sampled, "lens": Lines(*words, across="layer", by="quantity")}

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"first_tokens": rows.drop(columns="source"), "contexts": masses(rows)}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        whole = all_datasets(found[found["term"] == EVERY])
        by = CORRECTED if self.corrected_by else ""

        def said(quantity: str, decoding: str, digits: int | str = 2, by: str = by) -> str:
            return told(whole, quantity, digits, decoding=f"{decoding}{by}")

        rest = only(whole, REST)["value"].iloc[0]
        words = (
            f"The follow-up mass at T = {self.args.temperature:g} is {said(RATE, FIRST)} (first "
            f"tokens that weren't continued may add {rest:.2f}). The follow-up rate of greedy "
            f"turns is {said(RATE, GREEDY)}"
        )
        if all_sampled := said(RATE, WHOLE):
            words += f", that of turns with all tokens sampled {all_sampled}"
            held = said(HELD, FIRST, AS_SHARE)
            words += f"; the first token's share of the difference: {held}" if held else ""
        control = f"{self.gate.short}."
        if floor := said(AFTER_WRONG, FIRST, by=""):
            whose = " by the judge" if by else ""
            control = f"After a wrong conversation the follow-up mass{whose} is {floor}. {control}"
        return Conclusion(f"{words}.{self._by}", control)


main = Mass.main

if __name__ == "__main__":
    sys.exit(main())
