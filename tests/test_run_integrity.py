"""Whoever reads a file of a run gets what was written, or one line that names the file."""

import hashlib
import io
import json
import shutil
import subprocess
import sys

import pandas as pd
import pyarrow.parquet as pq
import pytest
import xxhash
from runs import LAYERS, resealed
from shell import Outcome, call, refusal

from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.rates.__main__ import main as rates
from ia_mech.run import Run, integrity, layout

READERS = {
    layout.contexts_file: lambda run: run.contexts,
    layout.generations_file: lambda run: run.generations,
    layout.header_logits_file: lambda run: run.header_logits(),
    lambda part: layout.residuals_file(1, part): lambda run: run.residuals(1, "header_last"),
}


@pytest.fixture
def judged(run, capfd) -> Run:
    assert call(judge, ["run", str(run.path)], capfd).status == 0
    return run


NOTE = "note: --no-verify: files are not compared with their hashes\n"


def refusal_after_note(outcome: Outcome) -> str:
    assert outcome.err.startswith(NOTE)
    return refusal(outcome._replace(err=outcome.err.removeprefix(NOTE)))


def part_of(run: Run) -> str:
    return run._parts[0]["name"]


def flip(path, at: int, bit: int = 0) -> None:
    content = bytearray(path.read_bytes())
    content[at] ^= 1 << bit
    path.write_bytes(content)


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "read"), READERS.items())
def test_a_flipped_bit_is_found_when_the_file_is_read(run, name, read):
    file = name(part_of(run))
    flip(run.path / file, (run.path / file).stat().st_size // 2, 3)
    damaged = Run.open(run.path)  # sizes agree
    with pytest.raises(UserError, match=f"the content of {file} is not what was written.*--repair"):
        read(damaged)
    for other_name, other in READERS.items():
        if other_name is not name and name is not layout.contexts_file:  # which gives the order
            other(damaged)


@pytest.mark.parametrize("name", [layout.contexts_file, layout.generations_file])
@pytest.mark.parametrize("command", [rates, lambda words: judge(["run", *words, "--replace"])])
def test_commands_end_with_one_line(judged, name, command, capfd):
    file = name(part_of(judged))
    flip(judged.path / file, 40)
    assert f"the content of {file}" in refusal(call(command, [str(judged.path)], capfd))


def test_no_verify_reads_what_is_there(judged, capfd):
    path = judged.path / layout.generations_file(part_of(judged))
    written = pq.read_table(path)
    pq.write_table(written, path, compression="gzip")
    words = [str(judged.path), "--resamples", "100"]
    assert refusal(call(rates, words, capfd)).startswith("part ")  # of another size
    manifest = integrity.read_json(judged.path / layout.MANIFEST)
    for part in manifest["parts"]:
        if layout.generations_file(part["name"]) in part["files"]:
            part["files"][layout.generations_file(part["name"])]["bytes"] = path.stat().st_size
    integrity.write_json(judged.path / layout.MANIFEST, manifest)
    assert "the content of generations" in refusal(call(rates, words, capfd))
    outcome = call(rates, [*words, "--no-verify"], capfd)
    assert outcome.status == 0 and outcome.err.startswith(NOTE)


@pytest.mark.parametrize("name", [name for name in READERS if name != layout.header_logits_file])
def test_an_unverified_file_that_cannot_be_read_is_named(run, name):
    path = run.path / name(part_of(run))
    content = path.read_bytes()
    path.write_bytes(b"\xff" * 8 + content[8:-8] + b"\xff" * 8)  # both formats begin or end in it
    with pytest.raises(UserError, match=f"part {part_of(run)} of .* is damaged: .*--repair"):
        READERS[name](Run.open(run.path, verify=False))


def test_a_file_is_compared_once(run, monkeypatch):
    compared = []
    content_hash = integrity._content_hash
    monkeypatch.setattr(
        integrity, "_content_hash", lambda p, n: compared.append(p.name) or content_hash(p, n)
    )
    opened = Run.open(run.path)
    assert compared == ["run.json"]
    for _ in range(2):
        for position in opened.positions:
            opened.residuals(1, position)
    assert sorted(compared[1:]) == sorted(
        [f"part-{part_of(run)}.parquet", f"{part_of(run)}.safetensors"]
    )
    del compared[:]
    Run.open(run.path, verify=False).residuals(1, "header_last")
    assert compared == []


# -- run.json and manifest.json -------------------------------------------------------------------


def changed(value, path: tuple, new):
    """A copy of nested JSON in which one place is another value, or gone."""
    value = json.loads(json.dumps(value))
    place = value
    for key in path[:-1]:
        place = place[key]
    if new is GONE:
        del place[path[-1]]
    else:
        place[path[-1]] = new
    return value


GONE = object()
WRONG_RECORDS = [
    (("identity",), []),
    (("identity", "config"), None),
    (("identity", "config", "grid", "temperatures"), 1.0),
    (("identity", "model", "layers"), str(LAYERS)),
    (("identity", "model"), GONE),
    (("identity", "positions"), "header_last"),
    (("identity", "chat", "stop_ids"), {"two": "end"}),
]
WRONG_MANIFESTS = [
    (("complete",), "yes"),
    (("parts",), {}),
    (("parts", 0), "conversations"),
    (("parts", 0, "files"), ["run.json"]),
    (("parts", 1, "files", "contexts/part-00000.parquet"), "bytes"),
    (("parts", 1, "units"), 3),
    (("parts", 1, "backed_off"), {"0.0": {"rows": "five"}}),
    (("parts", 1, "name"), "../00000"),
    (("parts", 1, "files", "../elsewhere.parquet"), {"bytes": 1, "xxh3_128": "00"}),
    (("sessions",), None),
]


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(
    ("file", "path", "new"),
    [(layout.RUN, *wrong) for wrong in WRONG_RECORDS]
    + [(layout.MANIFEST, *wrong) for wrong in WRONG_MANIFESTS],
)
def test_json_of_the_wrong_shape_is_one_line(run, capfd, file, path, new, verify):
    value = integrity.read_json(run.path / file)
    integrity.write_json(run.path / file, changed(value, path, new))
    if file == layout.RUN:
        resealed_without_opening(run.path)
    for command in (rates, lambda words: judge(["run", *words])):
        outcome = call(command, [str(run.path), *["--no-verify"][verify:]], capfd)
        line = refusal(outcome) if verify else refusal_after_note(outcome)
        assert line.startswith(f"{run.path / file} is damaged (")
        assert line.endswith("restore it from a copy, or remove the folder and sample again")


def resealed_without_opening(root) -> None:
    with pytest.raises(UserError):
        resealed(root)


@pytest.mark.parametrize("content", ["[]", "null", '"x"', "3", "{}", "[" * 200_000, "{", "\0"])
@pytest.mark.parametrize("file", [layout.RUN, layout.MANIFEST])
def test_json_of_something_else_is_one_line(run, capfd, file, content):
    (run.path / file).write_text(content)
    line = refusal_after_note(call(rates, [str(run.path), "--no-verify"], capfd))
    assert line.startswith(f"{run.path / file} is damaged (")


@pytest.mark.parametrize("file", [layout.RUN, layout.MANIFEST])
def test_any_flipped_bit_of_the_json_files_is_found(run, file):
    path = run.path / file
    whole = path.read_bytes()
    for at in range(0, len(whole), 61):
        flip(path, at, at % 8)
        with pytest.raises(UserError, match=rf"{file} is damaged|has format|is not a run"):
            Run.open(run.path)
        path.write_bytes(whole)
    Run.open(run.path)


def test_a_record_of_another_run_is_refused(run, by_hand):
    shutil.copy(by_hand.path / layout.RUN, run.path / layout.RUN)
    with pytest.raises(UserError, match=r"run\.json is damaged .*bytes, .* were written"):
        Run.open(run.path)


def test_runs_of_format_1_are_read(judged, capfd):
    """SHA-256 in the manifest, ``run.json`` not in it, no seals."""
    words = [str(judged.path), "--resamples", "100", "--json"]
    before, after = judged.path.parent / "before.json", judged.path.parent / "after.json"
    assert call(rates, [*words, str(before)], capfd).status == 0
    manifest = integrity.read_json(judged.path / layout.MANIFEST) | {"format": 1}
    del manifest["parts"][0]["files"][layout.RUN]
    for part in manifest["parts"]:
        for name, facts in part["files"].items():
            del facts[integrity.HASH]
            content = (judged.path / name).read_bytes()
            facts["sha256"] = hashlib.sha256(content).hexdigest()
    record = integrity.read_json(judged.path / layout.RUN) | {"format": 1}
    for name, value in ((layout.MANIFEST, manifest), (layout.RUN, record)):
        (judged.path / name).write_text(json.dumps(value))
    labels = judged.path / "judgements" / "rules.parquet"
    pq.write_table(pq.read_table(labels), labels)
    assert call(rates, [*words, str(after)], capfd).status == 0
    assert after.read_text() == before.read_text()
    assert Run.open(judged.path).digest() == judged.digest()
    flip(judged.path / layout.residuals_file(1, part_of(judged)), -1)
    assert len(Run.open(judged.path).verify()) == 1


# -- labels ---------------------------------------------------------------------------------------


def test_any_flipped_bit_of_labels_is_found(judged):
    path = judged.path / "judgements" / "rules.parquet"
    whole = path.read_bytes()
    for at in range(0, len(whole), 97):
        flip(path, at, at % 8)
        with pytest.raises(UserError, match=r"rules\.parquet can't be read \("):
            judged.labels.judgements("rules")
        path.write_bytes(whole)
    judged.labels.judgements("rules")


def test_labels_of_another_program_are_x(judged):
    path = judged.path / "judgements" / "rules.parquet"
    frame = pq.read_table(path).to_pandas().assign(category="restatement")
    frame.to_parquet(path)
    with pytest.raises(UserError, match="it has no seal, so another program wrote it"):
        judged.labels.judgements("rules")
    read = Run.open(judged.path, verify=False).labels.judgements("rules")
    assert set(read["category"]) == {"restatement"}


def test_labels_of_another_run_are_refused(judged, tmp_path):
    other = Run.open(shutil.copytree(judged.path, tmp_path / "other"))
    record = integrity.read_json(other.path / layout.RUN)
    record["identity"]["config"]["grid"]["seed"] = 1
    integrity.write_json(other.path / layout.RUN, record)
    other = resealed(other.path)
    for read in (other.labels.judgements, lambda name: other.labels.record("judgements", name)):
        with pytest.raises(UserError, match=r"rules\.parquet can't be read \(it is of another run"):
            read("rules")


def test_labels_under_another_name_are_refused(judged, capfd):
    folder = judged.path / "judgements"
    shutil.copy(folder / "rules.parquet", folder / "strict.parquet")
    words = [str(judged.path), "--judge", "strict"]
    line = refusal(call(rates, words, capfd))
    assert line.startswith(f"{folder}/strict.parquet can't be read (it holds the judgements of ")


def test_a_text_that_looks_like_a_seal_is_a_text(judged):
    rows = judged.labels.judgements("rules").head(3)
    rows = rows.assign(rationale=integrity.UNSEALED, genuine=rows["genuine"].map({True: True}))
    said = rows.astype(object).where(pd.notna(rows), None).to_dict("records")
    record = {"identity": {"kind": integrity.UNSEALED}}
    judged.labels.write_judgements("looks", said, record)
    assert set(judged.labels.judgements("looks")["rationale"]) == {integrity.UNSEALED}
    assert judged.labels.record("judgements", "looks") == record
    path = judged.labels.write_sheet("looks", {"note": integrity.UNSEALED})
    assert judged.labels.sheet("looks") == {"note": integrity.UNSEALED}
    path.write_text(path.read_text().replace("note", "nota"))
    with pytest.raises(UserError, match=r"looks\.json is damaged"):
        judged.labels.sheet("looks")


@pytest.mark.slow
def test_a_command_that_ends_at_once_does_not_abort(judged):
    """Arrow's threads may outlive the command; what they free then must not be Python's."""
    words = [sys.executable, "-m", "ia_mech.rates", str(judged.path), "--annotator", "nobody"]
    for _ in range(25):
        ended = subprocess.run(words, capture_output=True, text=True)
        assert ended.returncode == 2 and ended.stderr.count("\n") == 1, ended


@pytest.mark.parametrize("block", [1, 31, 38, 64, 1 << 22])
def test_seals_are_the_same_whatever_block_is_read_at_a_time(block, monkeypatch):
    content = f'{{"text": "{integrity.UNSEALED}", "seal": "{integrity.UNSEALED}", "n": 1}}'.encode()
    whole, digits = integrity.sealed(content), xxhash.xxh3_128(content).hexdigest().encode()
    assert whole == content[:-42] + digits + content[-10:]
    monkeypatch.setattr(integrity, "_BLOCK", block)
    assert integrity.sealed(content) == whole
    integrity.check_seal(io.BytesIO(whole), required=True)
    for at in range(len(whole)):
        changed = whole[:at] + b"?" + whole[at + 1 :]
        with pytest.raises(ValueError, match=r"is not what was written|has no seal"):
            integrity.check_seal(io.BytesIO(changed), required=True)
