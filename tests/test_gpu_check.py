"""The command for a machine with a GPU, on one without."""

import json
import os

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu_check import PARTS, PEERS


def dies(bench):
    yield {"rows": 1}
    os._exit(1)


def fails(bench):
    yield {"rows": 2}
    raise RuntimeError("CUDA error:\nan illegal memory access")


@pytest.mark.slow
def test_every_part_runs_in_small_and_one_that_fails_ends_no_other(tmp_path, capfd, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(gpu_check, "PARTS", {"dies": dies, **PARTS, "fails": fails})
    out = tmp_path / "report.json"
    assert gpu_check.main(["--cpu", "--out", str(out)]) == 1
    report, printed = json.loads(out.read_text()), capfd.readouterr().out
    parts = report["parts"]
    assert [*parts] == ["dies", *(name for name in PARTS if name not in PEERS), "fails"]
    errors = {name: found["error"] for name, found in parts.items() if found["error"]}
    message = "RuntimeError: CUDA error: an illegal memory access"
    assert errors == {"dies": "its process died", "fails": message}
    assert all(found["measured"] for found in parts.values())
    assert parts["steps"]["measured"][-1]["rows unlike eager"] == 0
    assert parts["dies"]["measured"] == [{"rows": 1}] and f"   failed: {message}\n" in printed
    assert f"failed: dies, fails; all figures are in {out}\n" in printed


def test_a_part_has_only_so_much_time(capfd, monkeypatch):
    monkeypatch.setattr(gpu_check, "ALL", 0)
    [(name, found)] = gpu_check.measured({"dies": dies}, on_cpu=True)
    assert (name, found["error"], found["measured"]) == ("dies", "there was no time left", [])


def test_the_aims_are_said_as_far_as_they_were_measured():
    step = {"steps": "captured", "step_ms": 9.0, "of_limit": 2.25, "outside_s": 0.5, "job_s": 1.07}
    parts = {
        "steps": {"measured": [step | {"tokens_s": 60_000.0}], "error": ""},
        "static": {"measured": [{"tokens_s": 20_000.0}], "error": ""},
        "continuous": {"measured": [], "error": "its process died"},
    }
    assert gpu_check.summary(parts) == [
        "a step: 9.00 ms, 2.2 times its limit (wanted: 2.5); outside of steps: 0.50 of 1.07 s "
        "(wanted: 0.7)",
        "3.0 times static (wanted: 4)",
    ]
    assert gpu_check.summary({}) == []


def test_bad_input_is_refused_in_one_line(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "report")]) == 2
    assert capfd.readouterr() == (
        "",
        "error: no CUDA device is available here; use a machine with a GPU, or --cpu\n",
    )
    monkeypatch.setattr(gpu_check, "PARTS", {"dies": dies})
    assert gpu_check.main(["--cpu", "--out", str(tmp_path)]) == 2
    assert "can't be written (Is a directory); give another --out" in capfd.readouterr().err


def test_a_wrong_kernel_fails(monkeypatch):
    kernel = pytest.importorskip("ia_mech.engine.attend_kernel", exc_type=ImportError)
    honest, bench = kernel.attend, gpu_check.Bench(on_cpu=True)
    monkeypatch.setattr(kernel, "attend", lambda *given, **more: honest(*given, **more) * 1.001)
    with pytest.raises(RuntimeError, match="a kernel is wrong"):
        [*gpu_check.kernels(bench)]
