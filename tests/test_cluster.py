"""Workers in other processes give what threads give: the devices of Ray's clusters, and pretended
ones, which share nothing with this process but pickles."""

import copy
import os
import pickle
import queue
import signal
import socket
import subprocess
import sys
import time

import pandas as pd
import pytest
from conftest import Silent
from runs import sampled
from shell import call, refusal
from test_interchange import Marked, used  # noqa: F401 (a fixture)
from test_mass_vector import run  # noqa: F401
from test_reaction_experiment import folder as several  # noqa: F401
from test_shards import WRITTEN
from test_steering import folder, small  # noqa: F401
from test_study import SETTINGS, SMALL, data  # noqa: F401

from experiments import steering, study
from experiments.elicit import main as elicit
from experiments.interchange import main as interchange
from experiments.locate import main as locate
from experiments.mass_vector import main as mass_vector
from experiments.perturbations import main as perturbations
from experiments.reaction import main as reaction
from ia_mech.collect.command import main as sample
from ia_mech.engine import cluster
from ia_mech.engine.cluster import Relay, team_of
from ia_mech.engine.workers import Crew, Team
from ia_mech.errors import UserError
from ia_mech.models.load import ModelSpec
from ia_mech.run import Run

WORDS = ["--limit", "12", "--temperatures", "1", "--samples", "2", "--max-new-tokens", "8"]
WORDS += ["--batch-rows", "6", "--threads", "1"]


class Pretended(Team):
    """Devices with a model each."""

    def __init__(self, subject, count: int) -> None:
        # As the actors of a cluster: no model is here, and Team's own __init__ isn't called.
        self.device, self.most, self.threads = subject.device, count, 1
        self.files, self.free = subject.files, queue.SimpleQueue()
        for _ in range(count):
            self.free.put(copy.deepcopy(subject))

    def begin(self, task, *args):
        for _ in range(self.free.qsize()):
            found = task(subject := self.free.get(), *args)
            self.free.put(subject)
        return found

    def call(self, task, *args, listener=None):
        task, args = pickle.loads(pickle.dumps((task, args)))
        subject, relay = self.free.get(), Relay()
        found = pickle.dumps(task(subject, *args, relay))
        self.free.put(subject)
        for name, words in relay._taken():
            getattr(listener, name)(*words)
        return pickle.loads(found)


def test_pretended_devices_make_the_run_that_threads_make(tiny_subject, tmp_path):
    found = []
    for number, team in enumerate((tiny_subject, Pretended(tiny_subject, 3))):
        progress, out = Silent(), tmp_path / str(number)
        made = sampled(WRITTEN, team, out, progress, crew=Crew(3, 1))
        found.append((made.digest(), made.identity_digest, progress.steps))
    assert found[0] == found[1]


def test_an_error_for_the_user_crosses_as_it_is():
    error = pickle.loads(pickle.dumps(UserError("a problem", "a remedy")))
    assert (error.problem, error.remedy) == ("a problem", "a remedy")


def test_what_a_cluster_cannot_do_is_one_line(
    tiny_model_dir, siblings, tmp_path, monkeypatch, capfd
):
    words = ["--model", tiny_model_dir, "--limit", "2", "--out", str(tmp_path / "run")]
    line = refusal(call(locate, ["--ray", str(siblings.path)], capfd))
    assert "is not local, auto or HOST:PORT (give a run before --ray)" in line
    line = refusal(call(sample, [*words, "--device", "cuda:1", "--ray"], capfd))
    assert "--device cuda:1: --ray uses all GPUs" in line
    monkeypatch.setitem(sys.modules, "ray", None)
    line = refusal(call(sample, [*words, "--ray"], capfd))
    assert "--ray needs ray; install it: pip install 'ia-mech[ray]'" in line
    assert not (tmp_path / "run").exists()


# -- Ray -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def local():
    """Ray on this machine; it starts in 4 seconds."""
    ray = pytest.importorskip("ray")
    yield "local"
    ray.shutdown()
    cluster.TEAMS.clear()
    cluster.joined.cache_clear()


def test_a_run_on_ray_is_that_of_threads(local, tiny_model_dir, tmp_path, capfd):
    digests = []
    for words in ([], ["--ray"]):
        out = tmp_path / f"run{len(words)}"
        outcome = call(
            sample, ["--model", tiny_model_dir, *WORDS, "--out", str(out), *words], capfd
        )
        digests.append(outcome.run.digest())
    assert digests[0] == digests[1]
    missing = tmp_path / "none"
    line = refusal(call(sample, ["--model", str(missing), "--out", str(tmp_path), "--ray"], capfd))
    assert str(missing) in line


def test_an_address_without_a_cluster_is_refused_at_once(tiny_model_dir, tmp_path, capfd):
    pytest.importorskip("ray")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))  # and doesn't listen
        address = f"127.0.0.1:{nobody.getsockname()[1]}"
        words = ["--model", tiny_model_dir, "--out", str(tmp_path / "run"), "--ray", address]
        begun = time.monotonic()
        line = refusal(call(sample, words, capfd))
    assert f"no Ray cluster answers at '{address}' ([Errno " in line
    assert time.monotonic() - begun < 20  # Ray itself asks for minutes


EXPERIMENTS = {
    locate: ("run", ["--queries", "3"]),
    interchange: ("used", ["--queries", "3", "--samples", "2", "--layers", "2", "3"]),
    mass_vector: ("run", ["--steps", "2", "--kl", "0.01"]),
    elicit: ("run", []),
    perturbations: ("run", ["--samples", "2"]),
    reaction: ("several", []),
    steering.main: ("folder", ["--probe", "{}/probe", "--kl", "0.01"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("command", EXPERIMENTS, ids=lambda command: command.__self__.name)
@pytest.mark.usefixtures("local", "small")
def test_an_experiment_on_ray_is_that_of_threads(command, request, tmp_path, monkeypatch, capfd):
    fixture, words = EXPERIMENTS[command]
    used_run = request.getfixturevalue(fixture)
    if command is interchange:
        monkeypatch.setattr("experiments.arms.builtin_judge", Marked)
    path, found = getattr(used_run, "path", used_run), []
    given = [str(path), *(word.format(path.parent) for word in words), "--resamples", "100"]
    for more in ([], ["--ray"]):
        out = tmp_path / f"out{len(more)}"
        outcome = call(command, [*given, "--out", str(out), *more], capfd)
        assert outcome.status == 0, outcome.err
        found.append(pd.read_parquet(out / "estimates.parquet"))
    pd.testing.assert_frame_equal(*found, check_exact=True)


@pytest.mark.slow
def test_a_study_on_ray_says_what_one_of_threads_does(
    local, tiny_model_dir, request, tmp_path, monkeypatch, capfd
):
    for name, value in SMALL.items():
        monkeypatch.setattr(study, name, value)
    said = []
    for more in ([], ["--ray"]):
        out = tmp_path / f"out{len(more)}"
        words = [
            tiny_model_dir,
            "--dataset",
            request.getfixturevalue("data"),
            *SETTINGS,
            "--out",
            str(out),
            *more,
        ]
        outcome = call(study.main, words, capfd)
        assert outcome.status == 0, outcome.err
        said.append(outcome.out.replace(str(out), "OUT"))
    assert said[0] == said[1]
    assert outcome.err.count("waiting for a device") <= 1  # the actors stay


@pytest.mark.slow
def test_ctrl_c_ends_a_run_on_ray_with_what_was_kept(tiny_model_dir, tmp_path):
    pytest.importorskip("ray")
    out = tmp_path / "run"
    words = ["--model", tiny_model_dir, *WORDS, "--limit", "24", "--max-new-tokens", "120"]
    code = "from ia_mech.collect.command import main; raise SystemExit(main())"
    given = [sys.executable, "-c", code, *words, "--out", str(out), "--ray"]
    process = subprocess.Popen(given, stderr=subprocess.PIPE, text=True)
    while not list(out.glob("manifests/*.json")) and process.poll() is None:
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    said = process.communicate()[1]
    assert process.returncode == 130 and "Traceback" not in said
    assert said.splitlines()[-2].startswith(f"interrupted; kept in {out}: ")


@pytest.mark.slow
def test_an_actor_that_always_ends_is_named_with_its_last_line(local, tiny_model_dir):
    team = team_of(ModelSpec(name=tiny_model_dir), Crew(ray=local), told := Silent())
    team.begin(lambda *_: None)
    team.spread(Crew(1, 1), 1)
    with pytest.raises(UserError, match=r"an actor of the cluster ended 4 times \(\S+: .+\)"):
        team.call(lambda *_: os._exit(1))
    assert sum("is computed again" in line for line in told.lines) == 4


@pytest.mark.slow
def test_a_node_that_is_killed_and_one_that_joins_cost_no_row(tiny_model_dir, tmp_path, capfd):
    utils = pytest.importorskip("ray.cluster_utils")
    words = ["--model", tiny_model_dir, *WORDS, "--limit", "24", "--max-new-tokens", "120"]
    whole = call(sample, [*words, "--out", str(tmp_path / "whole")], capfd).run
    node = {"num_cpus": 1, "object_store_memory": 100 * 2**20}
    nodes = utils.Cluster(initialize_head=True, head_node_args=node | {"include_dashboard": False})
    try:
        second, out = nodes.add_node(**node), tmp_path / "out"
        code = "from ia_mech.collect.command import main; raise SystemExit(main())"
        words += ["--out", str(out), "--ray", nodes.address]
        with (tmp_path / "err").open("w") as err:
            process = subprocess.Popen([sys.executable, "-c", code, *words], stderr=err)
            while len(list(out.glob("manifests/*.json"))) < 2 and process.poll() is None:
                time.sleep(0.1)
            assert process.poll() is None, "it ended before the node was killed"
            nodes.remove_node(second, allow_graceful=False)
            nodes.add_node(**node)
            assert process.wait() == 0, (tmp_path / "err").read_text()
    finally:
        nodes.shutdown()
    assert Run.open(out).digest() == whole.digest()
    assert "what was under way there is computed again" in (tmp_path / "err").read_text()
