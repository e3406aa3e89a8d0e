"""What the main job shows at a terminal: progress, the plan, and the tables of a run."""

import shlex
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from tqdm import tqdm

from ia_mech.cli import one_line
from ia_mech.config import SampleConfig
from ia_mech.intake import Plan, size_text
from ia_mech.run import Run
from ia_mech.summary import examples, reference_table, temperature_table


class Bar:
    """Progress on the terminal: rows done, tokens per second, time left.

    Args:
        heading: a line to show before anything else.

    Attributes:
        started: whether there was anything to do.
    """

    def __init__(self, heading: str) -> None:
        self.started = False
        self._heading: str | None = heading
        self._bar: tqdm | None = None

    def start(self, phase: str, rows: int, done: int) -> None:
        self.stop()
        self._introduce()
        self.started = True
        # Redrawn twice a second at a terminal; a log file gets a line every ten seconds.
        self._bar = tqdm(
            total=rows,
            initial=done,
            desc=phase,
            unit="row",
            mininterval=0.5 if sys.stderr.isatty() else 10,
            bar_format="{desc}: {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} rows "
            "[{elapsed}, {remaining} left{postfix}]",
        )
        self._begun, self._tokens = time.monotonic(), 0

    def advance(self, tokens: int, rows: int) -> None:
        self._tokens += tokens
        rate = self._tokens / max(time.monotonic() - self._begun, 1e-9)
        self._bar.set_postfix_str(f"{rate:.0f} tokens/s", refresh=False)
        self._bar.update(rows)
        if time.time() - self._bar.last_print_t >= self._bar.mininterval:
            self._bar.refresh()  # tokens without a finished row show, too
            self._bar.last_print_t = time.time()

    def say(self, line: str) -> None:
        self._introduce()
        tqdm.write(line, file=sys.stderr)

    def _introduce(self) -> None:
        if self._heading is not None:
            tqdm.write(self._heading, file=sys.stderr)
        self._heading = None

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None


def print_plan(config: SampleConfig, plan: Plan, out: Path) -> None:
    """The table of ``--dry-run``."""
    console = Console(highlight=False, emoji=False)
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
        console.print(f"{name:<23}{escape(one_line(value))}", soft_wrap=True)


def print_run(run: Run) -> None:
    """What a finished run is shown as: tables, three user turns, and where to go from here."""
    console = Console(highlight=False, emoji=False)  # ":cat:" in a text is not an emoji
    console.width = max(console.width, 150)  # the tables' intervals belong on one line
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
    console.print(table)
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
        console.print(table)
    console.print(
        "log p: raw (T = 1), nats. entropy: of the first token at T, nats. contrast: bits by which "
        "a follow-up is likelier after its own response than after others'. greedy writes: share "
        "of follow-ups that greedy decoding writes whole.",
        soft_wrap=True,
    )
    if cut:
        console.print(
            f"[bold]{cut} of {len(run.contexts)} responses were cut off[/] at "
            f"{run.config['max_response_tokens']} tokens: a cut-off response is a different "
            "stimulus (column response_cut_off; † counts what follows one).",
            soft_wrap=True,
        )
    turns = examples(run)
    heading = ("no user turn", "one user turn", "two user turns", "three user turns")[len(turns)]
    console.print(f"\n[bold]{heading}[/] (evenly spaced, not chosen)")
    for context, turn in turns:
        temperature = f"T = {turn['temperature']:g}" if turn["temperature"] else "greedy"
        query = context["messages"][-2]["content"]
        console.print(f"  {escape(one_line(context['context_id'], 40))} · {temperature}")
        response = context["messages"][-1]["content"]
        console.print(f"    query:     {escape(one_line(query, 90))}", soft_wrap=True)
        flag = " † cut off" if context["response_cut_off"] else ""
        console.print(f"    response:  {escape(one_line(response, 90))}{flag}", soft_wrap=True)
        console.print(
            f"    [bold]user turn:[/] {escape(one_line(turn['text'], 160))}", soft_wrap=True
        )
    console.print(f"\nrun: {escape(str(run.path))}", soft_wrap=True)
    code = (
        f"from ia_mech.run import Run; run = Run.open({str(run.path)!r}); "
        "print(run.generations[['context_id', 'temperature', 'text']]); "
        f"print(run.residuals({run.layers[-1] // 2}, {run.positions[-1]!r}).shape)"
    )
    quoted = shlex.quote(code) if set('"$`\\!') & set(code) else f'"{code}"'
    console.print(f"read it: python -c {escape(quoted)}", soft_wrap=True)
    path = escape(shlex.quote(str(run.path)))
    console.print(f"next: python -m ia_mech.judge run {path}", soft_wrap=True)


def _counted(count: int, cut_off: int) -> str:
    """How many there are, and how many of them follow a cut-off response."""
    return f"{count} († {cut_off})" if cut_off else str(count)
