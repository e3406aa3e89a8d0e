"""``--ray``: a shard for each device; a dead worker costs a try, and a bad shard is named."""

import contextlib
import importlib.util
import threading
import time

import psutil
import pytest
from shell import call, refusal

from ia_mech.collect.command import main
from ia_mech.run import Run

INSTALLED = importlib.util.find_spec("ray") is not None
SMALL = ["--limit", "12", "--temperatures", "1", "--samples", "1", "--max-new-tokens", "4"]
SMALL += ["--batch-rows", "4", "--threads", "1"]


@pytest.mark.skipif(INSTALLED, reason="Ray is installed")
def test_a_missing_extra_is_named(tmp_path, capfd):
    line = refusal(call(main, ["--ray", "--out", str(tmp_path / "run")], capfd))
    assert line == "--ray needs Ray; install it: pip install 'ia-mech[ray]'"


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Ray isn't installed (ia-mech[ray])")
def test_workers_make_the_run_also_if_one_is_killed(tiny_model_dir, tmp_path, capfd):
    words = [*SMALL, "--model", tiny_model_dir, "--out"]
    whole = call(main, [*words, str(tmp_path / "whole")], capfd).run
    out, killed = tmp_path / "run", []

    def kill_one() -> None:
        while not killed:
            for one in psutil.Process().children(recursive=True):
                with contextlib.suppress(psutil.Error):  # it has ended meanwhile
                    if one.cmdline()[:1] == ["ray::shard"] and list(out.glob("manifests/*.json")):
                        one.kill()
                        killed.append(one.pid)
                        return
            time.sleep(0.05)

    thread = threading.Thread(target=kill_one, daemon=True)
    thread.start()
    outcome = call(main, [*words, str(out), "--ray"], capfd)
    assert outcome.status == 0, outcome.err
    assert killed and Run.open(out).digest() == whole.digest()
    assert len(Run.open(out).sessions) > 1


@pytest.mark.slow
@pytest.mark.skipif(not INSTALLED, reason="Ray isn't installed (ia-mech[ray])")
def test_what_is_wrong_with_a_shard_or_the_cluster_is_one_line(tiny_model_dir, tmp_path, capfd):
    words = [*SMALL, "--model", tiny_model_dir, "--out", str(tmp_path / "run"), "--ray"]
    line = refusal(call(main, [*words, "127.0.0.1:1"], capfd))
    assert line.startswith("no Ray cluster answers at 127.0.0.1:1 (")
    outcome = call(main, [*words, "--max-new-tokens", "4000"], capfd)
    assert outcome.status == 2 and "conversation maths-01: it needs" in outcome.err
