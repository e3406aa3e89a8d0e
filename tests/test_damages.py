"""Every kind of damage to every kind of file of a run: named, or computed again.

What is read is what was written, or one line names the file; only labels and the manifest itself
aren't compared with a hash. The command that wrote the run comes to the same digest again, or one
line names the file.
"""

import shutil
from dataclasses import replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pytest
from damages import DAMAGES, Twins, Unfit, copied_by_links, draws
from runs import sampled
from shell import call

from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.run import Run
from ia_mech.settings import Settings

SETTINGS = Settings(
    limit=4,
    response="generate",
    max_response_tokens=4,
    temperatures=(1.0,),
    samples=1,
    max_new_tokens=4,
    batch_rows=4,
)  # two parts of contexts
FILES = [
    *("run.json", "manifest.json", "responses/part-00000.parquet"),
    *("contexts/part-00001.parquet", "generations/part-00000.parquet"),
    *("header_logits/00001.safetensors", "residuals/layer_03/00000.safetensors"),
    "judgements/rules.parquet",
]
RECORDS = ("run.json", "manifest.json")  # a damaged one is refused, and not replaced
UNHASHED = ("manifest.json", "judgements/rules.parquet")


@pytest.fixture(scope="module")
def whole(tiny_subject, tmp_path_factory) -> Run:
    """A run, and beside it another one whose files may be mistaken for its own."""
    folder = tmp_path_factory.mktemp("damages")
    other = sampled(replace(SETTINGS, seed=1), tiny_subject, folder / "other")
    run = sampled(SETTINGS, tiny_subject, folder / "run")
    for one in (run, other):
        assert judge(["run", str(one.path)]) == 0
    return Run.open(run.path)


def read(path: Path) -> tuple:
    """Everything that a run holds."""
    run = Run.open(path)
    labels = run.labels.judgements("rules") if "rules" in run.labels.judges else None
    responses = pa.Table.from_pandas(run.responses)
    kept = tuple(sorted(run.kept.items()))
    return run.digest(), kept, responses, None if labels is None else pa.Table.from_pandas(labels)


def names_it(said: str, file: str) -> bool:
    """Whether a refusal names the file, or the part that it belongs to."""
    return Path(file).name in said or f"part {Path(file).stem.removeprefix('part-')} " in said


def damaged(whole: Run, out: Path, file: str, name: str, draw: int) -> bool:
    """Damage a file of a copy; whether this damage is one that the file can have."""
    copied_by_links(whole.path, out)
    twin = whole.path.parent / "other" / file
    beside = [one for one in (whole.path / file).parent.iterdir() if one.suffix == twin.suffix]
    beside = [one for one in beside if one.name != twin.name]
    try:
        DAMAGES[name](out / file, Random(f"{file} {name} {draw}"), Twins(twin, beside))
    except Unfit:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_what_is_read_is_what_was_written_or_the_file_is_named(whole, tmp_path, file):
    expected, wrong, refused = read(whole.path), [], 0
    for name, draw in draws():
        out = tmp_path / "run"
        if damaged(whole, out, file, name, draw):
            try:
                found = read(out)
            except UserError as error:
                refused += 1
                named = names_it(str(error), file) or (file in UNHASHED and str(out) in str(error))
                if not named:
                    wrong.append((name, draw, str(error)))
            else:
                if found != expected and file not in UNHASHED:
                    wrong.append((name, draw, "other content"))
        shutil.rmtree(out)
    assert not wrong and refused > 10


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES[:-1])
def test_the_command_comes_to_the_same_digest_or_names_the_file(
    whole, tiny_subject, tmp_path, file
):
    wrong, again = [], 0
    for name in DAMAGES:
        out = tmp_path / "run"
        if damaged(whole, out, file, name, 0):
            try:
                run = sampled(SETTINGS, tiny_subject, out)
            except UserError as error:
                if not names_it(str(error), file) and str(out) not in str(error):
                    wrong.append((name, str(error)))
                if file not in RECORDS and (out / file).is_file():
                    wrong.append((name, f"not computed again: {error}"))
            else:
                again += 1
                if not run.complete or run.verify() or run.digest() != whole.digest():
                    wrong.append((name, "another digest"))
        shutil.rmtree(out)
    assert not wrong and (again > 10 or file in RECORDS)


def test_a_damaged_run_ends_a_command_with_one_line(whole, tmp_path, capfd):
    for file in ("run.json", "contexts/part-00001.parquet", "generations/part-00000.parquet"):
        out = tmp_path / "run"
        assert damaged(whole, out, file, "cut in half", 0)
        outcome = call(judge, ["run", str(out), "--replace"], capfd)
        assert outcome.status == 2 and outcome.err.count("\n") == 1
        assert names_it(outcome.err, file)
        shutil.rmtree(out)
