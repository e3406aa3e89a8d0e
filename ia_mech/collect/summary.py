"""What the main job prints: the plan of ``--dry-run`` and the tables of a finished run."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pandas as pd
from rich.markup import escape
from rich.table import Table

from ia_mech.cli import one_line, quoted
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.preflight import Plan, size_text, too_few
from ia_mech.collect.shards import Shard
from ia_mech.display import console
from ia_mech.engine.plan import SLOW
from ia_mech.run import Run
from ia_mech.stats import cluster_mean


def temperature_table(run: Run) -> Table:
    """What was decoded at each temperature: a line each, with intervals over sources.

    ``entropy`` is that of the first token. † counts rows that follow a response that was cut off.
    """
    table = _table("user turns (95% intervals over sources)")
    for name in ("T", "rows", "mean tokens", "ended by turn-end", "log p / token", "entropy"):
        table.add_column(name, justify="right", no_wrap=True)
    contexts = run.contexts
    for temperature, rows in run.generations.groupby("temperature"):
        sources, entropy = rows["source_id"], "–"
        if temperature:
            at = run.config["grid"]["temperatures"].index(temperature)
            values = np.stack(contexts["first_token_entropy_tempered"].tolist())[:, at]
            entropy = f"{cluster_mean(values, contexts['source_id']).value:.2f}"
        ended = cluster_mean(rows["finish_reason"] == "turn_end", sources, proportion=True)
        table.add_row(
            f"{temperature:g}" if temperature else "greedy",
            _counted(rows),
            f"{cluster_mean(rows['tokens'], sources).value:.1f}",
            ended.text(),
            f"{cluster_mean(rows['logprob_raw'] / rows['tokens'], sources).value:.2f}",
            entropy,
        )
    return table


def reference_table(run: Run) -> Table | None:
    """How the model likes the users' real follow-ups, per dataset; None if the data has none.

    ``contrast`` is the mean response contrast (``ia_mech.likelihood``), ``greedy writes`` the share
    of follow-ups that greedy decoding writes whole, turn-end included.
    """
    scored = run.contexts[run.contexts["reference_logprob"].notna()]
    if scored.empty:
        return None
    bits = "reference_response_contrast_bits"
    contrasts = ["contrast, bits"] if scored[bits].notna().any() else []
    table = _table("the users' real follow-ups")
    columns = ["log p / token", "bits / byte", *contrasts, "greedy writes"]
    for name in ("dataset", "turns", *columns):
        table.add_column(name, justify="left" if name == "dataset" else "right", no_wrap=True)
    for dataset, rows in scored.groupby("dataset"):
        sources, tokens = rows["source_id"], rows["reference_token_ids"].map(len)
        greedy = rows["reference_greedy"].astype(float)
        shown = [
            cluster_mean(rows["reference_logprob"] / tokens, sources).text(),
            cluster_mean(rows["reference_bits_per_byte"], sources).text(),
            *(cluster_mean(rows[bits].astype(float), sources).text(1) for _ in contrasts),
            cluster_mean(greedy, sources, proportion=True).text(),
        ]
        table.add_row(escape(one_line(str(dataset), 30)), _counted(rows), *shown)
    return table


def several_responses(run: Run) -> str:
    """How much the responses to a query differ, where there are several; else nothing."""
    contexts = run.contexts
    if "response_index" not in contexts or contexts["response_index"].isna().all():
        return ""  # older runs have no such column
    several = contexts[contexts["response_index"].notna()]
    texts = several["messages"].map(lambda messages: messages[-1]["content"])
    of_query = texts.groupby([several["dataset"], several["source_id"]])
    each, distinct = of_query.size(), of_query.nunique()
    return (
        f"responses per query: {each.mean():.3g}, of which {distinct.mean():.3g} differ (means "
        f"over {len(each)} queries); queries with one text only: {int((distinct == 1).sum())}."
    )


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left")


def _counted(rows: pd.DataFrame) -> str:
    """How many there are, and how many of them follow a response that was cut off."""
    cut_off = int(rows["response_cut_off"].sum())
    return f"{len(rows)} († {cut_off})" if cut_off else str(len(rows))


def examples(run: Run, count: int = 3) -> Sequence[tuple[pd.Series, pd.Series]]:
    """(context, generation) pairs spread over contexts and temperatures, chosen without looking.

    The i-th example is sample 0 of the i-th of ``count`` evenly spaced contexts, at the i-th of as
    many evenly spaced temperatures.
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


def print_plan(config: SampleConfig, plan: Plan, out: Path, there: Run | None) -> None:
    """The table of ``--dry-run``; ``there`` is the run that the command would go on with."""
    screen = console()

    def work(cost: float) -> str:
        seconds = f"{cost / SLOW:.0f} s at an assumed {SLOW} tokens/s"
        return f"like {cost:.0f} decoded tokens ({seconds})"

    if there is None:
        found = "nothing"
    elif there.complete:
        found = "all of it: nothing would be computed again"
    else:
        found = ", ".join(f"{count} {kind}" for kind, count in there.kept.items())
    for name, value in (
        ("model", config.model.name),
        ("conversations", f"{config.dataset}: {plan.read}"),
        ("contexts", str(plan.contexts)),
        ("responses to generate", str(plan.responses_to_generate)),
        ("user header", repr(plan.header_text)),
        ("positions kept", ", ".join(plan.positions)),
        ("context tokens", f"{plan.context_tokens} (longest {plan.longest_context})"),
        ("rows to decode", f"{plan.rows} x at most {config.grid.max_new_tokens} tokens"),
        ("work, scores included", work(plan.cost)),
        ("a kill costs at most", f"{plan.unit_rows} rows, work {work(plan.unit_cost)}"),
        ("bytes to be written", f"{size_text(plan.bytes)}, to {out}"),
        ("of this already there", found),
        (
            "once for this model",
            f"{size_text(plan.lens_bytes)}, its final norm and unembedding, if not kept yet",
        ),
    ):
        screen.print(f"{name:<23}{escape(one_line(value))}", soft_wrap=True)
    if problem := too_few(config, plan.read):
        screen.print(escape(one_line(f"note: {problem}")), soft_wrap=True)


# What the names of the tables' columns mean, where they are shown.
LEGEND = {
    "log p / token": "log p: raw (T = 1), nats.",
    "entropy": "entropy: of the first token at T, nats.",
    "contrast, bits": "contrast: bits by which a follow-up is likelier after its own response than "
    "after others'.",
    "greedy writes": "greedy writes: share of follow-ups that greedy decoding writes whole.",
}


def print_shard(run: Run, shard: Shard, lacking: str, out: Path) -> None:
    """A shard that is done, as far as it was asked for; ``lacking`` names those that aren't."""
    screen, kept = console(), run.kept
    found = ", ".join(f"{count} {kind}" for kind, count in kept.items() if count) or "no contexts"
    screen.print(escape(one_line(f"shard {shard}: {found}, in {run.path}")), soft_wrap=True)
    if not run.complete:
        line = "next, when every shard has its responses: the same command with --phase turns"
    else:
        line = f"next: {lacking} of {out}"
    screen.print(escape(one_line(line)), soft_wrap=True)


def print_run(run: Run) -> None:
    """A finished run: tables, three user turns, and where to go from here."""
    screen = console(150)  # the tables' intervals belong on one line
    shown = [table for table in (temperature_table(run), reference_table(run)) if table is not None]
    for table in shown:
        screen.print(table)
    columns = {column.header for table in shown for column in table.columns}
    screen.print(" ".join(text for name, text in LEGEND.items() if name in columns), soft_wrap=True)
    if line := several_responses(run):
        screen.print(line, soft_wrap=True)
    cut = int(run.contexts["response_cut_off"].sum())
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
    word = quoted(code) if set('"$`\\!') & set(code) else f'"{code}"'
    screen.print(f"read it: python -c {escape(word)}", soft_wrap=True)
    several = several_responses(run)
    command = "experiments.reaction" if several else "ia_mech.judge run"
    screen.print(f"next: python -m {command} {escape(quoted(run.path))}", soft_wrap=True)
