"""Results: written whole, read back equal, printed with the sentence first."""

import json
from base64 import b64encode
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from ia_mech.display import console, new_axes
from ia_mech.errors import UserError
from ia_mech.estimates import could_show
from ia_mech.results import (
    RESULT,
    SHARE,
    Result,
    Table,
    cell_of,
    folder_of,
    folders_of,
    read,
    show,
    write,
)


def example_result(**changes) -> Result:
    figure, axes = new_axes("a", "x")
    axes.plot([0, 1], [1, 0])
    options = {
        "name": "rates-builtin",
        "question": "How often?",
        "sentence": "In 0.25 [0.10, 0.40] of turns.",
        "control": "After a wrong conversation 0.05.",
        "estimates": pd.DataFrame({"quantity": ["rate"], "value": [0.25], "low": [np.nan]}),
        "tables": [
            Table("rates", ["T", "rate"], [["greedy", "0.25"]], "rate: of follow-ups"),
            Table("by dataset", ["dataset", "rate"], [["[bold]x", "0.25"]], full=True),
        ],
        "figures": {"rates": figure},
        "notes": ["few sources"],
        "about": {"kind": "rates", "runs": ["demo"]},
        "data": {"turns": pd.DataFrame({"p": [0.5]})},
        "files": {"probe.bin": lambda path: path.write_bytes(b"123")},
    }
    return Result(**(options | changes))


def test_a_result_comes_back_as_it_was_written(tmp_path, pictures):
    result, folder = example_result(), folder_of(tmp_path, "rates-builtin")
    result.figures["by T"] = result.figures["rates"]
    write(result, folder)
    again = read(folder)
    assert [*again.figures] == ["rates", "by T"]
    for name in ("name", "question", "sentence", "control", "tables", "notes", "about"):
        assert getattr(again, name) == getattr(result, name)
    pd.testing.assert_frame_equal(again.estimates, result.estimates)
    assert again.figures["rates"].lstrip().startswith(b"<?xml")
    assert b64encode(again.figures["rates"]).decode() in again._repr_html_()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("by-T.pdf", "by-T.png", "by-T.svg", "estimates.parquet", "probe.bin"),
        *("rates.pdf", "rates.png", "rates.svg", "result.json", "turns.parquet"),
    ]
    assert [one.name for one in folders_of(tmp_path)] == ["rates-builtin"]


def test_a_new_result_removes_the_files_of_the_old_one_and_nothing_else(tmp_path):
    write(example_result(), tmp_path)
    (tmp_path / "part-0.parquet").write_bytes(b"kept")
    write(example_result(figures={}, data={}, files={}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("estimates.parquet", "part-0.parquet", "result.json")
    ]


def printed(result: Result, **options) -> str:
    screen = console()
    with screen.capture() as capture:
        show(result, screen, **options)
    return capture.get()


def test_one_table_and_short_notes_are_printed_unless_all_is_asked_for():
    notes = ["short", "long" * 50, "another", "a third"]
    result = example_result(notes=notes, control="After a wrong one 0.05. It is known. So it is.")
    said, whole = printed(result), printed(result, full=True)
    assert said.splitlines()[:3] == [result.sentence, "Control: After a wrong one 0.05.", ""]
    assert whole.splitlines()[2:4] == ["It is known.", "So it is."]
    assert said.count("┏") == 1 and whole.count("┏") == 2 and "[bold]x" in whole
    lines = ["note: short", "note: another", "--full: 1 more table, 2 notes, 2 sentences"]
    assert said.splitlines()[-3:] == lines
    assert whole.splitlines()[-4:] == [f"note: {note}" for note in notes]
    assert printed(result, rest="the page").endswith(
        "the page: 1 more table, 2 notes, 2 sentences\n"
    )
    alone = example_result(control="Alone.", tables=result.tables[:1], notes=[])
    assert printed(alone) == printed(alone, full=True)


def estimate(value: float, low: float, high: float, sources: int, **more) -> SimpleNamespace:
    about = {"value": value, "low": low, "high": high, "sources": sources, "p_holm": np.nan}
    return SimpleNamespace(**(about | more))


def test_nothing_is_shown_that_cant_be():
    """Few queries give counts, and a noisy share no number."""
    assert cell_of(estimate(0.375, 0.1, 0.8, 8, events=3, rows=8)) == "0.38 [0.10, 0.80]"
    assert cell_of(estimate(0.375, 0.1, 0.8, 4, events=3, rows=8)) == "3 of 8"
    assert cell_of(estimate(0.375, 0.1, 0.8, 4), "+.2f") == "+0.38 (4 queries)"
    assert cell_of(estimate(0.375, np.nan, np.nan, 1)) == "0.38 (1 query)"
    assert cell_of(estimate(0.375, np.nan, np.nan, 9)) == "0.38 [no interval]"
    assert cell_of(estimate(0.5, 0.18, 17.39, 30), SHARE) == "can't be told"
    assert cell_of(estimate(0.5, 0.18, 0.9, 30), SHARE) == "0.50 [0.18, 0.90]"
    assert could_show(0.14, most=1) == "0.14 would have been shown with 80% power"
    assert could_show(1.43, most=1) == "too few data to show any effect"
    assert could_show(1.43) and not could_show(np.nan)
    some = could_show(0.45, most=1, up_to=np.inf)
    assert some == "at best 0.45 would have been shown with 80% power"


@pytest.mark.parametrize("damage", ["{", "[]", "{}", json.dumps({"about": {}, "files": []})])
def test_a_damaged_result_is_one_line(tmp_path, damage):
    write(example_result(), tmp_path)
    (tmp_path / RESULT).write_text(damage)
    with pytest.raises(UserError, match="is damaged"):
        read(tmp_path)


def test_a_result_that_is_not_there_yet_is_made_by_the_command_that_is_named(tmp_path):
    (tmp_path / "run.json").touch()
    for name, command in (("rates-builtin", "rates"), ("mass-vector", "mass-vector")):
        with pytest.raises(UserError, match=f"holds no result; make it with: .* {command} "):
            read(tmp_path / "results" / name)
