"""How likely is what the data say next, and how much of that does the response account for?

The model scores each written follow-up after its own response, after other responses to the same
query, after responses to other queries of about the same length, after none, and after the response
with its sentences in another order. The control is another conversation's follow-up, which
owes the response nothing. After its own response, the follow-up is also compared with rivals: the
query or the response repeated, and a closing.

Needs: runs of conversations with a later user turn; for siblings also a run with --response
generate on the same conversations. Cost: some seconds a context on a CPU (135M).

    ia-mech likelihood cache/RUN
    ia-mech likelihood cache/RUN cache/SIBLINGS
"""

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from experiments.arms import conversations_of
from experiments.experiment import Conclusion, Experiment, Model, Unit
from experiments.figures import Bars, Drawing, Lines
from experiments.tables import only, sentence_of, tables_of
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.estimates import ALL, Group, TidyEstimate, all_datasets, by_dataset
from ia_mech.results import Table
from ia_mech.run import Run
from ia_mech.run.queries import unfinished_text
from ia_mech.run.sources import sources_of
from ia_mech.stats import cluster_bootstrap

# Datasets whose follow-ups were written before there was a response, and how they are marked.
BLIND, UNSEEN = ("mt-bench",), " (response unseen)"
AGAINST = ("sibling responses", "other responses", "no response", "its sentences shuffled")
SIBLINGS, OTHERS, EMPTY, SHUFFLED = AGAINST
DONORS = 4  # other queries, after whose responses turns are scored
ORDERS = 4  # of its sentences, at most
ORDER_STREAM = -9  # of their draws; samples, swaps and perturbations have streams of their own
REFERENCE, CONTROL = "follow-up", "another's follow-up"
QUERY, RESPONSE, CLOSING = RIVALS = ("query", "response", "closing")
CLOSING_TEXT = "Thanks, that is all I needed."
LN2 = float(np.log(2.0))


# -- what runs hold --------------------------------------------------------------------------------


def with_run(run: Run, frame: pd.DataFrame) -> pd.DataFrame:
    """Rows of a run with ``run`` and a ``source`` that holds across runs."""
    return frame.assign(run=str(run.path), source=sources_of(frame))


def read_references(runs: Sequence[Run]) -> tuple[pd.DataFrame, pd.DataFrame]:
    """References after the responses that users saw, each once, as runs have scored them.

    Responses that the model wrote give siblings only: what users really said answered other
    responses than those.

    Returns:
        A row per context with its columns, ``run`` and ``source``; and with the same rows the
        log-probability of the turn, with its turn-end where the template has one, in nats: a column
        per temperature at which all runs scored, ascending.

    Raises:
        UserError: there is none.
    """
    frames, curves = [], []
    for run in runs:
        frame = with_run(run, run.contexts)
        given = frame["response_policy"] == "given"
        frame = frame[given & frame["reference_logprob"].notna()]
        if frame.empty:
            continue
        closed = frame["reference_logprob_with_end"].notna().all()
        name = "reference_logprob_tempered" + ("_with_end" if closed else "")
        frames.append(frame)
        curves.append(pd.DataFrame(frame[name].tolist(), columns=[*run.score_temperatures]))
    if not frames:
        raise UserError(
            "no context has what a user really said after the response that it holds",
            "give a run of conversations with a later user turn (--followup-column), sampled "
            "without --response generate",
        )
    references = pd.concat(frames, ignore_index=True)
    once = ~references.duplicated(["source", "text", "reference"])
    curve = pd.concat(curves, join="inner", ignore_index=True).sort_index(axis=1)
    return references[once].reset_index(drop=True), curve[once].reset_index(drop=True)


# -- measure ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FollowUp(Unit):
    """A context with its follow-up, and all that is scored for it.

    Attributes:
        row: of the references.
        contexts: what stands in the response's place (None: the response itself) and the token ids
            of the context with it.
        turns: the name of each turn, its token ids, and how many of these are without turn-end.
    """

    row: int
    contexts: tuple[tuple[str | None, tuple[int, ...]], ...]
    turns: tuple[tuple[str, tuple[int, ...], int], ...]


def contrasts_of(rows: pd.DataFrame) -> pd.DataFrame:
    """A turn's log-probability after its own response, against those after what replaces it.

    Args:
        rows: of :func:`measure`.

    Returns:
        One row per reference row, ``turn`` and ``against``: ``bits``, the log-probability less the
        mean of those after the others; ``placebo``, the same with the first of the others in the
        response's place (NaN if there is one); ``likeliest``, whether the turn is likeliest after
        its own response; ``chance``, of that if all responses were alike to it; and ``tokens``.
        The mean is of logarithms, so that a turn to which all responses are alike has 0 on average.
    """
    own = rows[rows["against"].isna()].set_index(["row", "turn"])
    found = []
    for (row, turn, against), other in rows.dropna(subset=["against"]).groupby(
        ["row", "turn", "against"], sort=False
    ):
        mine, values = own.loc[(row, turn)], other["logprob"].to_numpy()
        placebo = (values[0] - values[1:].mean()) / LN2 if len(values) > 1 else np.nan
        found.append(
            {"row": row, "turn": turn, "against": against, "tokens": mine["tokens"]}
            | {"bits": (mine["logprob"] - values.mean()) / LN2, "placebo": placebo}
            | {"likeliest": float(mine["logprob"] > values.max())}
            | {"chance": 1 / (len(values) + 1)}
        )
    columns = ["row", "turn", "against", "tokens", "bits", "placebo", "likeliest", "chance"]
    return pd.DataFrame(found, columns=columns)


# -- estimate --------------------------------------------------------------------------------------


def _references(group: Group, references: pd.DataFrame) -> Iterator[TidyEstimate]:
    tokens = references["reference_token_ids"].map(len).to_numpy()
    filled = np.where(tokens > 0, tokens, np.nan)  # an empty turn has no token to speak of
    yield group.mean("bits per byte", references["reference_bits_per_byte"])
    yield group.mean("log p per token", references["reference_logprob"] / filled)
    greedy = references["reference_greedy"].astype(float)
    yield group.mean("greedy writes it", greedy, proportion=True)
    until = group.mean("tokens until greedy leaves", references["reference_greedy_tokens"])
    yield replace(until, estimate=until.estimate.clip(0.0, np.inf))
    ranks = references["reference_greedy_left_rank"]
    if ranks.notna().any():
        yield group.median("median rank where greedy leaves", ranks)


def by_temperature(group: Group, curve: pd.DataFrame) -> Iterator[TidyEstimate]:
    """The mean log-probability of a whole turn by temperature, and where it is largest.

    Args:
        group: of the references.
        curve: a row per reference, a column per temperature, ascending: log-probabilities in nats.
    """
    for t in curve:
        yield group.mean("tempered log p", curve[t], temperature=t)
    temperatures, values = curve.columns.to_numpy(dtype=float), curve.to_numpy()

    def best(counts: np.ndarray) -> np.ndarray:
        return temperatures[np.argmax(counts @ values, axis=1)]

    (estimate,) = cluster_bootstrap(best, group.sources, **group.options)
    if estimate.sources > 1:
        # Between which points of the grid it may lie; where all resamples agree there is no spread.
        ends = np.nan_to_num([estimate.low, estimate.high], nan=estimate.value)
        at = np.searchsorted(temperatures, ends) + np.array([-1, 1])
        low, high = temperatures[at.clip(0, len(temperatures) - 1)]
        estimate = replace(estimate, low=float(low), high=float(high))
    yield group.row("best temperature", estimate, len(curve))


def _contrasts(group: Group, contrasts: pd.DataFrame, index: pd.Index) -> Iterator[TidyEstimate]:
    """Contrasts of references, of the control, and how much the former exceed the latter."""
    for against in AGAINST:
        mine = contrasts[contrasts["against"] == against]
        own, control = (
            mine[mine["turn"] == name].set_index("row").reindex(index)
            for name in (REFERENCE, CONTROL)
        )
        if own["bits"].isna().all():
            continue
        yield group.mean("contrast, bits", own["bits"], term=against)
        if control["bits"].notna().any():
            yield group.mean("control's contrast, bits", control["bits"], term=against)
            less = own["bits"] - control["bits"]
            yield group.mean("contrast less control's, bits", less, term=against)
        if own["placebo"].notna().any():
            yield group.mean("placebo's contrast, bits", own["placebo"], term=against)
        likeliest = own["likeliest"]
        yield group.mean("likeliest after its response", likeliest, term=against, proportion=True)
        yield group.mean("likeliest after its response, by chance", own["chance"], term=against)


def _rivals(group: Group, rows: pd.DataFrame, index: pd.Index) -> Iterator[TidyEstimate]:
    """How often the reference is likelier than a rival, as a whole turn and per token."""
    after = rows[rows["against"].isna()]
    own = after[after["turn"] == REFERENCE].set_index("row").reindex(index)
    for name in (CONTROL, *RIVALS):
        rival = after[after["turn"] == name].set_index("row").reindex(index)
        there = rival["whole"].notna().to_numpy()
        if not there.any():
            continue
        beats = (own["whole"] > rival["whole"]).astype(float).where(there)
        yield group.mean("follow-up beats", beats, term=name, proportion=True)
        each = [one["logprob"] / one["tokens"].where(one["tokens"] > 0) for one in (own, rival)]
        known = each[0].notna() & each[1].notna()
        beats = (each[0] > each[1]).astype(float).where(known)
        yield group.mean("follow-up beats per token", beats, term=name, proportion=True)


# -- the experiment --------------------------------------------------------------------------------


class Likelihood(Experiment):
    """See the module.

    Attributes:
        references, curve: of :func:`read_references`.
    """

    name = "likelihood"
    mixed = True

    def read(self) -> None:
        self.references, self.curve = read_references(self.runs)

    def units(self) -> list[FollowUp]:
        """One per reference; a note for each kind of context or turn that is left out somewhere."""
        from experiments.swaps import Donors

        own = conversations_of(self.references)
        donors = Donors(own, self.chat.tokenizer, self.args.seed)
        written: dict[str, dict[str, str | None]] = {}  # response → its thought
        for run in self.runs:
            frame = with_run(run, run.contexts)
            for source, messages in zip(frame["source"], frame["messages"], strict=True):
                said = messages[-1]
                siblings = written.setdefault(source, {})
                siblings.setdefault(said["content"], said.get("reasoning_content"))
        units: list[FollowUp] = []
        refused: dict[str, str] = {}
        for row, (one, source) in enumerate(zip(own, self.references["source"], strict=True)):
            control = donors.reference(row)  # whose response is none of those swapped in
            others = donors.responses(row, DONORS, [control] if control else [])
            turns = self._turns(one, (control and control.reference) or "", refused)
            longest = max(len(ids) for _, ids, _ in turns)
            contexts = self._contexts(one, written[source], others, longest, refused)
            scored = sum(len(ids) for _, ids, _ in turns) + (len(contexts) - 1) * 2 * longest
            tokens = scored + sum(len(ids) for _, ids in contexts)
            units.append(FollowUp(source, one.dataset, tokens, row, tuple(contexts), tuple(turns)))
        self.notes += [f"not scored everywhere: {kind}: {why}." for kind, why in refused.items()]
        return units

    def _turns(
        self, one: Conversation, control: str, refused: dict[str, str]
    ) -> list[tuple[str, tuple[int, ...], int]]:
        """The follow-up, another conversation's (if any), and the rivals, no two alike."""
        opened = self.chat.context(one.messages)
        texts = {REFERENCE: one.reference or "", CONTROL: control.strip()}
        texts |= {QUERY: one.query.strip(), RESPONSE: (one.response or "").strip()}
        turns: list[tuple[str, tuple[int, ...], int]] = []
        known = {""}
        for name, text in (texts | {CLOSING: CLOSING_TEXT}).items():
            if text in known:
                continue
            known.add(text)
            try:
                ids = self.chat.reference_ids(one.messages, opened, text)
            except UserError as error:
                refused[name] = error.problem
                continue
            turns.append((name, tuple(ids.whole), len(ids.words)))
        return turns

    def _contexts(
        self,
        one: Conversation,
        written: dict[str, str | None],
        swapped: list[str],
        longest: int,
        refused: dict[str, str],
    ) -> list[tuple[str | None, tuple[int, ...]]]:
        """The conversation with its response, and with all that may stand in its place."""
        from experiments.changes import shuffle_sentences
        from ia_mech.engine.sampling import stream_key

        own, limit = one.response or "", self.context_limit
        rng = np.random.default_rng(list(stream_key(self.args.seed, one.id, ORDER_STREAM)))
        orders = dict.fromkeys(shuffle_sentences(own, rng) for _ in range(ORDERS))
        places = [(SIBLINGS, text) for text in written if text != one.response]
        places += [(OTHERS, text) for text in swapped] + [(EMPTY, "")]
        places += [(SHUFFLED, text) for text in orders if text]  # one sentence has no order
        contexts: list[tuple[str | None, tuple[int, ...]]] = [
            (None, tuple(self.chat.context(one.messages).ids))
        ]
        for kind, text in places:
            try:
                thought = written[text] if kind == SIBLINGS else None
                ids = self.chat.context(one.with_response(text, thought).messages).ids
            except UserError as error:
                refused[kind] = error.problem
                continue
            if limit is not None and len(ids) + longest > limit:
                refused[kind] = f"the model's context of {limit} tokens is too short"
                continue
            contexts.append((kind, tuple(ids)))
        return contexts

    def measure(self, model: Model, unit: FollowUp) -> pd.DataFrame:
        """One row per turn and context: ``row``, ``turn``, ``tokens``, ``against`` (null after the
        response itself), and the log-probabilities ``logprob`` (without turn-end) and ``whole``, in
        nats at T = 1. Rivals are scored after the response itself alone."""
        from ia_mech.engine.score import Turn

        wanted = [
            (at, *turn)
            for at, (against, _) in enumerate(unit.contexts)
            for turn in unit.turns
            if against is None or turn[0] in (REFERENCE, CONTROL)
        ]
        contexts = [ids for _, ids in unit.contexts]
        scores = model.score(contexts, [Turn(at, ids) for at, _, ids, _ in wanted])
        rows = []
        for (at, name, _, tokens), one in zip(wanted, scores, strict=True):
            raw = one.logprobs_raw.astype(np.float64)
            rows.append(
                {"row": unit.row, "turn": name, "tokens": tokens, "against": unit.contexts[at][0]}
                | {"logprob": float(raw[:tokens].sum()), "whole": float(raw.sum())}
            )
        return pd.DataFrame(rows)

    def estimate(self, rows: pd.DataFrame) -> Iterator[TidyEstimate]:
        """Follow-ups that were written without the response are no part of all datasets
        together."""
        self.notes += notes_of(self.runs, rows)
        contrasts = contrasts_of(rows)
        blind = self.references["dataset"].isin(BLIND).to_numpy()
        for dataset, here in by_dataset(self.references):
            if dataset == ALL and not blind.all():
                here = here & ~blind
            frame = self.references[here]
            name = dataset + UNSEEN * (dataset in BLIND)
            group = Group(frame["source"].to_numpy(), self.options, {"dataset": name})
            yield from _references(group, frame)
            yield from by_temperature(group, self.curve[here])
            yield from _contrasts(group, contrasts, frame.index)
            yield from _rivals(group, rows, frame.index)

    def tables(self, estimates: pd.DataFrame) -> list[Table]:
        """What the response accounts for first, then the follow-ups themselves, then rivals."""
        plain = estimates[estimates["temperature"].isna()]
        bits = {
            "contrast, bits": ("follow-up", 2),
            "control's contrast, bits": (CONTROL, 2),
            "contrast less control's, bits": ("difference", 2),
            "placebo's contrast, bits": ("placebo", 2),
            "likeliest after its response": ("likeliest after its own", 2),
            "likeliest after its response, by chance": ("by chance", 2),
        }
        made = tables_of(
            f"bits in favour of the response that the user saw ({self.intervals})",
            plain,
            bits,
            index=("dataset", "term"),
            legend="Placebo: the contrast of a turn that followed another response, 0 on average.",
        )
        of_turns = {
            "bits per byte": ("bits / byte", 2),
            "log p per token": ("log p / token", 2),
            "greedy writes it": ("greedy writes it", 2),
            "tokens until greedy leaves": ("greedy tokens", 1),
            "median rank where greedy leaves": ("rank there", 0),
            "best temperature": ("best T", 2),
        }
        made += tables_of("the written follow-ups", plain, of_turns, index=("dataset",))
        rivals = {
            "follow-up beats": ("whole turn", 2),
            "follow-up beats per token": ("per token", 2),
        }
        title = "share of contexts where the follow-up is likelier than"
        return made + tables_of(title, plain, rivals, index=("dataset", "term"))

    def figures(self, estimates: pd.DataFrame) -> Mapping[str, Drawing]:
        model = self.runs[0].model["name"]
        curve = estimates[
            (estimates["quantity"] == "tempered log p") & estimates["temperature"].between(0.4, 2.0)
        ]
        made: dict[str, Drawing] = {
            "temperature_curve": Lines(
                f"{model} · written follow-ups",
                "temperature",
                "log p of the written follow-up, nats",
                curve,
                by="dataset",
            )
        }
        names = {"contrast, bits": REFERENCE, "control's contrast, bits": CONTROL}
        bits = all_datasets(estimates[estimates["quantity"].isin(list(names))])
        if len(bits):
            made["contrasts"] = Bars(
                f"{model} · bits in favour of the response",
                "bits in favour of the response that the user saw",
                bits.assign(turn=bits["quantity"].map(names)),
                by="turn",
            )
        return made

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": rows}

    def conclude(self, estimates: pd.DataFrame) -> Conclusion:
        bits = only(estimates, "contrast, bits")
        kinds = [kind for kind in AGAINST if kind in set(bits["term"])]
        seen = not self.references["dataset"].isin(BLIND).all()
        whose = "written follow-ups" if seen else "follow-ups that were written without it"
        nearest = kinds[0] if kinds else "others"
        sentence = self.tested(
            f"bits by which {whose} are likelier after the response in the data than after "
            f"{nearest}",
            only(bits, "contrast, bits", term=nearest),
        )
        order = self.tested(
            "than after the same sentences in another order",
            only(bits, "contrast, bits", term=SHUFFLED),
        )
        control = sentence_of(
            "the same of another conversation's follow-up",
            only(estimates, "control's contrast, bits", term=nearest),
        )
        return Conclusion(
            f"{sentence} {order}".strip()
            or "Nothing could stand in the place of the response that the user saw.",
            control
            or "No other conversation of a dataset has a follow-up that could be the control.",
        )


def notes_of(runs: Sequence[Run], rows: pd.DataFrame) -> list[str]:
    """What a reader has to know of the siblings."""
    if SIBLINGS not in set(rows["against"].dropna()):
        return [
            "No responses to the same queries were given: bits against other queries' responses "
            "count the topic, too. Add a run of --response generate on the same conversations."
        ]
    written = [one.contexts for one in runs if one.settings["response"] == "generate"]
    if not written:
        return []
    siblings = pd.concat(written)
    unfinished = unfinished_text(siblings) or "No response is unfinished"
    return [
        f"Siblings: {unfinished}, and all are the model's own: a follow-up that fits any good "
        "response gains against them, too."
    ]


main = Likelihood.main

if __name__ == "__main__":
    sys.exit(main())
