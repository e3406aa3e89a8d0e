"""The examples of the README and of docs/python.md, run on the embedded model."""

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ia_mech import sample
from ia_mech.models import embedded
from ia_mech.run import labels, layout

FETCH_ENCODER = embedded.encoder_directory  # before a tiny encoder stands in for it
ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGE = (ROOT / "docs" / "python.md").read_text(encoding="utf-8")


@pytest.fixture
def in_a_folder(tmp_path, monkeypatch) -> None:
    model = embedded.directory().resolve()  # fetched at most once per checkout
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IA_MECH_CACHE", "cache")


def test_the_examples_run_on_the_embedded_model_twice(in_a_folder, capsys):
    section = README.partition("## From Python")[2].partition("\n## ")[0]
    blocks = re.findall(r"```python\n(.*?)```", section + PAGE, re.DOTALL)
    blocks = [code for code in blocks if "transformer_lens" not in code]  # has its own test
    assert len(blocks) == 10
    few = "limit=5, temperatures=[1.0], samples=1, max_new_tokens=6"
    for _ in range(2):  # the second time in a folder that holds what the first left
        names: dict = {}
        for code in blocks:
            exec(compile(code.replace("limit=24", few), "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "maths-01" in shown and "instructions-01" in shown and "open-01" in shown
    for shape in ("[5, 576]", "[5, 3, 576]", f"[{len(names['sampled'])}, 576]"):
        assert f"torch.Size({shape})" in shown
    assert "'header_0': '<|im_start|>', 'header_1': 'user', 'header_last': '\\n'}" in shown
    assert len(names["predicted"]) == 5
    assert names["turns"].loc[0, "category"] in shown
    assert re.search(r"^\d\.\d\d \[\d\.\d\d, \d\.\d\d\]$", shown, re.MULTILINE)


@pytest.mark.slow  # TransformerLens takes long to import
def test_the_runs_states_are_those_of_transformer_lens(in_a_folder, capsys):
    sample(limit=2, out="cache/first", temperatures=[1.0], samples=1, max_new_tokens=1)
    section = PAGE.partition("## TransformerLens")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    exec(compile(code, "python.md", "exec"), {})
    shown = capsys.readouterr().out
    distances = re.findall(r"^blocks\.\d+\.hook_resid_post (\S+)$", shown, re.MULTILINE)
    assert len(distances) == 3 and max(map(float, distances)) < 1e-5
    assert "torch.Size([2, 7, 576])" in shown


def tutorial() -> list[dict]:
    notebook = json.loads((ROOT / "docs" / "tutorial.ipynb").read_text(encoding="utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def test_what_the_tutorial_imports_is_there():
    code = "".join("".join(cell["source"]) + "\n" for cell in tutorial())
    lines = [line for line in code.splitlines() if line.startswith(("from ", "import "))]
    assert len(lines) > 8
    exec("\n".join(lines), {})


@pytest.mark.slow
def test_the_tutorial_runs_on_the_embedded_model(tmp_path, monkeypatch):
    (tmp_path / "models").mkdir()
    for model in (embedded.directory().resolve(), FETCH_ENCODER().resolve()):
        (tmp_path / "models" / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path))
    cells = tutorial()
    assert not any(cell["outputs"] for cell in cells)
    names: dict = {}
    for cell in cells:
        code = "".join(cell["source"])
        code = re.sub(r"^!ia-mech (.*)$", r"command('\1')", code, flags=re.MULTILINE)
        names["command"] = lambda words: subprocess.run(
            [sys.executable, "-m", "ia_mech.console", *words.split()], check=True
        )
        *body, last = ast.parse(code).body  # a cell shows the value of its last expression
        exec(compile(ast.Module(body, []), "tutorial", "exec"), names)
        source = ast.unparse(last)
        if isinstance(last, ast.Expr):
            assert eval(source, names) is not None, source
        else:
            exec(source, names)
    assert (tmp_path / "cache" / "tutorial" / "report.html").stat().st_size > 100_000


def test_every_column_is_documented():
    documented = set(re.findall(r"`…?([a-z_]+)`", PAGE.partition("### Columns")[2]))
    for column in [
        *layout.contexts_schema([]).names,
        *layout.GENERATIONS.names,
        *labels.JUDGEMENTS.names,
        *labels.ANNOTATIONS.names,
    ]:
        stem = column.removeprefix("real_follow_up_")
        suffixes = [f"_{s}" for s in ("tempered", "with_end") if column.endswith(f"_{s}")]
        assert {column, stem, *suffixes} & documented, column
