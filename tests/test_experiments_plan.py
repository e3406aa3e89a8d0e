"""What a study costs: the formulas by hand, and its commands."""

import shlex
from pathlib import Path

import pytest
from shell import call, refusal

from experiments.plan import MEASURED, main, read
from ia_mech.collect.command import build_parser, parse_config
from ia_mech.stats.intervals import wilson

STUDY = """
[grid]
temperatures = [0.5, 1.0]
samples = 4
max_new_tokens = 50
turn_tokens = 20
responses = 2
positions = 3
header_logits = "none"
rate = 0.2
design_effect = 1.5
precision = 0.05
dollars_per_device_hour = 3
devices = 16

[[models]]
name = "org/big"
layers = 9
d_model = 100
vocab = 1000
devices = 8
prefill_tokens_per_s = 1000
decode_tokens_per_s = 100

[[datasets]]
name = "gsm8k"
contexts = 1000
context_tokens = 300
response_tokens = 200
"""


@pytest.fixture
def study(tmp_path):
    def write(text: str = STUDY):
        (tmp_path / "study.toml").write_text(text)
        return tmp_path / "study.toml"

    return write


def test_the_formulas(study):
    grid, (cell,) = read(study())
    assert (cell.contexts, cell.turns) == (2000, 2000 * 9)
    assert cell.prefilled == 2000 * 300 + 1000 * 100  # contexts, and prompts of responses once
    assert cell.decoded == 18_000 * 20 + 2000 * 200
    assert cell.hours == pytest.approx((700_000 / 1000 + 760_000 / 100) * 8 / 3600)
    held = cell.bytes
    assert held["residuals"] == 2000 * 3 * 10 * 100 * 2 and held["header logits"] == 0
    assert held["turns"] == 18_000 * (20 * 50 + 100)
    assert held["contexts"] == 2000 * (10 * 300 + 2000) + 8000
    # 1.96² · 0.2 · 0.8 / 0.05² independent turns, times the design effect, over 4 samples
    assert grid.wanted == 93
    assert cell.shards == 2  # 16 devices, 8 to a shard


def test_a_point_has_the_precision_that_was_asked_for(study):
    """By Wilson's interval, which comes from another formula."""
    grid, _ = read(study(STUDY.replace("design_effect = 1.5", "design_effect = 1")))
    turns = grid.wanted * grid.samples
    low, high = wilson(grid.rate * turns, turns)
    assert (high - low) / 2 == pytest.approx(grid.precision, rel=0.03)


def test_the_commands_are_those_of_the_job(study, capfd):
    outcome = call(main, [str(study())], capfd)
    assert outcome.status == 0
    (line,) = [one for one in outcome.out.splitlines() if "ia_mech.sample" in one]
    launch, _, words = line.partition(" -m ia_mech.sample ")
    assert launch == "torchrun --nproc-per-node 8" and "# I = 1 … 2" in line
    args = build_parser().parse_args(shlex.split(words, comments=True))
    config = parse_config(args)
    assert config.model.tensor_parallel == 8 and config.responses == 2
    assert config.grid.rows()[-1] == (1.0, 3) and args.shard == "I/2"
    assert "python -m ia_mech.merge cache/study/big-gsm8k" in outcome.out
    other = STUDY.replace("devices = 8", "devices = 8\ntensor_parallel = false")
    shown = call(main, [str(study(other))], capfd).out
    assert "python -m ia_mech.sample --model org/big" in shown and "--device-map auto" in shown


def test_what_is_not_known_is_left_out(study, capfd):
    text = STUDY.replace("decode_tokens_per_s = 100", "")
    assert read(study(text))[1][0].hours is None
    assert "hours and dollars of org/big are not known" in call(main, [str(study(text))], capfd).out
    text = text.replace("org/big", "smollm2-135m-instruct").replace(
        "prefill_tokens_per_s = 1000", ""
    )
    (cell,) = read(study(text))[1]
    assert (
        cell.model.decode_tokens_per_s == MEASURED["smollm2-135m-instruct"]["decode_tokens_per_s"]
    )


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        ("samples = 4", "", "grid lacks 'samples'; add it"),
        ("samples = 4", "samples = 'many'", "grid: samples = 'many' can't be"),
        ("samples = 4", "samples = true", "grid: samples = True can't be"),
        ("samples = 4", "samples = 0", "samples and design_effect have to be above 0"),
        ("rate = 0.2", "rate = 1.0", "rate below 1"),
        ("layers = 9", "layers = 9\ncolour = 'red'", "models.1 has an unknown 'colour'; it takes"),
        ("[[datasets]]", "[[data]]", "has an unknown 'data'"),
        ("temperatures = [0.5, 1.0]", "temperatures = [0.5", "can't be read"),
        ("contexts = 1000", "contexts = -1", "datasets.1: contexts = -1 can't be"),
        ("devices = 8", "devices = 0", "a model needs at least one device"),
        ("turn_tokens = 20", "turn_tokens = 600", "600 is more than max_new_tokens"),
        ("response_tokens = 200", "response_tokens = 2000", "more than context_tokens"),
        (
            "[[datasets]]",
            "[[datasets]]\nname = 'a'\ncontexts = 1\ncontext_tokens = 1\n" * 2 + "[[datasets]]",
            "lists a 2 times; once under [[datasets]]",
        ),
    ],
)
def test_a_study_that_cannot_be_is_refused(study, capfd, old, new, problem):
    assert problem in refusal(call(main, [str(study(STUDY.replace(old, new)))], capfd))


def test_the_example_is_of_the_paper_s_size():
    grid, cells = read(Path(__file__).parents[1] / "docs" / "study.toml")
    assert len(cells) == 11 * 5 and grid.wanted == 433
