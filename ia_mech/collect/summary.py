"""What the main job prints: the plan of ``--dry-run`` and the tables of a finished run."""

import shlex
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.preflight import Plan, size_text
from ia_mech.display import console
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


def print_plan(config: SampleConfig, plan: Plan, out: Path) -> None:
    """The table of ``--dry-run``."""
    screen = console()
    for name, value in (
        ("model", config.model.name),
        ("conversations", f"{config.dataset}: {plan.contexts}"),
        ("responses to generate", str(plan.responses_to_generate)),
        ("user header", repr(plan.header_text)),
        ("positions kept", ", ".join(plan.positions)),
        ("context tokens", f"{plan.context_tokens} (longest {plan.longest_context})"),
        ("rows to decode", f"{plan.rows} x at most {config.grid.max_new_tokens} tokens"),
        (
            "to score turns",
            f"about {plan.scored_tokens} tokens, after {plan.contrast_contexts} more contexts of "
            f"{plan.contrast_tokens} tokens",
        ),
        ("bytes to be written", f"{size_text(plan.bytes)}, to {out}"),
        ("once for this model", f"{size_text(plan.lens_bytes)}, its final norm and unembedding"),
    ):
        screen.print(f"{name:<23}{escape(one_line(value))}", soft_wrap=True)


def print_run(run: Run) -> None:
    """What a finished run is shown as: tables, three user turns, and where to go from here."""
    screen = console(150)  # the tables' intervals belong on one line
    cut = int(run.contexts["response_cut_off"].sum())
    table = Table(title="user turns (95% intervals over sources)", title_justify="left")
    for name in ("T", "rows", "mean tokens", "ended by turn-end", "log p / token", "entropy"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in temperature_table(run):
        table.add_row(
            f"{row.temperature:g}" if row.temperature else "greedy",
            _counted(row.rows, row.cut_off),
            f"{row.tokens.value:.1f}",
            row.ended.text(),
            f"{row.logprob.value:.2f}",
            "–" if row.entropy is None else f"{row.entropy.value:.2f}",
        )
    screen.print(table)
    references = reference_table(run)
    if references:
        table = Table(title="the users' real follow-ups", title_justify="left")
        columns = "log p / token", "bits / byte", "contrast, bits", "greedy writes"
        for name in ("dataset", "turns", *columns):
            table.add_column(name, justify="left" if name == "dataset" else "right", no_wrap=True)
        for row in references:
            table.add_row(
                escape(one_line(row.dataset, 30)),
                _counted(row.references, row.cut_off),
                row.logprob.text(),
                row.bits_per_byte.text(),
                row.contrast.text(1),
                row.greedy.text(),
            )
        screen.print(table)
    screen.print(
        "log p: raw (T = 1), nats. entropy: of the first token at T, nats. contrast: bits by which "
        "a follow-up is likelier after its own response than after others'. greedy writes: share "
        "of follow-ups that greedy decoding writes whole.",
        soft_wrap=True,
    )
    if cut:
        screen.print(
            f"[bold]{cut} of {len(run.contexts)} responses were cut off[/] at "
            f"{run.config['max_response_tokens']} tokens: a cut-off response is a different "
            "stimulus (column response_cut_off; † counts what follows one).",
            soft_wrap=True,
        )
    turns = examples(run)
    heading = ("no user turn", "one user turn", "two user turns", "three user turns")[len(turns)]
    screen.print(f"\n[bold]{heading}[/] (evenly spaced, not chosen)")
    for context, turn in turns:
        temperature = f"T = {turn['temperature']:g}" if turn["temperature"] else "greedy"
        query = context["messages"][-2]["content"]
        screen.print(f"  {escape(one_line(context['context_id'], 40))} · {temperature}")
        response = context["messages"][-1]["content"]
        screen.print(f"    query:     {escape(one_line(query, 90))}", soft_wrap=True)
        flag = " † cut off" if context["response_cut_off"] else ""
        screen.print(f"    response:  {escape(one_line(response, 90))}{flag}", soft_wrap=True)
        screen.print(
            f"    [bold]user turn:[/] {escape(one_line(turn['text'], 160))}", soft_wrap=True
        )
    screen.print(f"\nrun: {escape(str(run.path))}", soft_wrap=True)
    code = (
        f"from ia_mech.run import Run; run = Run.open({str(run.path)!r}); "
        "print(run.generations[['context_id', 'temperature', 'text']]); "
        f"print(run.residuals({run.layers[-1] // 2}, {run.positions[-1]!r}).shape)"
    )
    quoted = shlex.quote(code) if set('"$`\\!') & set(code) else f'"{code}"'
    screen.print(f"read it: python -c {escape(quoted)}", soft_wrap=True)
    path = escape(shlex.quote(str(run.path)))
    screen.print(f"next: python -m ia_mech.judge run {path}", soft_wrap=True)


def _counted(count: int, cut_off: int) -> str:
    """How many there are, and how many of them follow a cut-off response."""
    return f"{count} († {cut_off})" if cut_off else str(count)
