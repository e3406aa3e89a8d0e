"""README and docs: their links lead somewhere, their commands are understood."""

import argparse
import importlib
import re
import shlex
import sys
from pathlib import Path

import pytest

from ia_mech.console import COMMANDS

ROOT = Path(__file__).parent.parent
PAGES = sorted(
    path
    for folder, pattern in (
        (".", "*.md"),
        ("docs", "**/*.md"),
        ("benchmarks", "**/*.md"),
        ("ia_mech", "**/*.md"),
    )
    for path in (ROOT / folder).glob(pattern)
)
NAMES = [str(path.relative_to(ROOT)) for path in PAGES]
README = ROOT / "README.md"
DOCS = [path for path in PAGES if path.is_relative_to(ROOT / "docs")]


def words(*pages: Path) -> int:
    """How many words the pages have, as ``wc -w`` counts them."""
    return sum(len(page.read_text("utf-8").split()) for page in pages)


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text("utf-8"), flags=re.DOTALL)
    found = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", one).strip().lower().replace(" ", "-") for one in found}


@pytest.mark.parametrize("page", PAGES, ids=NAMES)
def test_links_lead_to_files_and_headings_that_exist(page):
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text("utf-8")):
        if target.startswith("http"):
            continue
        name, _, anchor = target.partition("#")
        there = (page.parent / name).resolve() if name else page
        assert there.exists(), target
        assert not anchor or anchor in headings(there), target


def test_the_readme_is_short():
    assert len(README.read_text("utf-8").splitlines()) <= 100
    assert words(README) <= 1_100


def test_the_docs_are_few_and_short():
    assert len(DOCS) <= 14
    assert words(*DOCS) <= 20_000
    judging = (ROOT / "docs" / "judging.md").read_text("utf-8")
    assert len(judging.split()) <= 2_000
    glossary = judging.partition("## Words")[2].partition("\n## ")[0]
    assert 100 < len(glossary.split()) <= 250


@pytest.mark.parametrize("page", DOCS, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_readme_links_to_every_page(page):
    targets = re.findall(r"\]\(([^)\s#]+)", README.read_text("utf-8"))
    assert page in {(ROOT / target).resolve() for target in targets}


class Understood(Exception):
    """A command line was parsed without a complaint."""


def commands(page: Path) -> list[str]:
    """The command lines of a page's blocks, without those that only a shell can complete."""
    blocks = re.findall(r"```bash\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line for line in lines if re.match(r"(ia-mech|python -m) ", line) and "$" not in line]


def test_every_command_is_one_that_the_program_understands(monkeypatch, capsys):
    """Every command is parsed and none is run, so that docs don't keep a renamed flag."""
    parse = argparse.ArgumentParser.parse_args

    def parsed(self, words=None, namespace=None):
        parse(self, words, namespace)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parsed)
    monkeypatch.setattr("ia_mech.cli.refuse_no_run", lambda path: None)  # none is there
    checked = 0
    for page in PAGES:
        for line in commands(page):
            line = line.replace("python -m ia_mech.sample", "ia-mech sample")  # not importable
            program, *words = shlex.split(line.removeprefix("python -m "), comments=True)
            module = COMMANDS[words.pop(0)][0] if program == "ia-mech" else program
            if module.split(".")[0] not in ("ia_mech", "probes", "experiments", "benchmarks"):
                continue
            if (ROOT / module.replace(".", "/") / "__main__.py").exists():
                module += ".__main__"
            checked += 1
            monkeypatch.setattr(sys, "argv", [module, *words])
            try:
                importlib.import_module(module).main()
            except Understood:
                continue
            except SystemExit as end:
                if end.code == 0:  # --help
                    continue
                pytest.fail(f"{page.name}: {line}\n{capsys.readouterr().err}")
            pytest.fail(f"{page.name}: {line} parsed nothing")
    assert checked > 60
