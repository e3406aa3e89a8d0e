"""The command for the first user with a GPU, on a machine without one."""

import pytest
import torch

from benchmarks import gpu_check


def test_without_a_gpu_it_ends_in_one_line_before_anything_is_done(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--out", str(tmp_path / "report")]) == 2
    printed = capfd.readouterr()
    assert printed.err == "error: no CUDA device is available here; use a machine with a GPU\n"
    assert printed.out == "" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("statement", "status"), [("print('done')", 0), ("1 / 0", 1)])
def test_both_steps_are_in_the_report_and_a_failure_is_the_status(
    statement, status, tmp_path, capfd, monkeypatch
):
    (tmp_path / "first.py").write_text(statement)
    (tmp_path / "second.py").write_text("print('the last line')")
    monkeypatch.setattr(gpu_check, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_check, "STEPS", (("first",), ("second", "word")))
    monkeypatch.setattr(gpu_check, "facts", lambda: "a GPU\n")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_check.main(["--out", str(tmp_path / "report")]) == status
    report = (tmp_path / "report").read_text()
    assert report == capfd.readouterr().out
    assert report.startswith("a GPU\n\n$ python -m first\n")
    assert "done" in report or "ZeroDivisionError" in report
    assert "$ python -m second word\nthe last line\n" in report
    assert f"failed: {'first' if status else 'nothing'}; the report is" in report


def test_a_report_that_cannot_be_written(tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "can't be written (Is a directory); give another --out" in capfd.readouterr().err
