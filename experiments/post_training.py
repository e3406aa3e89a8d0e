r"""Does training on user turns teach a model to react to the response, or only a turn's form?

``export`` writes training sequences, ``sft`` and ``grpo`` train, ``compare`` reports what changed.
The loss is on the user turn, as it is tokenized in the dialogue. For GRPO (Shao et al. 2024, arXiv
2402.03300) a prompt is a context with its open user header, and a completion is the user turn.

``compare`` takes a judged run of the model before training and one of the trained model, over the
same contexts with several responses per query. One reader, the model before training, says how many
bits of evidence each turn gives for the response that it followed. The control is the follow-up
rate minus that after another response to the same query, which form alone doesn't raise.

Needs: pip install 'ia-mech[train]' for sft, grpo and --adapter; runs with --responses 4. Cost: to
compare, 10 s of one core per query with 3 responses (135M); to train, minutes to hours.

    ia-mech post-training sft cache/RUN --out cache/tuned
    ia-mech sample --dataset cache/tuned/held-out.jsonl --limit all --out cache/before
    ia-mech sample --dataset cache/tuned/held-out.jsonl --limit all --adapter cache/tuned \
        --out cache/after        # ia-mech judge run cache/before, and cache/after
    ia-mech post-training compare cache/before cache/after
"""

import argparse
import importlib.util
import json
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import replace
from functools import partial
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from experiments.arms import conversations_of
from experiments.experiment import Conclusion, flag
from experiments.judged import BOUNDS, Arms
from experiments.outcome import SiblingTurns, unit_of
from experiments.shown import Bars, Drawing, only, tables_of
from ia_mech.cli import (
    Parser,
    above_zero,
    add_threads,
    expanded,
    nonblank,
    path_of,
    run_command,
    shell_word,
    tolerant_streams,
    whole_from,
)
from ia_mech.data.conversations import Conversation, open_conversations
from ia_mech.errors import UserError
from ia_mech.estimates import TidyEstimate, all_datasets
from ia_mech.rates.load import open_runs
from ia_mech.results import Table
from ia_mech.run import Run, layout
from ia_mech.run.queries import subsample
from ia_mech.run.sources import source_key
from ia_mech.settings import Settings

if TYPE_CHECKING:  # these load torch
    from ia_mech.chat.format import ChatFormat
    from ia_mech.models.load import ModelSpec, Subject

CARD, SEQUENCES, HELD_OUT = "post_training.json", "sequences.parquet", "held-out.jsonl"
BEFORE, AFTER, CHANGE = "before", "after", "change"
SIDES = (BEFORE, AFTER)
EVIDENCE = "evidence, bits"
TOLD = "what turns tell about their response"
LOG = "log.jsonl"
# The rank of LoRA's matrices, which are in all linear layers but the unembedding (Hu et al. 2021,
# arXiv 2106.09685); alpha is twice the rank.
RANK = 16
WORST = -4.0  # bits: the lowest reward of a turn, since evidence has no lower bound
IGNORED = -100  # the label of ids that carry no loss, as transformers and trl have it


# -- what is trained on, and training -------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The command line, but for ``compare``, which is an experiment like any other."""
    parser = Parser(prog="ia-mech post-training", description=__doc__)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, what in (
        ("export", "write the tokenized training sequences, for any trainer"),
        ("sft", "train on real follow-ups"),
        ("grpo", "train by reward: the bits of evidence that a turn gives for its response"),
    ):
        command = commands.add_parser(name, help=what, description=f"{what.capitalize()}.")
        command.add_argument(
            "data", metavar="RUN", help="a run's folder, or conversations as --dataset takes them"
        )
        add, of_run = partial(flag, command), "to train (default: the run's, or the embedded one)"
        add("--model", nonblank, None, of_run, metavar="NAME")
        apart = "queries that aren't trained on, the same for every --seed"
        add("--held-out", whole_from(0), 20, apart, metavar="N")
        longest = "most tokens of a sequence; longer ones are left out"
        add("--max-tokens", whole_from(8), 1024, longest, metavar="N")
        add("--seed", int, 0, "of training", metavar="N")
        add("--out", path_of, None, "a new folder", metavar="FOLDER", required=True)
        if rate := {"sft": 5e-4, "grpo": 1e-4}.get(name):
            add("--learning-rate", above_zero, rate, "", metavar="X")
            add("--batch", whole_from(1), 8, "sequences", metavar="N")
            add_threads(command)
    flag(commands.choices["sft"], "--epochs", above_zero, 3.0, "", metavar="N")
    add = partial(flag, commands.choices["grpo"])
    add("--steps", whole_from(1), 100, "", metavar="N")
    add("--generations", whole_from(2), 4, "per prompt", metavar="N")
    add("--max-new-tokens", whole_from(1), 40, "", metavar="N")
    commands.add_parser("compare", help="what training changed", add_help=False)
    return parser


# -- what comes in --------------------------------------------------------------------------------


def read_conversations(data: str) -> tuple[list[Conversation], Run | None]:
    """Conversations with a response, from a run or a dataset as ``--dataset`` names it; the run."""
    if (expanded(data) / layout.RUN).is_file():
        (run,) = open_runs([data])
        indices = [None if pd.isna(k) else int(k) for k in run.contexts["response_index"]]
        several = zip(conversations_of(run.contexts), indices, strict=True)
        return [replace(one, response_index=k) for one, k in several], run
    found = [one for one in open_conversations(data) if one.response is not None]
    if not found:
        raise UserError(
            f"{shell_word(data)} holds no response",
            "sample it with --response generate --responses 4, and give that run",
        )
    return found, None


def model_of(run: Run | None, name: str | None) -> "tuple[ModelSpec, ChatFormat]":
    """The model to train (None: the run's, or the embedded one) and its chat format, with the run's
    chat settings."""
    from ia_mech.collect.plan import build_chat
    from ia_mech.models.load import ModelSpec, load_files, recall

    if name is not None:
        spec = ModelSpec(name=name)
    else:
        spec = ModelSpec() if run is None else recall(run.settings, run.model["weights_hash"])
    settings = Settings() if run is None else Settings.read(run.settings)
    return spec, build_chat(settings, load_files(spec))


def split(
    conversations: Sequence[Conversation], held_out: int
) -> tuple[list[Conversation], list[Conversation]]:
    """Conversations to train on, and those of ``held_out`` sources: the same for every seed."""
    sources = list(dict.fromkeys(map(_source, conversations)))
    if held_out >= len(sources):
        raise UserError(
            f"--held-out {held_out} leaves none of {len(sources)} queries to train on",
            "hold out fewer",
        )
    apart = set(subsample(sources, held_out, 0))
    kept = [one for one in conversations if _source(one) not in apart]
    return kept, [one for one in conversations if _source(one) in apart]


def _source(conversation: Conversation) -> str:
    return source_key(conversation.dataset, conversation.source_id)


# -- sequences ------------------------------------------------------------------------------------


def sequence(chat: "ChatFormat", conversation: Conversation) -> tuple[list[int], list[int]]:
    """Ids and labels that teach the conversation's user turn and its end.

    A template that closes user turns with text has no token for the end, and none is taught.
    """
    context = chat.context(conversation.messages)
    assert conversation.real_follow_up is not None
    turn = chat.turn_ids(conversation.messages, context, conversation.real_follow_up).whole
    return [*context.ids, *turn], [IGNORED] * len(context.ids) + turn


def sequences(
    chat: "ChatFormat", conversations: Sequence[Conversation], longest: int
) -> list[dict[str, Any]]:
    """A row per real follow-up: ``input_ids``, ``labels``, ``dataset``, ``source_id``, ``id`` and
    ``turn`` (the text that is learned).

    Sequences of more than ``longest`` tokens are left out: cutting them would cut off the turn.
    """
    rows: list[dict[str, Any]] = []
    for one in conversations:
        if one.real_follow_up:
            ids, labels = sequence(chat, one)
            named = {"dataset": one.dataset, "source_id": one.source_id, "id": one.id}
            rows.append({"input_ids": ids, "labels": labels, **named, "turn": one.real_follow_up})
    kept = [row for row in rows if len(row["input_ids"]) <= longest]
    if not kept:
        raise UserError(
            f"no conversation has a real follow-up and at most {longest} tokens",
            "give conversations that go on with a user turn, or raise --max-tokens",
        )
    if left_out := len(rows) - len(kept):
        of = f"{left_out} of {len(rows)} sequences"
        print(f"note: {of} have more than {longest} tokens: left out.", file=sys.stderr)
    return kept


# -- what is rewarded -----------------------------------------------------------------------------


def prompts(
    chat: "ChatFormat", conversations: Sequence[Conversation], longest: int
) -> tuple[list[dict[str, Any]], dict[str, list[list[int]]]]:
    """Prompts of queries with several responses in contexts of at most ``longest`` tokens, and the
    contexts' ids of each query.

    ``trl`` tokenizes prompts itself. So a prompt is a text that the tokenizer turns into exactly
    the ids of its context.
    """
    rows, contexts = [], {}
    for source, responses in distinct_responses(conversations).items():
        made = [chat.context(one.messages) for one in responses]
        fitting = [one for one in made if len(one.ids) <= longest]
        if len(fitting) > 1:
            contexts[source] = [one.ids for one in fitting]
            for followed, one in enumerate(fitting):
                prompt = _prompt(chat, one.text, one.ids)
                rows.append({"prompt": prompt, "source": source, "followed": followed})
    if not rows:
        raise UserError(
            f"no query has two different responses in conversations of at most {longest} tokens",
            "give a run that was sampled with --response generate --responses 4, or raise "
            "--max-tokens",
        )
    return rows, contexts


def distinct_responses(conversations: Iterable[Conversation]) -> dict[str, list[Conversation]]:
    """By query, conversations whose responses differ and have words; queries with one are left
    out."""
    queries: dict[str, dict[str, Conversation]] = defaultdict(dict)
    for one in conversations:
        if one.response is not None and re.search(r"\w", one.response):
            queries[_source(one)].setdefault(one.response, one)
    return {source: list(found.values()) for source, found in queries.items() if len(found) > 1}


def _prompt(chat: "ChatFormat", text: str, ids: list[int]) -> str:
    """A context's text for the tokenizer, without what the tokenizer puts in front by itself."""
    added = chat.template.decode(chat.tokenizer("")["input_ids"])
    for one in (text, text.removeprefix(added)):
        if chat.tokenizer(one)["input_ids"] == ids:
            return one
    raise UserError(
        f"the tokenizer gives the text of a context, {text[:40]!r} …, other ids than its dialogue",
        "train with sft, which takes token ids",
    )


def reward(
    reader: "Subject", contexts: Mapping[str, list[list[int]]]
) -> Callable[..., list[float]]:
    """A reward that ``trl`` calls with the columns of a batch: the bits of evidence that a turn
    gives at T = 1 for its response among the query's, but never less than :data:`WORST`. The
    reader, the model before training, doesn't change with the trained one.
    """
    from ia_mech.likelihood.reaction import evidence
    from ia_mech.likelihood.scorer import after_each, score_turns

    def bits(completion_ids: list[list[int]], source: list[str], followed: list[int], **rest):
        found: list[float] = []
        batch = zip(source, completion_ids, followed, strict=True)
        for name, rows in groupby(batch, itemgetter(0)):
            _, turns, own = zip(*rows, strict=True)
            scores = after_each(partial(score_turns, reader.model), contexts[name], turns)
            whole = [[one.logprobs_raw.sum(dtype=np.float64) for one in each] for each in scores]
            found += evidence(whole, own).clip(WORST).tolist()
        return found

    return bits


# -- training -------------------------------------------------------------------------------------


def train(
    args: argparse.Namespace,
    spec: "ModelSpec",
    chat: "ChatFormat",
    data: list[dict[str, Any]],
    contexts: Mapping[str, list[list[int]]],
) -> dict[str, Any]:
    """Train an adapter on :func:`sequences`, or by :func:`reward` on :func:`prompts` and their
    contexts. Write it, so that ``--adapter`` takes it, and a log of the steps; nothing is pickled.
    Returns what the base model was.
    """
    import torch
    from datasets import Dataset
    from peft import LoraConfig
    from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

    from ia_mech.collect.plan import probe_ids
    from ia_mech.engine.check import check_engine
    from ia_mech.models.load import load

    subject, cuda = load(spec), torch.cuda.is_available()
    base, place = subject.describe(), expanded(spec.name)
    how = {
        "output_dir": str(args.out),
        "learning_rate": args.learning_rate,  # for AdamW, falling linearly to 0
        "per_device_train_batch_size": args.batch,
        "seed": args.seed,
        "use_cpu": not cuda,
        "bf16": cuda and torch.cuda.is_bf16_supported(),
        "gradient_checkpointing": cuda,
        "dataloader_pin_memory": cuda,
        "logging_steps": 1,
        "save_strategy": "no",
    }
    lora = {"r": RANK, "lora_alpha": 2 * RANK, "target_modules": "all-linear"}
    what: dict[str, Any] = {
        "model": subject.model,
        "processing_class": subject.tokenizer,
        "peft_config": LoraConfig(**lora, task_type="CAUSAL_LM"),
        "train_dataset": Dataset.from_list(data),
    }
    trainer: Any
    if contexts:
        reader = load(spec)
        check_engine(reader.model, probe_ids(chat))
        subject.model.generation_config.eos_token_id = chat.stop_ids  # where trl ends completions
        how |= {"max_steps": args.steps, "num_generations": args.generations, "temperature": 1.0}
        config = GRPOConfig(**how, max_completion_length=args.max_new_tokens)
        trainer = GRPOTrainer(args=config, reward_funcs=[reward(reader, contexts)], **what)
    else:
        how |= {"max_length": None, "train_sampling_strategy": "group_by_length"}
        trainer = SFTTrainer(args=SFTConfig(**how, num_train_epochs=args.epochs), **what)
    trainer.train()
    named = str(place.resolve()) if place.exists() else spec.name
    trainer.model.peft_config["default"].base_model_name_or_path = named
    trainer.model.save_pretrained(args.out)
    steps = [row for row in trainer.state.log_history if "loss" in row]
    (args.out / LOG).write_text("".join(json.dumps(row) + "\n" for row in steps))
    return base


def export_or_train(args: argparse.Namespace) -> None:
    """Run ``export``, ``sft`` or ``grpo``. The card is written last."""
    trains, rewards = args.command != "export", args.command == "grpo"
    if trains and any(importlib.util.find_spec(name) is None for name in ("trl", "peft")):
        raise UserError("training needs trl and peft", "install them: pip install 'ia-mech[train]'")
    if rewards and args.batch % args.generations:
        raise UserError(
            f"--batch {args.batch} isn't a multiple of --generations {args.generations}",
            f"give --batch {args.generations} or {2 * args.generations}",
        )
    layout.refuse_unwritable(args.out)
    if args.out.is_dir() and any(args.out.iterdir()):
        raise UserError(f"{args.out} isn't empty", "name a new folder with --out")
    conversations, run = read_conversations(args.data)
    spec, chat = model_of(run, args.model)
    if trains and spec.adapter is not None:
        raise UserError(
            f"{args.data} is of a model with an adapter, on which no second one can be trained",
            "give the base model's run",
        )
    kept, apart = split(conversations, args.held_out)
    contexts: dict[str, list[list[int]]] = {}
    if rewards:
        data, contexts = prompts(chat, kept, args.max_tokens)
        summary = f"{len(data)} prompts of {len(contexts)} queries"
    else:
        data = sequences(chat, kept, args.max_tokens)
        summary = f"{len(data)} user turns"
    args.out.mkdir(parents=True, exist_ok=True)
    if not rewards:
        pd.DataFrame(data).to_parquet(args.out / SEQUENCES, index=False)
    text = "".join(json.dumps(one.to_dict(), ensure_ascii=False) + "\n" for one in apart)
    (args.out / HELD_OUT).write_text(text, encoding="utf-8")
    print(f"{summary}; {len(apart)} conversations are held out")
    card = vars(args)
    if trains:
        with redirect_stdout(sys.stderr):  # trainers print to stdout
            card = card | {"base": train(args, spec, chat, data, contexts)}
    (args.out / CARD).write_text(json.dumps(card, indent=1, default=str) + "\n")
    print(f"wrote {args.out}", file=sys.stderr)


# -- before and after -----------------------------------------------------------------------------


class Compare(Arms):
    name = "post_training"
    siblings = several_models = True
    queries_used = 20
    less: ClassVar = {CHANGE: {"term": BEFORE}}
    title = "the judge's labels"
    legend = "Form alone doesn't raise the rate beyond siblings."

    @classmethod
    def build_parser(cls) -> argparse.ArgumentParser:
        parser = super().build_parser()
        parser.prog += " compare"
        return parser

    def read(self) -> None:
        """The two runs, over the same contexts."""
        if len(self.runs) != 2:
            raise UserError("compare takes two runs", "give the base model's and the tuned one's")
        before, after = self.runs
        if before.model["weights_hash"] == after.model["weights_hash"]:
            raise UserError("both runs are of the same weights", "sample one with --adapter")
        ids = [run.contexts[["context_id", "token_ids"]].map(list) for run in self.runs]
        if not ids[0].equals(ids[1]):
            raise UserError(
                f"{before.path} and {after.path} are over different conversations",
                "sample both on the same conversations, with their responses given",
            )
        at = before.settings["temperatures"]
        if not at:
            raise UserError("the runs have no sampled turns", "sample with --temperatures 1")
        temperature = 1.0 if 1.0 in at else max(at)
        self.queries, tuned = (Compare([run], self.args, self.folder).queries for run in self.runs)
        self.turns: list[pd.DataFrame] = []  # of both models, by query
        for pair in zip(self.queries, tuned, strict=True):
            sides = [one.turns.assign(term=side) for side, one in zip(SIDES, pair, strict=True)]
            turns = pd.concat(sides)
            self.turns.append(turns[turns["temperature"] == temperature])

    def units(self) -> list[SiblingTurns]:
        each = zip(self.queries, self.turns, strict=True)
        return [unit_of(BEFORE, query, turns) for query, turns in each]

    def compared(self) -> list[tuple[dict[str, Any], list[Run]]]:
        return [({"term": side}, [run]) for side, run in zip(SIDES, self.runs, strict=True)]

    def rows(self) -> pd.DataFrame:
        """A row per turn: ``term`` (before or after), ``followed``, evidence."""
        from ia_mech.likelihood.reaction import evidence

        whole = self.measure_units(self.units())["whole"]
        names = ["term", "followed", "temperature", "source", "dataset"]
        rows = pd.concat(self.turns, ignore_index=True)[names]
        own = zip(whole, rows["followed"], strict=True)
        return rows.assign(**{EVIDENCE: [evidence([each], [k])[0] for each, k in own]})

    def estimate(self, rows: pd.DataFrame) -> list[TidyEstimate]:
        bounds = BOUNDS | {EVIDENCE: (-np.inf, float(np.log2(rows["followed"].max() + 1)))}
        return self.compare(pd.concat([rows, super().rows()], ignore_index=True), bounds)

    # -- what is shown ----------------------------------------------------------------------------

    def tables(self, found: pd.DataFrame) -> list[Table]:
        told = tables_of(
            f"{TOLD} ({self.intervals})",
            found,
            self.columns_of(EVIDENCE, EVIDENCE),
            index=("dataset", *self.by),
            legend="By the likelihoods of the model before training. Changes are paired by query.",
        )
        return told + super().tables(found)

    def figures(self, found: pd.DataFrame) -> Mapping[str, Drawing]:
        return {"bits": Bars(TOLD, "bits", all_datasets(only(found, EVIDENCE)))}

    def data(self, rows: pd.DataFrame) -> dict[str, pd.DataFrame]:
        return {"turns": rows}

    def conclude(self, found: pd.DataFrame) -> Conclusion:
        return Conclusion(
            self.tested(
                "bits by which a turn tells more about its response after training than before",
                only(found, f"{EVIDENCE}, {CHANGE}"),
            ),
            self.tested(
                "change of the follow-up rate minus the rate after another response to the "
                "same query, which form alone doesn't raise",
                only(found, self.change),
                most=1,
            ),
        )


def main(argv: list[str] | None = None) -> int:
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
