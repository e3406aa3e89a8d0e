"""The cache of verdicts: nothing is lost, nothing is believed that isn't whole."""

import errno
import json
import os
from dataclasses import replace

import pytest
from filelock import FileLock
from judging import FakeJudge, Recorded

from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge import rubric
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.judging import judge_items
from ia_mech.judge.verdict import Item, Verdict

ITEMS = [Item("query", "response", f"turn {number}") for number in range(3)]
ODD = Item("q\u2028\n", 'r"\\', "数学 \x00 \ud800")
VERDICT = Verdict("generic", rationale="fits “any”\u2028 response", mode="text", cost=0.5)


@pytest.fixture
def filled(tmp_path):
    """The file of a cache with a verdict for each item."""
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        for item in ITEMS:
            cache.put(item, VERDICT)
        return cache.path


def first_line(path) -> dict:
    """What the first line says."""
    return json.loads(path.read_bytes().splitlines()[0])


def held(folder) -> list[bool]:
    with VerdictCache({"kind": "x"}, folder) as cache:
        return [cache.get(item) == VERDICT for item in ITEMS]


def test_a_verdict_comes_back_as_it_was_and_texts_are_not_kept(tmp_path):
    for _ in range(2):
        with VerdictCache({"kind": "x"}, tmp_path) as cache:
            cache.put(ODD, VERDICT)
            assert (cache.get(ODD), cache.get(ITEMS[0])) == (VERDICT, None)
    assert first_line(cache.path) == {"identity": {"kind": "x"}}
    assert len(cache.path.read_bytes().splitlines()) == 3 and "数学" not in cache.path.read_text()


@pytest.mark.parametrize("cut", [1, 36, None])
def test_a_line_that_was_being_written_is_dropped_and_written_again(filled, tmp_path, cut):
    os.truncate(filled, filled.stat().st_size - cut if cut else 5)  # 5: no line is whole
    assert held(tmp_path) == [bool(cut), bool(cut), False]
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        for item in ITEMS:
            cache.put(item, VERDICT)
    assert held(tmp_path) == [True, True, True] and first_line(filled) == {
        "identity": {"kind": "x"}
    }
    assert all(json.loads(line) for line in filled.read_bytes().splitlines())


def entry(**verdict) -> bytes:
    return json.dumps({"key": "a", "verdict": VERDICT.to_json() | verdict}).encode()


WRONG = [
    *(b"\xff\xfe", b"{}}", b"17", b"[]", b"{}", b'"key"', b"[" * 200_000),
    *(b'{"key": "a"}', b'{"key": "a", "verdict": {}}', b'{"key": "a", "verdict": []}'),
    *(entry(category=None), entry(scores={"generic": float("nan")}), entry(category=["generic"])),
    *(entry(status="unparsable"), entry(status=7), entry(status=["judged"]), entry(mood="good")),
]


def test_lines_that_can_not_be_read_are_judged_again(filled, tmp_path):
    first, *verdicts = filled.read_bytes().splitlines()
    filled.write_bytes(b"\n".join([first, verdicts[0], *WRONG, verdicts[2]]) + b"\n")
    assert held(tmp_path) == [True, False, True]
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        assert len(cache._verdicts) == 2
        cache.put(ITEMS[1], VERDICT)
    assert held(tmp_path) == [True] * 3


def test_one_writer_at_a_time(filled, tmp_path):
    with VerdictCache({"kind": "x"}, tmp_path):
        with pytest.raises(UserError, match="another process is judging with the same judge"):
            VerdictCache({"kind": "x"}, tmp_path)
        with VerdictCache({"kind": "y"}, tmp_path):
            pass  # another judge is another file
    assert held(tmp_path) == [True] * 3


def test_a_changed_rubric_or_judge_misses(tmp_path, monkeypatch):
    def judged_anew(**identity) -> int:
        judge = FakeJudge(rubric=rubric.BUILT_IN.hash, **identity)
        judge_items(ITEMS * 2, judge, Quiet(), cache_folder=tmp_path)
        return len(judge.asked)

    assert judged_anew() == 3, "identical items once"
    assert judged_anew() == 0
    assert judged_anew(model="other") == 3
    other = replace(rubric.BUILT_IN, order=rubric.ORDER + ".")
    monkeypatch.setattr(rubric, "BUILT_IN", other)
    assert judged_anew() == 3
    monkeypatch.undo()
    assert judged_anew() == 0


def test_a_write_that_fails_leaves_no_part_of_a_line(filled, tmp_path, monkeypatch):
    real = os.write

    def full(file, line) -> int:
        monkeypatch.setattr(os, "write", no_room)
        return real(file, line[:7])

    def no_room(*_) -> int:
        raise OSError(28, "No space left on device")

    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        monkeypatch.setattr(os, "write", full)
        with pytest.raises(OSError, match="No space"):
            cache.put(ODD, VERDICT)
        monkeypatch.setattr(os, "write", real)
        cache.put(ODD, VERDICT)
    assert len(filled.read_text().split("\n")) == 6
    assert held(tmp_path) == [True] * 3


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES])
def test_a_cache_that_can_not_be_written_to_is_read(tmp_path, monkeypatch, code):
    judge, progress = FakeJudge(), Recorded()
    judge_items(ITEMS[:2], judge, Quiet(), cache_folder=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}

    def refused(*_, **__):
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(FileLock, "acquire", refused)
    assert len(judge_items(ITEMS, judge, progress, cache_folder=tmp_path)[0]) == 3
    assert len(judge.asked) == 3, "one more than before"
    assert progress.lines[0].startswith(f"{tmp_path} can't be written to: labels are read from")
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
