"""Every command of the README and of the method pages, run on the embedded model, in small.

The pages say what the commands do and what they cost. Here each command has to end with status 0.
``test_docs`` tests that the program understands all commands of all pages. The commands of results
took hours and are not run, nor are those of ``ELSEWHERE``.
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
    *("docs/sampling.md", "docs/judging.md", "docs/study.md", "docs/python.md", "docs/scale.md"),
    *("docs/locate.md", "docs/probes.md", "docs/experiments.md", "docs/engine.md"),
]
PROBED = ("docs/probes.md", "docs/experiments.md")
NAMES = {  # what stands on a page → what this machine has
    "Qwen/Qwen3-0.6B": "smollm2-135m-instruct",
    "Qwen/Qwen3-4B": "smollm2-135m-instruct",
    "MODEL": "smollm2-135m-instruct",
    "gsm8k": "builtin",
}
SMALL = {  # what is added to a command; of a flag that is given twice the last counts
    "sample": "--limit 4 --max-new-tokens 6 --samples 1",
    "study": "--queries 4 --quick",
    "steering": "--queries 8 --resamples 100 --kl 0.001",
    "perturbations": "--conditions remove swap --queries 4 --samples 1",
    "annotate": "--n 8",
}
ELSEWHERE = {  # commands that need what tests don't have
    "--judge llm": "a key; tests/test_judge_llm.py asks a stub server",
    "annotate import": "a filled-in sheet; tests/test_judge_sheets.py",
    "enable_thinking": "a template that reads it; tests/test_thinking_run.py",
    "--results FOLDER": "a result; tests/test_report.py",
    "ia-mech reaction": "finished responses; tests/test_reaction_experiment.py",
    "interchange": "hours; tests/test_interchange.py",
    "compare cache": "two finished studies; tests/test_study.py",
    "post-training": "packages for training; tests/test_post_training.py",
    "cache/tuned": "what post-training leaves",
    "cache/before": "what post-training leaves",
    "docs/worked_": "this folder; tests/test_experiment.py, tests/test_perturbations.py",
}
CHAT = {"prompt": "Name a metal.", "response": "Iron.", "followup": "Does it rust?"}


def run(words: list[str], folder: Path) -> None:
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, (
        f"{shlex.join(words)}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    )


def program(module: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", module, *shlex.split(" ".join(flags))]


def judged_runs(folder: Path, flags: str) -> Path:
    """A folder with a judged run and another one of the same conversations."""
    for seed, name in enumerate(("RUN", "RUN-B")):
        run(program("ia_mech.sample", flags, f"--seed {seed} --out {name}"), folder)
        run(program("ia_mech.judge", f"run {name}"), folder)
    return folder


@pytest.fixture(scope="module")
def many(tmp_path_factory) -> Path:
    """Runs with enough follow-ups for a probe."""
    flags = "--limit 60 --temperatures 0.7 1 --samples 3 --max-new-tokens 16"
    return judged_runs(tmp_path_factory.mktemp("many"), flags)


@pytest.fixture(scope="module")
def few(tmp_path_factory) -> Path:
    """Runs so small that any judge takes only seconds."""
    flags = "--limit 6 --temperatures 1 --samples 1 --max-new-tokens 8"
    return judged_runs(tmp_path_factory.mktemp("few"), flags)


def commands(page: str) -> list[str]:
    """The Python commands in the blocks of a page, without those that only a shell can complete."""
    blocks = re.findall(r"```bash\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    lines = "\n".join(blocks).replace("\\\n", "").splitlines()
    found = [one for one in lines if re.match(r"(ia-mech|python) ", one) and "$" not in one]
    code = [one.partition("  #")[0] for one in found]
    return [one for one in code if not any(part in one for part in ELSEWHERE)]


def in_small(line: str) -> list[str]:
    """The words of a page's command as they are run here."""
    for name, here in NAMES.items():
        line = re.sub(rf"(?<![\w/.-]){re.escape(name)}(?![\w-])", here, line)
    line = re.sub(r" --shard \d/\d", "", line)  # the other shares are made elsewhere
    words = shlex.split(line, comments=True)
    if words[0] == "ia-mech":
        words = ["python", "-m", "ia_mech.console", *words[1:]]
    name = words[3] if words[2] == "ia_mech.console" else words[2].rpartition(".")[2]
    if "--help" not in words and "same.jsonl" not in words:  # all contexts of a run, once more
        words += SMALL.get(name, "").split()
    if name == "study" and "--out" not in words:  # of two models that are one here
        words += ["--out", f"cache/study-{len(line)}"]
    if "hf" in words:
        words.append("--force")
    if "--responses" in words:
        words += shlex.split("--responses 4 --max-response-tokens 12 --unfinished")
    return [sys.executable, *words[1:]]


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_page_ends_well(page, request, tmp_path):
    runs = request.getfixturevalue("many" if page in PROBED else "few")
    chats = [CHAT | {"prompt": f"Name {n} metals."} for n in range(1, 5)]
    (tmp_path / "chats.jsonl").write_text("".join(json.dumps(one) + "\n" for one in chats))
    (tmp_path / "cache").mkdir()
    made = " ".join(commands(page)) + " "
    for name, source in (("RUN", "RUN"), ("RUN-A", "RUN"), ("RUN-B", "RUN-B")):
        if f"--out cache/{name} " not in made:
            shutil.copytree(runs / source, tmp_path / "cache" / name)
    for line in commands(page):
        run(in_small(line), tmp_path)
