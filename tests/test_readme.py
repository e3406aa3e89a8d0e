"""The README's example, run as it stands: embedded model, command line, Python."""

import re
import shlex
from pathlib import Path

from experiments.decoupling import __main__ as decoupling
from experiments.likelihood import __main__ as likelihood
from experiments.perturbations import __main__ as perturbations
from experiments.probe_validation import __main__ as validate
from experiments.temperature_sweep import __main__ as temperature_sweep
from ia_mech import sample
from ia_mech import sample as options
from ia_mech.judge import __main__ as judge_options
from ia_mech.models import embedded
from ia_mech.rates import __main__ as rates_options
from ia_mech.run import labels, layout
from probes import options as probe_options
from probes import transfer

README = (Path(__file__).parent.parent / "README.md").read_text(encoding="utf-8")


def test_the_example_runs_on_the_embedded_model(tmp_path, monkeypatch, capsys):
    model = embedded.directory().resolve()  # fetched at most once per checkout
    (tmp_path / "cache" / "models").mkdir(parents=True)
    (tmp_path / "cache" / "models" / model.name).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("IA_MECH_CACHE", raising=False)
    section = README.partition("## From Python")[2]
    command = re.search(r"```bash\n(python -m ia_mech\.sample .*)\n```", section)[1]
    assert sample.main(shlex.split(command)[3:]) == 0
    blocks = re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL)
    assert len(blocks) == 2
    capsys.readouterr()
    names: dict = {}
    for code in blocks:
        exec(compile(code, "README.md", "exec"), names)
    shown = capsys.readouterr().out
    assert "maths-01" in shown and "instructions-01" in shown and "open-01" in shown
    assert "torch.Size([3, 576])" in shown
    assert names["verdicts"][0].category in shown
    assert re.search(r"^\d\.\d\d \[\d\.\d\d, \d\.\d\d\]$", shown, re.MULTILINE)


def test_every_column_is_documented():
    documented = set(re.findall(r"`…?([a-z_]+)`", README))
    for column in [
        *layout.contexts_schema([]).names,
        *layout.GENERATIONS.names,
        *labels.JUDGEMENTS.names,
        *labels.ANNOTATIONS.names,
    ]:
        stem = column.removeprefix("reference_")
        suffixes = [f"_{s}" for s in ("tempered", "with_end") if column.endswith(f"_{s}")]
        assert {column, stem, *suffixes} & documented, column


def test_every_flag_in_the_readme_exists():
    judge = judge_options.build_parser()
    commands = judge._subparsers._group_actions[0].choices.values()
    probes = [probe_options.build_parser(), transfer.build_parser(), validate.build_parser()]
    experiments = [
        one.build_parser() for one in (decoupling, likelihood, perturbations, temperature_sweep)
    ]
    parsers = [options.build_parser(), rates_options.build_parser(), judge, *commands]
    parsers += [*probes, *experiments]
    help_text = "".join(parser.format_help() for parser in parsers)
    for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README)):
        assert flag in help_text, flag


def test_no_text_of_a_model_breaks_out_of_its_block():
    opened = ""
    for line in README.splitlines():
        fence = re.match(r"`{3,}", line)
        if fence and not opened:
            opened = fence[0]
            assert line.removeprefix(opened) in ("bash", "python", "text"), line
        elif fence and len(fence[0]) >= len(opened):
            assert line == opened
            opened = ""
    assert not opened
