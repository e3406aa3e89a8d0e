"""A run can be shared as it is: the hub's loader reads it, and it names no folder of a machine."""

import gzip
import json
import re
import shutil
from base64 import b64decode
from pathlib import Path

import datasets
import pyarrow.parquet as pq
import pytest
from runs import files_under
from shell import call

from benchmarks.probe_validation.planted import Plan, plant, write
from experiments.temperature_sweep import main as sweep
from experiments.units import Loaded
from ia_mech.collect.command import main
from ia_mech.engine.workers import ANY
from ia_mech.judge.__main__ import main as judge
from ia_mech.models.load import ModelSpec, recall, remember
from ia_mech.rates.__main__ import main as rates
from ia_mech.report.__main__ import main as report
from ia_mech.run import Run
from probes.train import main as train

SMALL = ["--temperatures", "1", "--samples", "1", "--max-new-tokens", "3"]


@pytest.mark.parametrize("table", ["generations", "contexts"])
def test_the_hub_s_loader_reads_a_run_s_tables(parted, tmp_path, table):
    found = datasets.load_dataset(str(parted.path), table, cache_dir=str(tmp_path))["train"]
    frame = getattr(parted, table)
    assert found.column_names == list(frame.columns)
    assert found["context_id"][:] == frame["context_id"].tolist()


@pytest.fixture
def local(tmp_path, tiny_model_dir, monkeypatch) -> tuple[list[str], Path]:
    """The words of a command with a local model and data; and its folder."""
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    model, data = tmp_path / "secret" / "my-model", tmp_path / "secret" / "chats.jsonl"
    shutil.copytree(tiny_model_dir, model)
    chat = {"prompt": "Why?", "response": "Because.", "followup": "Sure?", "id": "a"}
    data.write_text(json.dumps(chat) + "\n")
    out = tmp_path / "run"
    return [*SMALL, "--model", str(model), "--dataset", str(data), "--out", str(out)], out


def test_no_file_of_a_run_names_a_folder_of_this_machine(local, tmp_path, capfd):
    words, out = local
    assert call(main, words, capfd).status == 0
    for name in files_under(out):
        assert b"secret" not in (out / name).read_bytes(), name
    run = Run.open(out)
    assert (run.settings["dataset"], run.settings["model"]) == ("chats.jsonl", "my-model")
    again = call(main, words, capfd)
    assert again.status == 0 and "was finished before" in again.err
    # Experiments find the model again as long as it is there; for other weights they don't.
    assert Loaded(run, None, ANY).team.subject.weights_hash == run.model["weights_hash"]
    assert recall(run.settings, "00").name == "my-model"
    # The embedded model stays what it is, where its weights are known from a folder, too.
    embedded = run.settings | {"model": "smollm2-135m-instruct"}
    assert recall(embedded, run.model["weights_hash"]).name == "smollm2-135m-instruct"
    # The same weights elsewhere don't hide it, nor where they have been.
    model = tmp_path / "secret" / "my-model"
    for other in (tmp_path / "secret" / "copy", tmp_path / "gone" / "my-model"):
        shutil.copytree(model, other)
        remember(ModelSpec(name=str(other)), run.model["weights_hash"])
    shutil.rmtree(tmp_path / "gone")
    assert recall(run.settings, run.model["weights_hash"]).name == words[words.index("--model") + 1]
    shutil.rmtree(model)  # then the same weights are found under another name
    assert recall(run.settings, run.model["weights_hash"]).name == str(model.with_name("copy"))
    shutil.rmtree(model.with_name("copy"))
    assert recall(run.settings, run.model["weights_hash"]).name == "my-model"


def test_the_card_counts_real_follow_ups_after_another_response(local, capfd):
    words, out = local
    data = Path(words[words.index("--dataset") + 1])
    chats = [
        {"prompt": "Why?", "response": "Because.", "followup": "Sure?"},
        {"prompt": "How?"},
    ]
    data.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    words += ["--max-response-tokens", "4"]
    assert call(main, words, capfd).status == 0
    said = "**the model also wrote 1 of the 2 responses** (at most 4 tokens). Their licence"
    assert said in (out / "README.md").read_text()
    words[words.index("--out") + 1] = str(out.with_name("anew"))
    assert call(main, [*words, "--response", "generate"], capfd).status == 0
    card = (out.with_name("anew") / "README.md").read_text()
    assert "wrote 2 of the 2 responses" in card
    assert "; 1 of the 1 real follow-ups came after another response than the model's" in card


def texts_in(path: Path) -> str:
    """All texts of a file, those that are compressed in it included."""
    held = path.read_bytes().decode("latin-1")
    if path.suffix == ".parquet":
        table = pq.read_table(path)
        held += str(table.schema.metadata) + table.to_pandas().to_csv()
    if path.suffix == ".html":
        data = re.search(r'id="data">(.*?)</script>', held, re.DOTALL)
        held += gzip.decompress(b64decode(data[1])).decode() if data else ""
    return held


@pytest.mark.slow
def test_no_file_of_an_analysed_run_names_a_folder_of_this_machine(
    run, tmp_path, capfd, monkeypatch
):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    planted = plant(Plan("signal", contexts=80, layers=3, informative_layer=2, d_model=16))
    probed = write(planted, tmp_path / "probed").path
    planted.lens.save(planted.weights_hash)
    for command, words in [
        (train, [probed, "--permutations", "39", "--resamples", "100", "--threads", "1"]),
        (report, [probed]),
        (judge, ["run", run.path]),
        (rates, [run.path]),
        (sweep, [run.path, "--resamples", "100"]),
        (report, [run.path]),
    ]:
        outcome = call(command, [str(word) for word in words], capfd)
        assert outcome.status == 0, outcome.err
    folders = [probed, run.path]
    files = [folder / name for folder in folders for name in files_under(folder)]
    assert {"report.html", "estimates.parquet", "card.json"} <= {path.name for path in files}
    for path in files:
        assert tmp_path.name not in texts_in(path), path
        assert str(Path.home()) not in texts_in(path), path
