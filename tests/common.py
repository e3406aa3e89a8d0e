"""Fixtures that many tests share: a tiny chat model in a folder, threads, pictures."""

import os
from dataclasses import replace
from pathlib import Path

import families
import pytest
import scored
import tiny
import tiny_encoder
import torch
from conftest import Silent
from matplotlib.figure import Figure
from runs import sampled
from transformers import PreTrainedTokenizerFast

import ia_mech.models.load as models
from ia_mech.cli import THREAD_COUNTS
from ia_mech.display import FIGURE_FORMATS, save_figure
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, Subject
from ia_mech.run import Run
from ia_mech.settings import Settings

# For tiny models a second thread costs more than it brings, and very much more on a busy machine.
# The variable is for emulating other machines (docs/development.md).
torch.set_num_threads(int(os.environ.get("IA_MECH_TEST_THREADS", "1")))

LOAD = models._load


@pytest.fixture
def progress() -> Silent:
    return Silent()


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """Set threads back after each test: a command sets those of its process, which tests share."""
    before = torch.get_num_threads()
    for name in THREAD_COUNTS:
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _models_read_once():
    """Each command first loads its model and checks it. Tests do that once for a model's folder,
    since it takes longer than a tiny run."""
    loaded: dict = {}

    def load_once(spec: ModelSpec) -> Subject:
        files = [(file.name, file.stat()) for file in sorted(Path(spec.name).glob("*"))]
        key = spec, *((name, stat.st_size, stat.st_mtime_ns) for name, stat in files)
        if not files or spec.adapter is not None:
            return LOAD(spec)
        if key not in loaded:
            loaded[key] = LOAD(spec)
        return replace(loaded[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_load", load_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_notes(tmp_path_factory):
    """Notes of where models lie are this process's: another's folders may be gone at any moment.
    Tests that set a cache of their own have its notes."""
    folder, places = tmp_path_factory.mktemp("places"), models._places

    def noted(weights: str) -> Path:
        return places(weights) if "IA_MECH_CACHE" in os.environ else folder / weights

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(models, "_places", noted)
        yield


@pytest.fixture(scope="session", autouse=True)
def _tiny_encoder():
    """The built-in judge reads with a random encoder; ``embedded.encoder_directory`` gives it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(embedded, "encoder_directory", tiny_encoder.encoder_directory)
        yield


@pytest.fixture
def loaded_anew(monkeypatch) -> None:
    """Models are loaded and checked anew each time, for tests of loading."""
    monkeypatch.setattr(models, "_load", LOAD)


@pytest.fixture(scope="session", autouse=True)
def _blank_pictures():
    """Figures are drawn, but blank files are written: rendering takes a second per format.

    Tests of pictures take the fixture :func:`pictures`.
    """

    def blank(_: Figure, folder: Path, stem: str) -> None:
        for kind in FIGURE_FORMATS:
            (Path(folder) / f"{stem}.{kind}").write_text("<svg/>")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ia_mech.results.save_figure", blank)
        yield


@pytest.fixture
def pictures(monkeypatch) -> None:
    """Figures are rendered."""
    monkeypatch.setattr("ia_mech.results.save_figure", save_figure)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """A small ChatML tokenizer with SmolLM2's template."""
    return families.build("smollm2")


@pytest.fixture(scope="session")
def tiny_subject(tokenizer) -> Subject:
    """A random Llama that goes with :func:`tokenizer`."""
    return tiny.subject("llama", tokenizer)


@pytest.fixture(scope="session")
def tiny_model_dir(tiny_subject, tmp_path_factory) -> str:
    """The same model as a local directory, for the command line."""
    folder = tmp_path_factory.mktemp("tiny-model")
    tiny_subject.model.save_pretrained(folder)
    tiny_subject.tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="session")
def siblings(tiny_model_dir, tiny_subject, tmp_path_factory) -> Run:
    """Four queries with four short responses each, greedy turns and one at T = 1; not judged. Tests
    that write into it take a copy."""
    folder = tmp_path_factory.mktemp("siblings")
    settings = Settings(
        dataset=scored.dataset(folder / "chats.jsonl", scored.CONVERSATIONS[:4]),
        limit=None,
        model=tiny_model_dir,
        temperatures=(1.0,),
        samples=1,
        max_new_tokens=6,
        response="generate",
        responses=4,
        unfinished=True,
        max_response_tokens=5,
    )
    return sampled(settings, tiny_subject, folder / "run", Silent())
