"""Text that others wrote: odd JSON, odd Parquet columns, characters that can't be seen."""

import csv
import decimal
import io
import json
import random
import re
from collections import Counter
from datetime import date
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from shell import call

from ia_mech import annotate
from ia_mech.collect import command
from ia_mech.data.conversations import open_conversations
from ia_mech.display import console
from ia_mech.errors import UserError
from ia_mech.judge import __main__ as judge
from ia_mech.judge.cache import VerdictCache
from ia_mech.judge.verdict import Item, Verdict
from ia_mech.rates import __main__ as rates
from ia_mech.run import Run
from ia_mech.untrusted import escape_unseen, parse_json, spreadsheet_safe, visible

# -- JSON -----------------------------------------------------------------------------------------

HOSTILE = {
    "deep list": ("[" * 200_000, "nested too deeply"),
    "deep object": ('{"a":' * 200_000, "nested too deeply"),
    "long number": ('{"id": ' + "9" * 5000 + "}", "Exceeds the limit (4300 digits)"),
    "not a number": ('{"a": NaN}', "NaN is no JSON number"),
    "infinity": ('{"a": -Infinity}', "-Infinity is no JSON number"),
    "half a pair": ('{"text": "\\uD83D"}', "half a surrogate pair"),
    "half a pair as a name": ('{"\\udc00": 1}', "half a surrogate pair"),
    "a name twice": ('{"a": {"b": 1, "c": 2, "b": 3}}', "the name 'b' is given twice"),
    "not UTF-8": (b'{"a": "\xff"}', "not UTF-8 text: byte 0xff at 8"),
    "no JSON": ("{'a': 1}", "Expecting property name enclosed in double quotes at character 2"),
    "NUL": ('{"a": "\0"}', "Invalid control character at at character 8"),
}


@pytest.mark.parametrize(("text", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_json_that_is_not_taken(text, reason, tmp_path):
    """Whoever reads it names file and line."""
    with pytest.raises(UserError) as refused:
        parse_json(text, "a.jsonl line 3", "correct it")
    line = str(refused.value)
    assert line.startswith(f"a.jsonl line 3 is not JSON ({reason}")
    assert line.endswith("; correct it") and "\n" not in line and len(line) < 200
    hostile = text if isinstance(text, bytes) else text.encode()
    lines, array = tmp_path / "data.jsonl", tmp_path / "data.json"
    lines.write_bytes(b'{"prompt": "a"}\n' + hostile + b"\n")
    array.write_bytes(b"[" + hostile + b"]")
    with pytest.raises(UserError, match=r"^data.jsonl line 2 is not JSON \(.*; write one JSON obj"):
        list(open_conversations(str(lines)))
    with pytest.raises(UserError, match=r"^data.json is not JSON \(.*; write one JSON object"):
        list(open_conversations(str(array)))


def test_json_that_is_taken():
    assert parse_json('\ufeff{"a": "\\ud83d\\ude00 \\\\ud83d"}'.encode(), "", "") == {
        "a": "😀 \\ud83d"
    }
    assert parse_json('{"a": [1, null, 1.5]}', "", "") == {"a": [1, None, 1.5]}


def test_a_deeply_nested_verdict_is_no_verdict(tmp_path):
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        path = cache.path
    with path.open("ab") as file:
        file.write(b"[" * 200_000 + b"\n")
    item = Item("query", "response", "turn")
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        assert cache.get(item) is None
        cache.put(item, Verdict("generic"))
    with VerdictCache({"kind": "x"}, tmp_path) as cache:
        assert cache.get(item).category == "generic"


@pytest.mark.parametrize("depth", [90, 200, 600])
def test_nested_values_are_kept_or_refused(tmp_path, depth):
    file = tmp_path / "data.jsonl"
    value = "[" * depth + "]" * depth
    file.write_text(f'{{"prompt": "a", "more": {value}, "answer": {value}}}\n')
    if depth < 100:
        (only,) = open_conversations(str(file))
        assert json.dumps(only.to_dict()["metadata"]) == f'{{"more": {value}}}'
        assert only.answer == value
    else:
        said = "data.jsonl line 1: its values are nested deeper than 100 levels; leave out"
        with pytest.raises(UserError, match=said):
            open_conversations(str(file))


# -- Parquet --------------------------------------------------------------------------------------

_BAD_TEXT = pa.Array.from_buffers(
    pa.string(), 1, [None, pa.py_buffer(np.array([0, 2], np.int32)), pa.py_buffer(b"\xff\xfe")]
)
COLUMNS = {  # a column beside the prompt, and what of it is kept as metadata, or the refusal
    "bytes": (pa.array([b"\xff"]), "b'\\xff'"),
    "decimal": (pa.array([decimal.Decimal("1.5")]), "1.5"),
    "map": (pa.array([[("a", 1)]], pa.map_(pa.string(), pa.int64())), [["a", 1]]),
    "NaN": (pa.array([float("nan")]), None),
    "infinity": (pa.array([float("inf")]), None),
    "NaN in a list": (pa.array([[float("nan"), 1.0]]), [None, 1.0]),
    "date": (pa.array([date(2026, 1, 2)]), "2026-01-02"),
    "far time": (pa.array([2**62], pa.timestamp("us")), UserError),
    "far date": (pa.array([2**30], pa.date32()), UserError),
    "duration": (pa.array([2**62], pa.duration("s")), UserError),
    "not UTF-8": (_BAD_TEXT, UserError),
}


@pytest.mark.parametrize(("column", "kept"), COLUMNS.values(), ids=COLUMNS)
def test_odd_parquet_columns(tmp_path, column, kept):
    path = tmp_path / "odd.parquet"
    pq.write_table(pa.table({"prompt": pa.array(["q"]), "x": column}), path)
    if kept is UserError:
        with pytest.raises(UserError, match=r"^odd.parquet is not readable as Parquet \(.*; write"):
            open_conversations(str(path))
        return
    (only,) = open_conversations(str(path))
    assert only.metadata == ({} if kept is None else {"x": kept})
    json.dumps(only.to_dict(), allow_nan=False)


def test_gaps_and_columns_that_are_there_twice(tmp_path):
    path = tmp_path / "odd.parquet"
    gap = pa.array([float("nan")])
    pq.write_table(pa.table({"prompt": ["q"], "id": gap, "answer": gap}), path)
    (only,) = open_conversations(str(path))
    assert (only.id, only.answer) == ("odd-00001", None)
    pq.write_table(pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], ["prompt"] * 2), path)
    with pytest.raises(UserError, match=r"odd.parquet has several columns named 'prompt'; "):
        open_conversations(str(path))


# -- damage at random -----------------------------------------------------------------------------

_ROWS = [
    {
        "id": f"r{i}",
        "messages": [
            {"role": "user", "content": f"q{i} é"},
            {"role": "assistant", "content": "r"},
            {"role": "user", "content": "next"},
        ],
        "answer": i,
        "meta": {"k": [1, None]},
    }
    for i in range(8)
]
_PIECES = (b"\xff\xff\xff\xff", b"\0\0\0\0", b"null", b"[[[[", b"\\ud8", b"NaN ", b"1e999", b'"\0"')


def _whole() -> dict[str, bytes]:
    """A valid file of each kind; names are suffixes."""
    parquet, plain = io.BytesIO(), io.BytesIO()
    table = pa.Table.from_pylist(_ROWS)
    pq.write_table(table, parquet)
    pq.write_table(table, plain, compression="none", use_dictionary=False)
    return {
        ".jsonl": "".join(json.dumps(row) + "\n" for row in _ROWS).encode(),
        ".json": json.dumps(_ROWS).encode(),
        ".parquet": parquet.getvalue(),
        "-plain.parquet": plain.getvalue(),
    }


def _damaged(content: bytes, rng: random.Random) -> bytes:
    """A few places of a file with bits flipped, pieces put in, overwritten, left out or cut off."""
    damaged = bytearray(content)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        at = rng.randrange(len(damaged) + 1)
        match rng.choice("ffffirrrdt"):
            case "f" if at < len(damaged):
                damaged[at] ^= 1 << rng.randrange(8)
            case "i":
                damaged[at:at] = rng.randbytes(rng.randrange(1, 9))
            case "r":
                damaged[at : at + 4] = rng.choice(_PIECES)
            case "d":
                del damaged[at : at + rng.randrange(1, 30)]
            case "t":
                del damaged[at:]
    return bytes(damaged)


def _load_damaged(folder: Path, seeds: range) -> Counter:
    """Outcomes of loading one damaged file per seed."""
    outcomes: Counter = Counter()
    whole = _whole()
    for seed in seeds:
        rng = random.Random(seed)
        name = rng.choice(sorted(whole))
        file = folder / f"data{name}"
        file.write_bytes(_damaged(whole[name], rng))
        try:
            conversations = list(open_conversations(str(file)))
        except UserError as refused:
            said = str(refused)
            assert file.stem in said and "; " in said and len(said.splitlines()) == 1, (seed, said)
            outcomes["refused"] += 1
        else:
            json.dumps([c.to_dict() for c in conversations], allow_nan=False)
            outcomes["read"] += 1
    return outcomes


@pytest.mark.parametrize(
    "seeds", [range(200), pytest.param(range(200, 10_200), marks=pytest.mark.slow)]
)
def test_a_damaged_dataset_is_read_or_refused(tmp_path, seeds):
    outcomes = _load_damaged(tmp_path, seeds)
    assert outcomes["refused"] > len(seeds) / 2 and outcomes["read"] > len(seeds) / 40


# -- what is shown --------------------------------------------------------------------------------

UNSEEN = "\x00\x07\x1b\x7f\x85\x9b\u00ad\u061c\u200b\u200e"
UNSEEN += "\u2028\u2029\u202e\u2060\u2066\ufeff\U000e0041"  # of Cc, Cf, Zl and Zp
SEEN = "a\n\té\u00a0\u3000क\u094d\u200dष 👩\u200d🔬 \ue000"


def test_only_what_cannot_be_seen_is_replaced(capsys):
    assert visible(SEEN) == escape_unseen(SEEN) == SEEN
    assert visible(f"a{UNSEEN}b") == f"a{'�' * len(UNSEEN)}b"
    assert spreadsheet_safe(f"a{UNSEEN}b") == visible(f"a{UNSEEN}b")
    console().print(f"a{UNSEEN}b", style="bold")
    out = capsys.readouterr().out
    assert out == visible(out) and out.startswith("a�") and out.endswith("�b\n")
    line = json.dumps({"text": UNSEEN + SEEN}, ensure_ascii=False)
    assert escape_unseen(line) != line
    assert json.loads(escape_unseen(line)) == json.loads(line)
    assert visible(escape_unseen(line)) == escape_unseen(line)


@pytest.mark.parametrize("name", ["dataset", "perturbation"])
def test_names_that_cannot_be_printed_are_refused(tmp_path, name):
    file = tmp_path / "data.jsonl"
    asked = {"messages": [{"role": "user", "content": "q"}], "real_follow_up": None}
    row = {"id": "a", "source_id": "b", "dataset": "c", **asked, name: "a\u202eb"}
    file.write_text(json.dumps(row) + "\n")
    said = rf"line 1 \(id a\): the {name} 'a\\u202eb' holds characters .*; name it with plain"
    with pytest.raises(UserError, match=said):
        open_conversations(str(file))


def test_what_is_unseen_is_kept_in_the_run_and_shown_nowhere(
    tiny_model_dir, tmp_path, capfd, monkeypatch
):
    # Nothing is interpreted either: markup and names of emoji are what the model wrote.
    turn = f"{UNSEEN}[bold]bold[/bold] :cat: \\"
    monkeypatch.setattr("ia_mech.chat.format.ChatFormat.text", lambda self, ids: turn)
    said = f"What{UNSEEN} is{SEEN} it?"
    rows = [
        {"id": f"={UNSEEN}{i}", "prompt": said, "response": f"={said}", "extra": {UNSEEN: said}}
        for i in range(3)
    ]
    data = tmp_path / "odd.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    words = ["--model", tiny_model_dir, "--dataset", str(data), "--limit", "all", "--samples", "2"]
    words += ["--max-new-tokens", "4", "--out", str(tmp_path / "run")]
    shown = [call(command.main, words, capfd)]
    run = shown[0].run
    (line, *_) = re.findall(r"^    user turn: (.*)$", shown[0].out, re.MULTILINE)
    assert line == "�" * len(UNSEEN) + "[bold]bold[/bold] :cat: \\"
    shown.append(call(judge.main, ["run", str(run.path)], capfd))
    words = [str(run.path), "--judge", "builtin", "--full"]
    shown.append(call(rates.main, words, capfd))
    words = ["export", str(run.path), "--n", "6", "--out", str(tmp_path / "sheet")]
    shown.append(call(annotate.main, words, capfd))

    for outcome in shown:
        assert outcome.status == 0, outcome.err
        assert not set(UNSEEN) & set(outcome.out)
    results = run.path / "results" / "rates-builtin" / "result.json"
    for file in (results, tmp_path / "sheet.csv"):
        text = file.read_text(encoding="utf-8-sig")
        assert visible(text.replace("\r", "")) == text.replace("\r", ""), file
    kept = Run.open(run.path).contexts
    assert set(kept["context_id"]) == {row["id"] for row in rows}
    assert next(iter(kept["messages"][0]))["content"] == said
    assert json.loads(kept["metadata"][0]) == {"extra": {UNSEEN: said}}
    rows = list(csv.DictReader(io.StringIO((tmp_path / "sheet.csv").read_text("utf-8-sig"))))
    assert {row["response"] for row in rows} == {spreadsheet_safe(f"={said}")}
    filled = tmp_path / "filled.csv"
    with open(filled, "w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, rows[0])
        writer.writeheader()
        writer.writerows(row | {"category": "new_topic"} for row in rows)
    words = ["import", str(run.path), str(filled), "--annotator", "anna"]
    assert call(annotate.main, words, capfd).status == 0
