"""Makes README's pictures again from a judged run, such as the one that ``make demo`` leaves.

    python docs/figures/make.py cache/demo

``exchange.svg`` is one conversation of the run, with the turns that the model wrote in it;
``page.png`` is a screenshot of the run's page (Debian's chromium, if it is there).
"""

import argparse
import re
import shutil
import subprocess
import tempfile
import textwrap
from html import escape
from pathlib import Path

from ia_mech import Run
from ia_mech.judge.rubric import FOLLOW_UP, heading

CONTEXT, TEMPERATURE = "open-02", 0.7  # its greedy turn and its sampled ones are of two kinds
HERE = Path(__file__).parent
WIDTH, LINE, PAD, LETTERS = 920, 20, 14, 118  # pixels; characters in a line
INK, GREY, GOOD = "#1f2328", "#656d76", "#1a7f37"
FILLS = {"query": "#ddf4ff", "response": "#f6f8fa", "header": "#fff8c5", "turn": "#ffffff"}


class Picture:
    """Boxes of text, one under the other, as SVG."""

    def __init__(self) -> None:
        self.parts: list[str] = []
        self.y = PAD

    def text(self, x: int, y: int, words: str, colour: str = INK, extra: str = "") -> None:
        place = f'x="{x}" y="{y}" fill="{colour}" xml:space="preserve"'
        self.parts.append(f"<text {place} {extra}>{escape(words)}</text>")

    def box(self, kind: str, name: str, words: str, label: str = "", good: bool = False) -> None:
        """Text in a box, what it is on the left above it, and its label on the right."""
        lines = [line for part in words.split("\n") for line in textwrap.wrap(part, LETTERS)]
        height = LINE * (len(lines) + 1) + PAD
        colour = GOOD if good else "#d0d7de"
        self.parts.append(
            f'<rect x="{PAD}" y="{self.y}" width="{WIDTH - 2 * PAD}" height="{height}" rx="8" '
            f'fill="{FILLS[kind]}" stroke="{colour}"/>'
        )
        self.text(2 * PAD, self.y + LINE, name, GREY, 'font-size="12"')
        if label:
            end = 'text-anchor="end" font-weight="600" font-size="13"'
            self.text(WIDTH - 2 * PAD, self.y + LINE, label, GOOD if good else GREY, end)
        family = (
            'font-family="ui-monospace, Menlo, Consolas, monospace"' if kind == "header" else ""
        )
        for number, line in enumerate(lines):
            self.text(2 * PAD, self.y + LINE * (number + 2), line, INK, family)
        self.y += height + 8

    def svg(self) -> str:
        family = "-apple-system, 'Segoe UI', 'Noto Sans', Helvetica, Arial, sans-serif"
        size = f'width="{WIDTH}" height="{self.y}" viewBox="0 0 {WIDTH} {self.y}"'
        ground = f'<rect width="{WIDTH}" height="{self.y}" rx="10" fill="#ffffff"/>'
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{family}" font-size="15">'
        )
        return "\n".join([head, ground, *self.parts, "</svg>", ""])


def exchange(run: Run) -> str:
    """The conversation, the open header, and the greedy turn above the sampled ones."""
    context = run.contexts.set_index("context_id").loc[CONTEXT]
    turns = run.generations.merge(
        run.labelled()[["context_id", "temperature", "sample", "category"]]
    )
    turns = turns[(turns["context_id"] == CONTEXT) & turns["temperature"].isin([0.0, TEMPERATURE])]
    query, response = (message["content"] for message in context["messages"][-2:])
    made = Picture()
    made.box("query", "user, in the data", query)
    made.box("response", "assistant, in the data", response)
    header = context["text"].rpartition(response)[2].strip("\n").replace("\n", "⏎")
    made.box("header", "the model's own template opens the next user turn …", f"{header}⏎ ▮")
    for _, turn in turns.iterrows():
        how = "greedy" if turn["temperature"] == 0 else f"sampled at T = {turn['temperature']:g}"
        ending = "" if turn["finish_reason"] == "turn_end" else " …"
        words = " ".join(turn["text"].split()) + ending
        is_good = turn["category"] == FOLLOW_UP
        label = ("✓ " if is_good else "") + heading(turn["category"])
        made.box("turn", f"… and the model writes it: {how}", words, label, is_good)
    return made.svg()


def screenshot(page: Path, to: Path) -> None:
    """The part of the page with the grid of turns."""
    html = re.sub(r"<meta http-equiv=.*?>", "", page.read_text(encoding="utf-8"), count=1)
    hidden = 'header, main > section:not([aria-labelledby="turns"])'
    with tempfile.TemporaryDirectory() as folder:
        alone = Path(folder) / "turns.html"
        alone.write_text(
            html.replace(
                "</style>", f"{hidden} {{ display: none }} #turns {{ outline: none }}</style>", 1
            )
        )
        words = ["--headless", "--no-sandbox", "--hide-scrollbars", "--window-size=1200,860"]
        command = [
            "chromium",
            *words,
            f"--screenshot={to}",
            f"{alone.as_uri()}#text+of+turn+or+conversation=commits+on+main",
        ]
        subprocess.run(command, check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    run = Run.open(parser.parse_args().run)
    (HERE / "exchange.svg").write_text(exchange(run), encoding="utf-8")
    if shutil.which("chromium"):
        screenshot(run.path / "report.html", HERE / "page.png")


if __name__ == "__main__":
    main()
