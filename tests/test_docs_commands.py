"""Every command of the README and of the method pages, run on the embedded model, in small.

What they do and what they cost is the pages' to say; here each has to end with status 0. That all
commands of all pages are understood is tested in ``test_docs``. Not run are those of results, which
took hours, and of post-training, which test_post_training does.
"""

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from test_docs import ROOT

pytestmark = pytest.mark.slow

PAGES = [
    "README.md",
    *("docs/judging.md", "docs/likelihood.md", "docs/probes.md", "docs/reaction.md"),
    *("docs/report.md", "docs/sampling.md", "docs/scale.md", "docs/steering.md", "docs/study.md"),
    "docs/results/data/README.md",
]
NAMES = {  # what stands on a page → what this machine has
    "Qwen/Qwen3-0.6B": "smollm2-135m-instruct",
    "Qwen/Qwen3-4B": "smollm2-135m-instruct",
    "MODEL": "smollm2-135m-instruct",
    "gsm8k": "builtin",
    "docs/results/data": str(ROOT / "docs/results/data"),
}
SMALL = {  # what is added to a command; of a flag that is given twice the last counts
    "ia_mech.sample": "--limit 4 --max-new-tokens 6 --samples 1",
    "experiments.study": "--queries 4 --quick",
    "experiments.likelihood": "--resamples 100",
    "experiments.reaction": "--queries 3 --resamples 100",
    "experiments.steering": "--queries 4 --resamples 100 --controls 19 --doses 0.5",
    "ia_mech.judge run --judge hf": "--force",
}
ELSEWHERE = {  # commands that need what tests don't have
    "--judge llm": "a key; tests/test_judge_llm.py asks a stub server",
    "annotate import": "a filled-in sheet; tests/test_judge_sheets.py",
}
CHAT = {"prompt": "Name a metal.", "response": "Iron.", "followup": "Does it rust?"}


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (
        f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


def program(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", module, *shlex.split(" ".join(flags))]


@pytest.fixture(scope="module")
def judged(tmp_path_factory) -> Path:
    """A run with enough follow-ups for a probe."""
    folder = tmp_path_factory.mktemp("judged")
    flags = "--limit 60 --temperatures 0.7 1 --samples 3 --max-new-tokens 16 --out RUN"
    run(program("ia_mech.sample", flags), folder)
    run(program("ia_mech.judge", "run RUN"), folder)
    return folder / "RUN"


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """A run that takes seconds to judge, whoever judges."""
    folder = tmp_path_factory.mktemp("few")
    flags = "--limit 6 --temperatures 1 --samples 1 --max-new-tokens 8 --out RUN"
    run(program("ia_mech.sample", flags), folder)
    run(program("ia_mech.judge", "run RUN"), folder)
    return folder / "RUN"


def commands(page: str) -> list[str]:
    """The Python commands in the blocks of a page, without those that only a shell can complete."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    found = [one for one in lines if re.match(r"(ia-mech|python) ", one) and "$" not in one]
    return [one for one in found if not any(part in one for part in ELSEWHERE)]


def in_small(line: str) -> list[str]:
    """The words of a page's command as they are run here."""
    for name, here in NAMES.items():
        line = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w-])", here, line)
    words = shlex.split(line, comments=True)
    if words[0] == "ia-mech":
        words = ["python", "-m", "ia_mech.console", *words[1:]]
    text = " ".join(words).replace("console sample", "sample").replace("console ", "")
    for command, flags in SMALL.items():
        if "--help" not in words and all(part in text for part in command.split()):
            words += flags.split()
    if "--responses" in words:
        words += shlex.split("--responses 3 --max-response-tokens 12")
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_ends_well(page, judged, few, tmp_path):
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    (tmp_path / "cache").mkdir()
    made = " ".join(commands(page))
    for name in ("RUN", "RUN-A", "RUN-B"):
        if f"--out cache/{name} " not in f"{made} ":
            source = judged if page in ("docs/probes.md", "docs/steering.md") else few
            shutil.copytree(source, tmp_path / "cache" / name)
    for study, model in (("A", "smollm2-135m-instruct"), ("B", "qwen2.5-coder-1.5b-instruct")):
        data = ROOT / "docs/results/data" / model
        shutil.copytree(data, tmp_path / "cache" / f"study-{study}")
    for line in commands(page):
        run(in_small(line), tmp_path)
