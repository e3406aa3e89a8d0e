"""The star behind temperatures above those that the built-in judge was fitted on."""

from dataclasses import replace

import pandas as pd
from matplotlib.figure import Figure

from ia_mech.rates.fit import FOOTNOTE, marked, starred
from ia_mech.results import Result, Table, sentences_of


def test_sentences_tables_and_figures_mark_temperatures_above_the_fit_once():
    figure = Figure()
    axes = figure.subplots()
    axes.set_title("turns at T = 1")
    axes.set_yticks([0, 1], ["T = 0.7", "T = 1.3"])
    rows = [["greedy", "1"], ["0.7", "2"], ["1", "T = 1, opened"]]
    said = "It is 1 at T = 0.7 and 2 at T = 1. So it is."
    table = Table("by T", ["T", "turns"], rows)
    result = Result("x", "?", said, "None.", pd.DataFrame(), [table], {"f": figure})
    for _ in range(2):
        found = marked(result, {"identity": {"kind": "builtin"}})
        assert found.sentence == "It is 1 at T = 0.7 and 2 at T = 1*. So it is."
        assert found.tables[0].rows[1:] == [["0.7", "2"], ["1*", "T = 1*, opened"]]
        assert found.tables[0].legend == FOOTNOTE and found.control == "None."
        assert axes.get_title() == "turns at T = 1*"
        assert [one.get_text() for one in axes.get_yticklabels()] == ["T = 0.7", "T = 1.3*"]
        assert starred(found.sentence, 0.7) == found.sentence
        assert sentences_of(found.sentence)[1:] == ["So it is."]
    assert marked(result, {"identity": {"kind": "llm"}}) is result
    untold = marked(replace(result, tables=[]), {"identity": {"kind": "builtin"}})
    assert untold.control == f"None. {FOOTNOTE}"
