"""What the main job prints: the plan of ``--dry-run``, and a finished run."""

import json
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line, program, shell_word
from ia_mech.collect.cost import plan_lines, random_blocks_text
from ia_mech.collect.plan import Plan
from ia_mech.display import console
from ia_mech.run import Run, layout
from ia_mech.run.queries import conversations_text, exchange, unfinished_text
from ia_mech.run.sources import sources_of
from ia_mech.settings import Shard
from ia_mech.stats import LEAST_SHOWN, cluster_mean

LISTED = 10  # skipped rows that are named


def temperature_table(run: Run) -> Table:
    """What was decoded at each temperature, and with so many sampled tokens: a line each, with
    intervals over sources.

    ``entropy`` is that of the first token. † counts turns that follow an unfinished response.
    """
    queries = sources_of(run.contexts).nunique()
    shown = " (95% intervals over queries)" if queries >= LEAST_SHOWN else ""
    table = _table(f"user turns{shown}")
    for name in ("T", "turns", "mean tokens", "ended by turn-end", "log p / token", "entropy"):
        table.add_column(name, justify="right", no_wrap=True)
    contexts = run.contexts
    for (temperature, drawn), rows in run.generations.groupby(["temperature", "sampled_tokens"]):
        sources, entropy = rows["source_id"], "–"
        if temperature:
            at = run.settings["temperatures"].index(temperature)
            values = np.stack(contexts["first_token_entropy_tempered"].tolist())[:, at]
            entropy = f"{cluster_mean(values, contexts['source_id']).value:.2f}"
        at_end = rows["finish_reason"] == "turn_end"
        ended = cluster_mean(at_end, sources, proportion=True)
        table.add_row(
            run.decoding(temperature, drawn).removeprefix("T = "),
            _count_text(rows),
            f"{cluster_mean(rows['tokens'], sources).value:.1f}",
            ended.text(counts=(int(at_end.sum()), len(at_end))),
            f"{cluster_mean(rows['logprob_raw'] / rows['tokens'], sources).value:.2f}",
            entropy,
        )
    return table


def real_follow_up_table(run: Run) -> Table:
    """How the model likes the real follow-ups, per dataset.

    ``greedy writes`` is the share of follow-ups that greedy decoding writes whole, turn-end
    included.
    """
    scored = run.contexts[run.contexts["real_follow_up_logprob"].notna()]
    generated = (scored["response_policy"] == "generated").any()
    table = _table(
        "the real follow-ups"
        + (", after responses that the model wrote instead" if generated else "")
    )
    columns = ["log p / token", "bits / byte", "greedy writes"]
    for name in ("dataset", "turns", *columns):
        table.add_column(name, justify="left" if name == "dataset" else "right", no_wrap=True)
    for dataset, rows in scored.groupby("dataset"):
        sources, tokens = rows["source_id"], rows["real_follow_up_token_ids"].map(len)
        greedy = rows["real_follow_up_greedy"].astype(float)
        shown = [
            cluster_mean(rows["real_follow_up_logprob"] / tokens, sources).text(),
            cluster_mean(rows["real_follow_up_bits_per_byte"], sources).text(),
            cluster_mean(greedy, sources, proportion=True).text(
                counts=(int(greedy.sum()), len(greedy))
            ),
        ]
        table.add_row(escape(one_line(str(dataset), 30)), _count_text(rows), *shown)
    return table


def alike_text(run: Run) -> str:
    """How many queries have responses of the same text; empty if none has."""
    texts = run.contexts["messages"].map(lambda messages: messages[-1]["content"])
    of_query = texts.groupby([run.contexts["dataset"], run.contexts["source_id"]])
    alike = int((of_query.nunique() < of_query.size()).sum())
    return f"{alike} of {len(of_query)} queries have responses that are alike" if alike else ""


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")


def _count_text(rows: pd.DataFrame) -> str:
    """How many there are, and how many of them follow an unfinished response."""
    unfinished = int(rows["response_unfinished"].sum())
    return f"{len(rows)} († {unfinished})" if unfinished else str(len(rows))


def print_plan(plan: Plan, shard: Shard) -> None:
    """What ``--dry-run`` says."""
    for name, value in plan_lines(plan, shard).items():
        _print_line(f"{name:<23}{value}")
    for note in plan.data.notes:
        _print_line(f"note: {note}")
    _print_skipped(plan.skipped)


def _print_skipped(rows: Sequence[str]) -> None:
    """The rows of the data that ``--skip-unusable`` left out."""
    more = [f"and {len(rows) - LISTED} more"] if len(rows) > LISTED else []
    for line in [*rows[:LISTED], *more]:
        _print_line(f"note: skipped, {line}")


def _print_line(line: str) -> None:
    console().print(one_line(line), markup=False, soft_wrap=True)


def print_shard(run: Run, shard: Shard) -> None:
    """A shard that is done, of a run of which other parts are lacking."""
    found = ", ".join(f"{count} {kind}" for kind, count in run.counts.items())
    _print_line(
        f"shard {shard[0]}/{shard[1]} is done; with the other shards {run.path} holds {found}"
    )
    for kind, count in run.record["parts"].items():
        there = {part["name"] for part in run.parts(kind)}
        if lacking := [name for name in layout.part_names(count) if name not in there]:
            shown = ", ".join([*lacking[:LISTED], *["…"] * (len(lacking) > LISTED)])
            _print_line(f"parts of {kind} that are lacking: {len(lacking)} of {count} ({shown})")
    _print_line("next: the same command with another --shard, or with none for all that is lacking")


def print_run(run: Run, full: bool = False) -> None:
    """A finished run: what it is, three user turns, its table (all if ``full``), and what next."""
    screen = console(150)  # the tables' intervals belong on one line
    _print_line(what_was_written(run))
    _print_line(_what_was_kept(run))
    screen.print()
    _print_examples(run)
    screen.print()
    screen.print(temperature_table(run))
    _print_line(
        "ended by turn-end: the share of turns that the model ended, within "
        f"{run.settings['max_new_tokens']} tokens. log p / token: at T = 1, in nats, mean over "
        "turns. entropy: of the first token at T, in nats."
    )
    if run.contexts["real_follow_up_logprob"].notna().any():
        if full:
            screen.print(real_follow_up_table(run))
            _print_line(
                "greedy writes: share of real follow-ups that greedy decoding writes completely."
            )
        else:
            _print_line("--full: 1 more table")
    for line in _notes(run):
        _print_line(line)
    _print_skipped(run.record.get("skipped", []))
    screen.print()
    _print_line(f"run: {run.path}")
    path = json.dumps(str(run.path), ensure_ascii=False)
    code = f"from ia_mech import Run; run = Run.open({path}); "
    code += "print(run.generations, run.residuals().shape)"
    _print_line(f"from Python: {program('python')} -c {shell_word(code)}")
    _print_line(f"next: {program()} judge run {shell_word(run.path)}")


def what_was_written(run: Run) -> str:
    """How many turns, in a sentence."""
    turns, contexts = run.generations, run.contexts
    decodings = turns.groupby(["temperature", "sampled_tokens"]).groups
    sampled = [f"{run.settings['samples']} at {run.decoding(*of)}" for of in decodings if of[1]]
    if run.settings["first_tokens"]:
        sampled = [f"one from {run.decoding(*of)}" for of in decodings if of[1]]
    each = f"{', '.join(['1 greedy', *sampled[:-1]])}{' and ' + sampled[-1] if sampled else ''}"
    return (
        f"{run.model['name']} wrote {len(turns)} user turns in "
        f"{conversations_text(len(contexts), sources_of(contexts).nunique())}. In each: {each}."
    )


def _what_was_kept(run: Run) -> str:
    """Of the model's states, in a line."""
    logits = (
        ", and the logits at the header's end" if run.settings["header_logits"] == "full" else ""
    )
    return (
        f"kept: the residual stream of {run.model['layers']} layers and the embeddings at "
        f"{', '.join(run.positions)}{logits}"
    )


def _print_examples(run: Run, most: int = 3) -> None:
    """User turns chosen without looking: the i-th is the first turn of the i-th of some evenly
    spaced contexts, decoded in the i-th of as many evenly spaced ways."""
    decodings = list(run.generations.groupby(["temperature", "sampled_tokens"]).groups)
    count = min(most, len(run.contexts))
    _print_line(f"{count} user turns (evenly spaced, not chosen)")
    for i in range(count):
        context = run.contexts.iloc[i * len(run.contexts) // count]
        temperature, drawn = decodings[i * len(decodings) // count]
        turns = run.generations[run.generations["order"] == context["order"]]
        query, response = exchange(context["messages"])
        flag = " † unfinished" if context["response_unfinished"] else ""
        turns = turns[(turns["temperature"] == temperature) & (turns["sampled_tokens"] == drawn)]
        text, how = turns["text"].iloc[0], run.decoding(temperature, drawn)
        _print_line(f"  {one_line(context['context_id'], 40)} · {how}")
        _print_line(f"    query:     {one_line(query, 90)}")
        _print_line(f"    response:  {one_line(response, 90)}{flag}")
        _print_line(f"    user turn: {one_line(text, 160)}")


def _notes(run: Run) -> Iterator[str]:
    """What a reader has to know before believing the numbers."""
    if line := alike_text(run):
        yield f"note: {line}"
    if words := random_blocks_text(run.settings["random_blocks"]):
        yield f"note: {run.model['name']}{words}: a control, not a model that anyone trained"
    if opening := run.settings["opening"]:
        yield f"note: every turn continues {opening!r}; these words are no part of the turn"
    if run.settings["ignore_check"]:
        found = run.ignored_check or "no difference"
        yield f"note: --ignore-check was given; the engine's start-up check found {found}"
    written = int((run.contexts["response_policy"] == "generated").sum())
    if written and run.settings["response"] != "generate":
        of = f"{written} of {len(run.contexts)} responses"
        yield f"note: the data lacks {of}; the model wrote them"
    if line := unfinished_text(run.contexts):
        yield (
            f"{line}; the limit was {run.settings['max_response_tokens']} tokens. Turns after an "
            "unfinished response may only continue it (column response_unfinished; † counts them)."
        )
