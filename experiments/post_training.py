r"""Does training on user turns teach a model to react to the response, or only the form of it?

``export`` writes training sequences, ``sft`` and ``grpo`` train, ``compare`` reports what changed.
It takes a judged run of the model before training and one of it after, over the same contexts with
several responses per query. Two readers score the turns: the model that wrote them (I_K, the bits
that they tell about their response) and the model before training (evidence; one fixed reader).
Form alone raises a judge's rate, but not its excess over turns after another response to the same
query: that is the control. All numbers are of the same queries. What the turns of a model organism
tell about their response is computed and printed beside them.

Needs: pip install 'ia-mech[train]' for sft, grpo and --adapter; runs with --responses 4. Cost: to
compare, 15 s of one core per query with 3 responses (135M); to train, see docs/post-training.md.

    ia-mech post-training sft cache/RUN --organism 0.5 --out cache/half
    ia-mech sample --dataset cache/half/held-out.jsonl --limit all --out cache/before
    ia-mech sample --dataset cache/half/held-out.jsonl --limit all --adapter cache/half \
        --out cache/after        # ia-mech judge run cache/before, and cache/after
    ia-mech post-training compare cache/before cache/after
"""

import argparse
import json
import math
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import verdicts_of
from experiments.bits import SiblingTurns, score_turns, unit_of
from experiments.experiment import Conclusion, Experiment, Model, model_of, subject_of
from experiments.figures import Bars, Drawing
from experiments.tables import only, tables_of
from ia_mech.cli import (
    Parser,
    above_zero,
    add_threads,
    nonblank,
    path_of,
    run_command,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.data.conversations import Conversation
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
from ia_mech.results import Table
from ia_mech.run.queries import Query

if TYPE_CHECKING:  # these load torch
    from ia_mech.chat.format import ChatFormat
    from ia_mech.models.load import ModelSpec

CARD, SEQUENCES, HELD_OUT = "post_training.json", "sequences.parquet", "held-out.jsonl"
BEFORE, AFTER, CHANGE = "before", "after", "change"
SIDES = (BEFORE, AFTER)
FORM, OWN, OTHERS = "organism's form", "quotes its response", "quotes another response"
STOCK, ENDED = "stock trigrams", "ended by turn-end"
RATE, FLOOR, EXCESS = "follow-up rate", "floor", "excess"
OVER_SIBLING = "over another response"
INFORMATION, EVIDENCE = "I_K, bits", "evidence, bits"


# -- what is trained on, and training -------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The command line, but for ``compare``, which is an experiment like any other."""
    parser = Parser(prog="ia-mech post-training", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in (
        ("export", "write the tokenized training sequences, for any trainer"),
        ("sft", "train on user turns: written follow-ups, or a model organism's"),
        ("grpo", "train by reward: bits that a turn gives for its response"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what.capitalize()}.")
        _add_data(command, turns=name != "grpo")
        if name != "export":
            _add_training(command, rate={"sft": 5e-4, "grpo": 1e-4}[name])
    commands.choices["sft"].add_argument(
        "--epochs", type=above_zero, default=3.0, metavar="N", help="(default: 3)"
    )
    add = commands.choices["grpo"].add_argument
    add("--steps", type=whole_from(1), default=100, metavar="N", help="(default: 100)")
    add("--generations", type=whole_from(2), default=4, metavar="N", help="per prompt (default: 4)")
    add("--max-new-tokens", type=whole_from(1), default=40, metavar="N", help="(default: 40)")
    commands.add_parser("compare", help="before and after", add_help=False)
    return parser


def _add_data(parser: argparse.ArgumentParser, turns: bool) -> None:
    add = parser.add_argument
    add("data", metavar="RUN", help="a run's folder, or conversations as --dataset takes them")
    if turns:
        what = parser.add_mutually_exclusive_group(required=True)
        what.add_argument(
            "--organism",
            type=_share,
            metavar="SHARE",
            help="turns that quote a response: this share their own (0: form only, to 1)",
        )
        what.add_argument("--natural", action="store_true", help="the written follow-ups")
    of_run = "to train (default: the run's, or the embedded)"
    add("--model", type=nonblank, metavar="NAME", help=of_run)
    apart = "sources that aren't trained on, the same for every --seed (default: 20)"
    add("--held-out", type=whole_from(0), default=20, metavar="N", help=apart)
    longest = "of a sequence; longer ones are left out (default: 1024)"
    add("--max-tokens", type=whole_from(8), default=1024, metavar="N", help=longest)
    add("--seed", type=int, default=0, metavar="N", help="of organisms and training (default: 0)")
    add("--out", type=path_of, required=True, metavar="FOLDER", help="a new folder")


def _add_training(parser: argparse.ArgumentParser, rate: float) -> None:
    add = parser.add_argument
    add(
        "--learning-rate", type=above_zero, default=rate, metavar="X", help="(default: %(default)g)"
    )
    add("--batch", type=whole_from(1), default=8, metavar="N", help="sequences (default: 8)")
    add_threads(parser)


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to 1")
    return share


def export_or_train(args: argparse.Namespace) -> None:
    """What ``export``, ``sft`` and ``grpo`` do: the card is written last."""
    from experiments import organisms, training
    from ia_mech.collect.identity import probe_ids
    from ia_mech.engine.check import check_engine
    from ia_mech.models.load import load
    from ia_mech.run.layout import refuse_inside_run, refuse_unwritable

    if args.command != "export":
        training.require()
    refuse_inside_run(args.out / SEQUENCES)
    refuse_unwritable(args.out)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise UserError(f"{args.out} isn't empty", "name a new folder with --out")
    conversations, run = organisms.read_conversations(args.data)
    spec, chat = organisms.model_of(run, args.model)
    if args.command != "export" and spec.adapter is not None:
        raise UserError(
            f"{args.data} is of a model with an adapter, on which no second one can be trained",
            "give the base model's run",
        )
    kept, apart = organisms.split(conversations, args.held_out)
    card = {k: str(v) if isinstance(v, Path) else v for k, v in vars(args).items()}
    if args.command == "grpo":
        if args.batch % args.generations:
            raise UserError(
                f"--batch {args.batch} isn't a multiple of --generations {args.generations}",
                f"give --batch {args.generations} or {2 * args.generations}",
            )
        rows, contexts = training.prompts(chat, kept, args.max_tokens)
        summary = f"{len(rows)} prompts of {len(contexts)} queries"
    else:
        sequences, information = training_sequences(args, chat, kept)
        summary = f"{len(sequences)} user turns"
        if information is not None:
            card["information"] = information
            summary += f", {sequences['own'].mean():.2f} of which quote their own response; a turn "
            summary += f"tells {information_text(information)}"
    args.out.mkdir(parents=True, exist_ok=True)
    if args.command != "grpo":
        sequences.to_parquet(args.out / SEQUENCES, index=False)
    text = "".join(json.dumps(one.to_dict(), ensure_ascii=False) + "\n" for one in apart)
    (args.out / HELD_OUT).write_text(text, encoding="utf-8")
    print(f"{summary}; {len(apart)} contexts are held out")
    if args.command != "export":
        subject = load(spec)
        card["base"] = subject.describe()
        tuning = training.Tuning(args.learning_rate, args.batch, args.seed, args.out)
        with redirect_stdout(sys.stderr):  # what trainers print
            if args.command == "sft":
                training.sft(subject, chat, sequences, tuning, args.epochs)
            else:
                reader = load(spec)
                check_engine(reader.model, probe_ids(chat))
                training.grpo(
                    subject,
                    chat,
                    rows,
                    [training.reward(reader, contexts)],
                    tuning,
                    max_steps=args.steps,
                    num_generations=args.generations,
                    max_completion_length=args.max_new_tokens,
                )
    (args.out / CARD).write_text(json.dumps(card, indent=1) + "\n")
    print(f"wrote {args.out}", file=sys.stderr)


def training_sequences(
    args: argparse.Namespace, chat: "ChatFormat", kept: list[Conversation]
) -> tuple[pd.DataFrame, dict[str, float] | None]:
    """The sequences to train on; of an organism also how many bits its turns tell.

    Raises:
        UserError: there is no written follow-up; what :mod:`experiments.organisms` refuses.
    """
    from experiments import organisms

    information = None
    if args.natural:
        kept = [one for one in kept if one.reference]
        if not kept:
            raise UserError(
                f"{shell_word(args.data)} holds no user follow-up after a response",
                "give conversations that go on with a user turn, or --organism with a run of "
                "several responses per query",
            )
    else:
        kept = organisms.organism(kept, args.organism, args.seed)
        information = organisms.taught_information(kept, args.organism)
    sequences = organisms.sequences(chat, kept, args.max_tokens)
    if left_out := len(kept) - len(sequences):
        of = f"{left_out} of {len(kept)} sequences"
        print(f"note: {of} have more than {args.max_tokens} tokens: left out.", file=sys.stderr)
    return sequences, information


def information_text(information: Mapping[str, float]) -> str:
    """What a card says that an organism's turns tell about their response."""
    bits, most = information["bits"], information["most"]
    if bits == 0:
        return "0 bits about its response: form alone is taught"
    return f"{bits:.2f} bits about its response, of at most {most:.2f}"


def card_of(spec: "ModelSpec") -> dict[str, Any]:
    """What stands beside an adapter that was trained here; nothing of any other.

    Raises:
        UserError: the file is damaged.
    """
    from ia_mech.untrusted import parse_json

    file = Path(spec.adapter or spec.name) / CARD
    return parse_json(file.read_bytes(), str(file), "train again") if file.is_file() else {}


# -- before and after -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ReadTurns(SiblingTurns):
    """Turns after the responses to one query, read by the model before or after.

    The model before training reads the turns of both, the tuned one its own.

    Attributes:
        weights: the reader's.
        written: whose each turn is, and which response it followed.
    """

    weights: str
    written: tuple[tuple[str, int], ...]


class Compare(Experiment):
    """See the module."""

    name = "post_training"
    siblings = judged = several_models = True
    queries_used = 20
    columns: ClassVar = {
        **Experiment.columns,
        **{"outcome": "str", "decoy": "str", "events": "Int64", "level": "float64"},
    }

    @classmethod
    def build_parser(cls) -> argparse.ArgumentParser:
        parser = super().build_parser()
        parser.prog += " compare"
        return parser

    def read(self) -> None:
        """The two runs, over the same contexts.

        Raises:
            UserError: others than two, of the same weights, over other contexts, or without
                sampled turns.
        """
        from ia_mech.models.load import recall

        if len(self.runs) != 2:
            what = "one run" if len(self.runs) == 1 else f"{len(self.runs)} runs"
            raise UserError(
                f"{what} can't be compared", "give the base model's and the tuned one's"
            )
        before, after = self.runs
        if before.model["weights_hash"] == after.model["weights_hash"]:
            raise UserError("both runs are of the same weights", "sample one with --adapter")
        ids = [run.contexts[["context_id", "token_ids"]].map(list) for run in self.runs]
        if not ids[0].equals(ids[1]):
            raise UserError(
                f"{before.path} and {after.path} are over different contexts",
                "sample both on the same conversations, with their responses given",
            )
        at = before.settings["temperatures"]
        if not at:
            raise UserError("the runs have no sampled turns", "sample with --temperatures 1")
        self.temperature = 1.0 if 1.0 in at else max(at)
        card = card_of(recall(after.settings, after.model["weights_hash"]))
        self.information: dict[str, float] | None = card.get("information")
        self.sides: dict[str, list[Query]] = {
            side: Compare([run], self.args, self.folder).queries
            for side, run in zip(SIDES, self.runs, strict=True)
        }

    def units(self) -> list[ReadTurns]:
        made = []
        for pair in zip(*self.sides.values(), strict=True):
            for number, (reader, run) in enumerate(zip(SIDES, self.runs, strict=True)):
                read = [
                    (side, query.turns[query.turns["temperature"] == self.temperature])
                    for side, query in list(zip(SIDES, pair, strict=True))[number:]
                ]
                written = [(side, int(k)) for side, own in read for k in own["followed"]]
                ids = [tuple(one.tolist()) for _, own in read for one in own["token_ids"]]
                unit = unit_of(reader, pair[0], [(one, self.temperature) for one in ids])
                weights = run.model["weights_hash"]
                made.append(ReadTurns(**vars(unit), weights=weights, written=tuple(written)))
        return made

    @cached_property
    def tuned_model(self) -> Model:
        """The model after training."""
        return model_of(subject_of(self.runs[1]), self.runs[1])

    def model_for(self, unit: Any) -> Model:
        return self.model if unit.arm == BEFORE else self.tuned_model

    def measure(self, model: Model, unit: Any) -> pd.DataFrame:
        """A row per turn: ``side`` (whose it is), ``followed``, ``reader``, bits and evidence."""
        from ia_mech.likelihood.reaction import evidence, reaction_bits

        side, followed = map(list, zip(*unit.written, strict=True))
        scores = score_turns(model, unit)["own"]
        logprobs = [one.reshape(len(unit.contexts), -1).sum(1) for one in scores]
        rows = pd.DataFrame({"side": side, "followed": followed, "reader": unit.arm})
        rows[INFORMATION], rows[EVIDENCE] = reaction_bits(logprobs), evidence(logprobs, followed)
        return rows.assign(temperature=self.temperature)

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        most = float(np.log2(rows["followed"].max() + 1))
        texts = pd.concat([text_measures(q).assign(side=side) for side, q in self.sides.items()])
        shares = dict.fromkeys((FORM, OWN, OTHERS, STOCK, ENDED), (0.0, 1.0))
        own, fixed = rows[rows["side"] == rows["reader"]], rows[rows["reader"] == BEFORE]
        estimates = [
            *compare_sides(texts, shares, self.options),
            *self.judged_rates(),
            *compare_sides(own, {INFORMATION: (0.0, most)}, self.options),
            *compare_sides(fixed, {EVIDENCE: (-np.inf, most)}, self.options),
        ]
        return holm_corrected(estimates, lambda row: (row.quantity, row.names["dataset"] == ALL))

    def judged_rates(self) -> Iterator[TidyEstimate]:
        """Rates of both runs, what they exceed, and how they changed: of the queries used."""
        from ia_mech.judge.decoys import CONVERSATION, SIBLING
        from ia_mech.rates.compute import differences, floors, rates

        both = [verdicts_of([run], self.args.judge) for run in self.runs]
        self.notes += dict.fromkeys(note for one in both for note in one.notes)
        turns, decoys = (
            pd.concat([frame.assign(term=side) for side, frame in zip(SIDES, frames, strict=True)])
            for frames in ([one.turns for one in both], [one.decoys for one in both])
        )
        names = [name for query in self.sides[BEFORE] for name in query.contexts["context_id"]]
        turns = turns[turns["context_id"].isin(names)]
        used = [decoys[name].isin(turns["source"]) for name in ("source", "shown_source")]
        decoys = decoys[used[0] & used[1]]
        quantities = {(CONVERSATION, "floor"): FLOOR, (CONVERSATION, "excess"): EXCESS}
        quantities |= {(SIBLING, "excess"): OVER_SIBLING}
        by = ["term", "temperature"]
        for dataset, here in by_dataset(turns):
            about = {"level": self.args.level, "dataset": dataset}
            yield from rates(turns[here], by, quantity=RATE, **about)
            change = turns[here], by, {"term": BEFORE}
            for row in differences(*change, seed=self.args.seed, **about):
                yield replace(row, quantity=RATE, names=row.names | {"term": CHANGE})
            among = decoys if dataset == ALL else decoys[decoys["dataset"] == dataset]
            for kind in (CONVERSATION, SIBLING):
                for row in floors(among, kind, ["term"], **about):
                    if name := quantities.get((kind, row.quantity)):
                        yield replace(row, quantity=name)
            over = among[among["decoy"] == SIBLING].dropna(subset=["genuine", "own_genuine"])
            over = over.assign(over=(over["own_genuine"] - over["genuine"]).astype(float))
            a, b = (over[over["term"] == side] for side in SIDES)
            if len(a) and len(b):
                group = Group(np.array([]), self.options, {"dataset": dataset})
                pair = b["over"], b["source"], a["over"], a["source"]
                row = paired_row(group, OVER_SIBLING, *pair, term=CHANGE)
                yield replace(row, estimate=row.estimate.clip(-2.0, 2.0))

    # -- what is shown ----------------------------------------------------------------------------

    def tables(self, estimates: pd.DataFrame) -> list[Table]:
        index = ["dataset", "temperature", "term"]
        order = {BEFORE: 0, AFTER: 1, CHANGE: 2}
        estimates = estimates.sort_values(
            index, key=lambda column: column.replace(order), kind="stable"
        )

        def table(title: str, names: Sequence[str], legend: str) -> list[Table]:
            columns: dict[Any, tuple[str, int | str]] = {name: (name, 2) for name in names}
            return tables_of(title, estimates, columns, index=index, legend=legend)

        made = table(
            f"what turns tell about their response ({self.intervals})",
            [INFORMATION, EVIDENCE],
            legend="I_K: as the model reads that wrote them; evidence: as the model before "
            "training reads them, a lower bound. Changes are paired by source.",
        )
        made += table(
            "the judge's verdicts",
            [RATE, FLOOR, EXCESS, OVER_SIBLING],
            legend="floor, excess: of the same turns after other conversations, and the rate less "
            f"that; {OVER_SIBLING}: the rate less that after a sibling, which form doesn't raise; "
            "all: of all temperatures together.",
        )
        made += table(
            "user turns",
            [FORM, OWN, OTHERS, STOCK, ENDED],
            legend="shares of all turns; a quote is a phrase in one of the organism's frames; "
            "stock: trigrams of words that turns after other queries have, too.",
        )
        return made

    def figures(self, estimates: pd.DataFrame) -> Mapping[str, Drawing]:
        rows = estimates[
            estimates["quantity"].isin([INFORMATION, EVIDENCE]) & (estimates["term"] != CHANGE)
        ]
        title = "what turns tell about their response"
        return {"bits": Bars(title, "bits", all_datasets(rows), by="quantity")}

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": rows}

    def conclude(self, estimates: pd.DataFrame) -> Conclusion:
        changed = estimates[estimates["term"] == CHANGE]
        taught = ""
        if self.information is not None:
            taught = f"A turn that was trained on tells {information_text(self.information)}. "
        sentence = taught + self.tested(
            "bits by which a turn tells more about its response after training than before",
            only(changed, INFORMATION),
        )
        control = self.tested(
            "change of the judge's rate over that after another response to the same query, which "
            "form alone doesn't raise",
            only(changed, OVER_SIBLING),
        )
        without = "No turn was judged after another response to its query: nothing tells reaction "
        return Conclusion(sentence, control or f"{without}from form.")


def compare_sides(
    frame: pd.DataFrame,
    bounds: Mapping[str, tuple[float, float]],
    options: dict[str, Any],
) -> Iterator[TidyEstimate]:
    """Means before and after, and their difference paired by source, by dataset and temperature.

    Args:
        frame: a row per turn: ``side``, ``dataset``, ``source``, ``temperature``, and values.
        bounds: column of values → the least and the most that one can be.
        options: of intervals and tests.
    """
    for dataset, here in by_dataset(frame):
        for temperature, at in frame[here].groupby("temperature"):
            about = {"dataset": dataset, "temperature": float(temperature)}
            a, b = (at[at["side"] == side] for side in SIDES)
            for quantity, (least, most) in bounds.items():
                if a[quantity].isna().all() or b[quantity].isna().all():
                    continue
                rate = at[quantity].dropna().isin([0, 1]).all()
                for side, own in zip(SIDES, (a, b), strict=True):
                    group = Group(own["source"].to_numpy(), options, about)
                    row = group.mean(quantity, own[quantity], proportion=rate, term=side)
                    yield replace(row, estimate=row.estimate.clip(least, most))
                pair = b[quantity], b["source"], a[quantity], a["source"]
                row = paired_row(group, quantity, *pair, term=CHANGE)
                yield replace(row, estimate=row.estimate.clip(least - most, most - least))


def text_measures(queries: Sequence[Query]) -> pd.DataFrame:
    """A row per turn of a model: what is measured of its text."""
    from experiments.organisms import quote_of

    rows = []
    for query in queries:
        responses = query.responses
        for turn in query.turns.itertuples():
            quote, own = quote_of(turn.text), responses[turn.followed]
            others = [quote is not None and quote in one for one in responses if one != own]
            rows.append(
                {"dataset": query.dataset, "source": query.source, "text": turn.text}
                | {"temperature": turn.temperature, ENDED: float(turn.finish_reason == "turn_end")}
                | {FORM: float(quote is not None), OWN: float(quote is not None and quote in own)}
                | {OTHERS: float(np.mean(others)) if others else np.nan}
            )
    table = pd.DataFrame(rows)
    for _, at in table.groupby("temperature").groups.items():
        some = table.loc[at]
        table.loc[at, STOCK] = stock_phrases(some["text"].tolist(), some["source"].tolist())
    return table


def stock_phrases(turns: Sequence[str], sources: Sequence[str]) -> list[float]:
    """Of each turn, the share of its trigrams of words that turns after other queries have, too.

    It is high for generic questions, and rises as a model's turns lose their diversity.
    """
    trigrams = []
    for turn in turns:
        words = re.findall(r"\w+", turn.lower())
        trigrams.append(list(zip(words, words[1:], words[2:], strict=False)))
    where = defaultdict(set)
    for own, source in zip(trigrams, sources, strict=True):
        for one in own:
            where[one].add(source)
    return [sum(len(where[one]) > 1 for one in own) / max(len(own), 1) for own in trigrams]


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    words = sys.argv[1:] if argv is None else argv
    if words[:1] == ["compare"]:
        return Compare.main(words[1:])
    tolerant_streams()
    args = build_parser().parse_args(words)
    threads = getattr(args, "threads", None)  # export computes nothing
    return run_command(
        lambda: export_or_train(args), lambda: f"{args.out} isn't whole; remove it", threads
    )


if __name__ == "__main__":
    sys.exit(main())
