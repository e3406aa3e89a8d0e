"""Results: written whole, read back equal, printed with the sentence first."""

import json
from base64 import b64encode

import numpy as np
import pandas as pd
import pytest

from ia_mech.display import new_axes
from ia_mech.errors import UserError
from ia_mech.results import RESULT, Result, Table, folder_of, folders_of, read, write


def example_result(**changes) -> Result:
    figure, axes = new_axes("a", "x")
    axes.plot([0, 1], [1, 0])
    options = {
        "name": "rates-rules",
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
    result, folder = example_result(), folder_of(tmp_path, "rates-rules")
    write(result, folder)
    again = read(folder)
    for name in ("name", "question", "sentence", "control", "tables", "notes", "about"):
        assert getattr(again, name) == getattr(result, name)
    pd.testing.assert_frame_equal(again.estimates, result.estimates)
    assert again.figures["rates"].lstrip().startswith(b"<?xml")
    assert b64encode(again.figures["rates"]).decode() in again._repr_html_()
    assert sorted(path.name for path in folder.iterdir()) == [
        *("estimates.parquet", "probe.bin", "rates.pdf", "rates.png", "rates.svg"),
        *("result.json", "turns.parquet"),
    ]
    assert [one.name for one in folders_of(tmp_path)] == ["rates-rules"]


def test_a_new_result_removes_the_files_of_the_old_one_and_nothing_else(tmp_path):
    write(example_result(), tmp_path)
    (tmp_path / "part-0.parquet").write_bytes(b"kept")
    write(example_result(figures={}, data={}, files={}), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("estimates.parquet", "part-0.parquet", "result.json")
    ]


@pytest.mark.parametrize("damage", ["{", "[]", "{}", json.dumps({"about": {}, "files": []})])
def test_a_damaged_result_is_one_line(tmp_path, damage):
    write(example_result(), tmp_path)
    (tmp_path / RESULT).write_text(damage)
    with pytest.raises(UserError, match="is damaged"):
        read(tmp_path)
