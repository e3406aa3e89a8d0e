"""What every command that reads a run's labels refuses: in one line, and nothing is written."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from judging import ROWS, plant
from runs import rehashed, unfinished
from shell import call, files, refusal

from ia_mech import annotate
from ia_mech.judge import __main__ as judge
from ia_mech.judge.rubric import FOLLOW_UP
from ia_mech.rates import __main__ as rates
from ia_mech.run import Run
from probes import train

RUN = "RUN"
COMMANDS = {
    "judge": (judge.main, ["run", RUN]),
    "agreement": (judge.main, ["agreement", RUN]),
    "export": (annotate.main, ["export", RUN, "--n", "20", "--judge", "builtin", "--out", "OUT"]),
    "import": (annotate.main, ["import", RUN, "OUT", "--annotator", "anna"]),
    "rates": (rates.main, [RUN, "--judge", "builtin"]),
    "train": (train.main, [RUN, "--judge", "builtin", "--permutations", "19"]),
}
OF_LABELS = ("agreement", "export", "rates", "train")


def no_run(run: Run) -> None:
    (run.path / "run.json").unlink()


def of_other_turns(run: Run) -> None:
    for file in (run.path / "generations").iterdir():
        table = pq.read_table(file)
        texts = table["text"].to_pylist()
        column = table.column_names.index("text")
        pq.write_table(table.set_column(column, "text", [texts[::-1]]), file)
    rehashed(run.path)


def cut_off(run: Run) -> None:
    (run.path / "judgements" / "builtin.parquet").write_bytes(b"PAR1")


def unjudged(run: Run) -> None:
    shutil.rmtree(run.path / "judgements")


FAULTS = {  # what is wrong with a run, who says so, and a part of the line
    no_run: (tuple(COMMANDS), "is not a run"),
    unfinished: (("judge", *OF_LABELS), "still being written or was interrupted"),
    of_other_turns: (OF_LABELS, "builtin.parquet labels other turns"),
    cut_off: (OF_LABELS, "builtin.parquet can't be read"),
    unjudged: (OF_LABELS, "judge run"),
}


@pytest.mark.parametrize(
    ("command", "fault"), [(name, fault) for fault, (names, _) in FAULTS.items() for name in names]
)
def test_a_run_or_labels_that_can_not_be_read(run, tmp_path, capfd, command, fault):
    labels = [FOLLOW_UP, "generic"] * (ROWS // 2)
    for name in ("builtin", "second"):
        plant(run, name, labels)
    fault(run)
    place = {RUN: str(run.path), "OUT": str(tmp_path / "sheet")}
    main, words = COMMANDS[command]
    before = files(tmp_path)
    line = refusal(call(main, [place.get(word, word) for word in words], capfd))
    assert FAULTS[fault][1] in line and files(tmp_path) == before


@pytest.mark.parametrize("command", OF_LABELS)
def test_a_judge_that_is_not_there(run: Run, tmp_path: Path, capfd, command):
    plant(run, "builtin", [FOLLOW_UP, "generic"] * (ROWS // 2))
    main, words = COMMANDS[command]
    words = [word for word in words if word not in ("--judge", "builtin")]
    flag = {"agreement": "--between"}.get(command, "--judge")
    place = {RUN: str(run.path), "OUT": str(tmp_path / "sheet")}
    line = refusal(call(main, [*(place.get(word, word) for word in words), flag, "gpt"], capfd))
    assert "'gpt'" in line and "builtin" in line
