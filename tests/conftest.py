"""What many tests share: a tiny chat model in a folder, and a quiet progress."""

import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # no test may reach a hub
# Idle threads would spin, and take the cores of other tests; it is read when torch is loaded.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# OpenBLAS's idle threads spin: small products on a busy machine took 30 times as long.
os.environ.setdefault("OPENBLAS_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))

import families
import pytest
import scored
import tiny
import torch
from matplotlib.figure import Figure
from transformers import PreTrainedTokenizerFast

from ia_mech.cli import THREAD_COUNTS
from ia_mech.collect.job import collect
from ia_mech.display import FIGURE_FORMATS, save_figure
from ia_mech.models.load import Subject
from ia_mech.run import Run
from ia_mech.settings import Settings

pytest_plugins = ["runs"]

# A shell starts background jobs with SIGINT ignored, and what they start inherits that: tests of
# Ctrl-C would wait for an interrupt that can't come.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tests kill processes, not the power: flushing to the disk shows nothing here, and is slow.
os.fsync = lambda _: None

# For tiny models a second thread costs more than it brings, and very much more on a busy machine.
# The variable is for emulating other machines (docs/development.md).
torch.set_num_threads(int(os.environ.get("IA_MECH_TEST_THREADS", "1")))


# Files that take longest, before all others: one at the end would be waited for by itself.
LONGEST = (
    *("test_readme", "test_study", "test_kills", "test_probes_siblings", "test_real_model"),
    *("test_probes_beyond", "test_shards", "test_collect", "test_elicit", "test_published"),
    *("test_devices", "test_installed", "test_responses", "test_interchange", "test_figures"),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {name: at for at, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.stem, len(place)))


class Silent:
    """A progress that remembers what it was told."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.steps = 0

    def start(self, phase: str, total: int, *, done: int = 0, unit: str = "step") -> None:
        self.lines.append(f"{phase} {total} {done}")

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.steps += steps

    def say(self, line: str) -> None:
        self.lines.append(line)

    def stop(self) -> None: ...


@pytest.fixture
def progress() -> Silent:
    return Silent()


@pytest.fixture(autouse=True)
def _threads(monkeypatch):
    """A command's ``--threads`` are those of its process, which here others are run in, too."""
    before = torch.get_num_threads()
    for name in THREAD_COUNTS:
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def _blank_pictures():
    """Figures are drawn, but a blank one is written: rendering takes a second a format.

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
    return collect(settings, tiny_subject, folder / "run", Silent())
