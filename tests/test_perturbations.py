"""python -m experiments.perturbations: what it samples, judges, compares and refuses."""

import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent
from shell import call, files, refusal

from experiments.common.command import write_estimates
from experiments.decoupling import __main__ as decoupling
from experiments.likelihood import __main__ as likelihood
from experiments.perturbations.__main__ import main
from experiments.perturbations.analyse import (
    DISTANCE,
    HELD,
    LESS,
    RATE,
    REFERENCE,
    RELATIVE,
    SHARE,
    displacements,
    estimates,
    typical_distance,
    verdicts,
)
from experiments.perturbations.conditions import CONDITIONS
from experiments.perturbations.read import read
from experiments.perturbations.sample import read_base, under_conditions
from experiments.temperature_sweep import __main__ as temperature_sweep
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.data.conversations import Conversation
from ia_mech.display import Quiet
from ia_mech.engine.plan import Grid
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN, items_of, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.models.load import ModelSpec
from ia_mech.run import Run
from ia_mech.stats import cluster_mean, paired_difference

GRID = Grid((1.0,), 3, 5, 0)
KEYS = ["context_id", "temperature", "sample"]
NO_LENDER = (
    "condition swap is left out: none of these conversations has another response of its dataset "
    "to swap with."
)
CHATS = [one | {"of": "plain"} for one in scored.CONVERSATIONS]


@pytest.fixture(scope="module")
def sampled(tiny_subject, tiny_model_dir, tmp_path_factory):
    """Make a judged run of the tiny model, as the command line would."""

    def make(conversations=CHATS, judge: bool = True, **options) -> Run:
        folder = tmp_path_factory.mktemp("base")
        options = {"grid": GRID, "swaps": 0, "model": ModelSpec(tiny_model_dir)} | options
        data = scored.dataset(folder / "chats.jsonl", conversations)
        config = SampleConfig(dataset=data, limit=None, **options)
        run = collect(config, tiny_subject, folder / "run", Silent())
        if judge:
            label_run(run, RulesJudge(), "rules", Quiet())
        return run

    return make


@pytest.fixture(scope="module")
def plain(sampled) -> Run:
    """Judged, unperturbed; tests leave it as it is."""
    return sampled()


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory) -> Path:
    """What the command wrote of all conditions; tests leave it as it is."""
    out = tmp_path_factory.mktemp("perturbed") / "out"
    assert main([str(plain.path), "--out", str(out), "--resamples", "100"]) == 0
    return out


@pytest.fixture(scope="module")
def run(folder) -> Run:
    return Run.open(folder / "run")


@pytest.fixture(scope="module")
def compared(plain, run):
    return read(read_base([plain.path]), run, "rules", [])


@pytest.fixture
def perturb(capfd):
    def command(*words):
        return call(main, [str(word) for word in words], capfd)

    return command


@pytest.fixture
def refused(perturb):
    return lambda *words: refusal(perturb(*words))


def context(run: Run, name: str) -> pd.Series:
    return run.contexts.set_index("context_id").loc[name]


# -- what is sampled ------------------------------------------------------------------------------


def test_every_source_appears_in_every_condition(plain, run):
    pairs = run.contexts.groupby("perturbation")["source_id"].agg(sorted)
    assert list(pairs.index) == sorted(CONDITIONS)
    assert all(sources == sorted(plain.contexts["source_id"]) for sources in pairs)


def test_a_response_that_stays_has_the_same_random_numbers(plain, run):
    """``shuffle`` leaves one sentence as it is: what is sampled then is what was sampled before."""
    how = run.contexts["metadata"].map(lambda text: json.loads(text)["how"])
    kept = run.contexts[(how == "unchanged") & (run.contexts["perturbation"] == "shuffle")]
    assert len(kept) >= 3
    before = plain.generations.set_index(KEYS)
    for name in kept["context_id"]:
        own = run.generations[run.generations["context_id"] == name]
        assert len(own) == 4
        for _, row in own.iterrows():
            same = before.loc[(name.partition("~")[0], row["temperature"], row["sample"])]
            np.testing.assert_array_equal(row["token_ids"], same["token_ids"])
            np.testing.assert_allclose(row["logprobs_raw"], same["logprobs_raw"], atol=1e-4)


@pytest.mark.parametrize("condition", CONDITIONS)
def test_references_are_scored_in_the_context_that_the_condition_made(condition, run, tiny_subject):
    """Against one plain forward pass over context and turn."""
    chat = ChatFormat(tiny_subject.tokenizer)
    row = context(run, f"c1~{condition}")
    messages, header = tuple(map(dict, row["messages"])), CONDITIONS[condition].header
    conversation = Conversation("c1", "c1", "d", messages, row["reference"], header=header)
    made, turn = rendered(chat, conversation)
    assert made.ids == row["token_ids"].tolist()
    assert turn == row["reference_token_ids"].tolist()
    own = scored.logprobs(tiny_subject.model, made.ids, [*turn, chat.closing_id])
    assert row["reference_logprob"] == pytest.approx(own[: len(turn)].sum(), abs=1e-4)


def test_perturbed_contexts_are_no_lenders_and_are_scored_after_nothing_else(
    run, tiny_subject, tmp_path
):
    assert run.contexts["swapped_from"].isna().all()
    assert run.contexts["candidates"].dropna().map(len).eq(1).all()
    mixed = tmp_path / "mixed.jsonl"
    rows = (run.path.parent / "conversations.jsonl").read_text().splitlines()
    own = [json.loads(row) for row in rows if '"c0~ask"' in row or '"c1~ask"' in row]
    for row in own[:1]:
        row |= {"id": "c0", "perturbation": "none", "metadata": {}}
    mixed.write_text("".join(json.dumps(row) + "\n" for row in own))
    config = SampleConfig(dataset=str(mixed), limit=None, grid=Grid((), 1, 2), swaps=2)
    there = collect(config, tiny_subject, tmp_path / "run", Silent())
    assert there.contexts["perturbation"].tolist() == ["none", "ask"]
    assert there.contexts["swapped_from"].isna().all()  # the other one is perturbed
    assert there.contexts["reference_empty_contrast_bits"].notna().tolist() == [True, False]


def test_swapped_responses_are_of_another_source_of_the_dataset(plain, run):
    said = set(plain.contexts["messages"].map(lambda messages: messages[-1]["content"]))
    for name in plain.contexts["context_id"]:
        own = context(plain, name)["messages"][-1]["content"]
        lent = context(run, f"{name}~swap")["messages"][-1]["content"]
        assert lent != own and lent in said - {""}


# -- judging --------------------------------------------------------------------------------------


def test_the_judge_is_shown_what_the_model_was_given_and_the_unperturbed_response(plain, run):
    shown = {item.response for item in items_of(run)}
    before = {item.response for item in items_of(run, unperturbed=True)}
    assert before == {item.response for item in items_of(plain)} != shown
    assert run.labels.judges == ["rules", "rules" + UNSEEN]
    assert run.labels.record("judgements", "rules" + UNSEEN)["unperturbed"] is True


def test_both_verdicts_are_read_as_what_they_are(plain, run, compared):
    """Against the judge itself, turn by turn."""
    judge, turns = RulesJudge(), compared.turns.set_index("context_id")
    for name in ("c1~swap", "c5~remove", "c1~ask"):
        own = turns.loc[[name]].sort_values(["temperature", "sample"])
        texts = run.generations[run.generations["context_id"] == name]
        messages = context(run, name)["messages"]
        before = context(plain, name.partition("~")[0])["messages"]
        for column, used in (("genuine", messages), ("held", before)):
            items = [
                type(items_of(run)[0])(used[-2]["content"], used[-1]["content"], text)
                for text in texts["text"]
            ]
            said = [judge.verdict(item).genuine for item in items]
            assert own[column].tolist() == [float(s) for s in said]
    unperturbed = compared.turns[compared.turns["condition"] == "none"]
    pd.testing.assert_series_equal(unperturbed["held"], unperturbed["genuine"], check_names=False)


def test_verdicts_on_other_responses_don_t_pass_for_the_same(run, tmp_path):
    copied = Run.open(shutil.copytree(run.path, tmp_path / "run"))
    with pytest.raises(UserError, match="of turns after the unperturbed response"):
        label_run(copied, RulesJudge(), "rules" + UNSEEN, Quiet())
    with pytest.raises(UserError, match="of turns after another response"):
        label_run(copied, RulesJudge(), "rules", Quiet(), unperturbed=True)


# -- displacement ---------------------------------------------------------------------------------


def test_displacement_is_the_distance_over_the_distance_between_conversations(plain, run, compared):
    moved = {(m.condition, m.layer, m.position): m for m in displacements(compared)}
    names = plain.contexts["context_id"].tolist()
    for condition, layer, position in (("swap", 2, "header_last"), ("ask", 4, "header_0")):
        before = plain.residuals(layer, position).double().numpy()
        order = run.contexts["context_id"].tolist()
        at = [order.index(f"{name}~{condition}") for name in names]
        after = run.residuals(layer, position).double().numpy()[at]
        gaps = [
            np.linalg.norm(a - b) for i, a in enumerate(before) for b in before[i + 1 :]
        ]  # all are of one dataset and of different sources
        distance = np.linalg.norm(after - before, axis=1)
        found = moved[condition, layer, position]
        np.testing.assert_allclose(found.distance, distance / np.mean(gaps), rtol=1e-9)
        np.testing.assert_allclose(
            found.relative, distance / np.linalg.norm(before, axis=1), rtol=1e-9
        )


def test_the_header_s_embedding_stays_and_so_does_an_unchanged_context(compared, plain):
    all_moved = list(displacements(compared))
    moved = {(m.condition, m.layer, m.position): m.distance for m in all_moved}
    for m in all_moved:
        if (m.condition, m.layer, m.position) == ("swap", 0, "header_last"):
            assert (m.relative == 0).all()
    assert np.isnan(moved["swap", 0, "header_last"]).all()  # 0 of 0: the token alone
    short = plain.contexts["context_id"].tolist().index("c0")  # "408.": nothing to shuffle
    assert moved["shuffle", 4, "header_last"][short] < 1e-4 < moved["swap", 4, "header_last"][short]
    assert (moved["header_only", 4, "header_last"] > 0.01).all()


def test_distances_are_within_a_dataset_and_between_sources():
    states = np.array([[0.0], [1.0], [3.0], [100.0], [np.nan], [7.0]])
    datasets = np.array(["a", "a", "a", "b", "a", "b"])
    sources = np.array(["s", "s", "t", "u", "v", "u"])
    found = typical_distance(states, datasets, sources)
    assert found[:3] == pytest.approx(2.5) and found[4] == pytest.approx(2.5)  # (3 + 2) / 2
    assert np.isnan(found[[3, 5]]).all()  # one source only


# -- estimates ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found(compared) -> pd.DataFrame:
    return estimates(compared, resamples=100)


def pick(found: pd.DataFrame, quantity: str, **names) -> pd.Series:
    rows = found[found["quantity"] == quantity]
    for name, value in names.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def test_rates_and_differences_are_those_of_the_turns(compared, found):
    at = compared.turns[compared.turns["temperature"] == 1.0]
    own, none = (at[at["condition"] == name] for name in ("swap", "none"))
    for quantity, column in ((RATE, "genuine"), (HELD, "held")):
        row = pick(found, quantity, condition="swap", temperature=1.0)
        mean = cluster_mean(own[column], own["source"], proportion=True)
        assert (row["value"], row["low"], row["high"]) == (mean.value, mean.low, mean.high)
        row = pick(found, quantity + LESS, condition="swap", temperature=1.0)
        paired = paired_difference(own[column], own["source"], none[column], none["source"])
        assert (row["value"], row["p"]) == (paired.difference.value, paired.p)
    shares = found[(found["quantity"] == SHARE) & (found["temperature"] == 1.0)]
    sums = shares.groupby("condition")["value"].sum()
    np.testing.assert_allclose(sums, 1.0)
    assert set(sums.index) == {*CONDITIONS, "none"}


def test_references_lose_what_the_stored_scores_say(compared, found):
    contexts = compared.contexts.set_index(["condition", "pair"])["logprob"]
    gone = (contexts["swap"] - contexts["none"]).dropna() / np.log(2)
    row = pick(found, REFERENCE + LESS, condition="swap")
    assert row["value"] == pytest.approx(gone.mean()) and row["sources"] == len(gone)
    assert pick(found, REFERENCE, condition="none")["rows"] == len(gone)


def test_tests_of_one_quantity_are_corrected_together(found):
    for quantity in (RATE + LESS, HELD + LESS, REFERENCE + LESS):
        rows = found[found["quantity"] == quantity].sort_values("p")
        smallest = rows.iloc[0]
        assert smallest["p_holm"] == pytest.approx(min(1, len(rows) * smallest["p"]))
        assert (rows["p_holm"] >= rows["p"]).all()
    assert found.loc[found["quantity"].isin([RATE, DISTANCE, RELATIVE]), "p"].isna().all()


def planted(before: float, p: float = 0.001, temperature: float = 1.0, **after) -> pd.DataFrame:
    """The held rates of conditions, and their differences from the unperturbed one."""
    rows = []
    for condition, rate in {"none": before, **after}.items():
        names = {"dataset": "d", "condition": condition, "temperature": temperature}
        rows.append(names | {"quantity": HELD, "value": rate, "high": 0.9, "rows": 50})
        if condition != "none":
            less = {"value": rate - before, "low": rate - before - 0.1, "high": rate - before + 0.1}
            rows.append(names | {"quantity": HELD + LESS, "p_holm": p, **less})
            rows.append(names | {"quantity": "detectable difference", "value": 0.123})
    return pd.DataFrame(rows).astype({"rows": "Int64"})


REACTS = "The rate falls without the response: what was measured reacts to it."


def test_the_falsifier_speaks_of_a_reaction_only_where_all_rates_fall():
    (line,) = verdicts(planted(0.5, remove=0.1, swap=0.2, header_only=0.05), 0.95)
    assert line.startswith("falsifier, T = 1: remove -0.400 [-0.500, -0.300], p=0.001; swap -0.300")
    assert "header_only -0.450" in line and line.endswith(REACTS)
    (line,) = verdicts(planted(0.5, remove=0.1, swap=0.2), 0.95)
    assert line.endswith(REACTS)


@pytest.mark.parametrize(
    ("planting", "failed"),
    [
        ({"remove": 0.1, "swap": 0.6}, "swap isn't"),  # risen, however surely
        ({"remove": 0.6, "swap": 0.6, "header_only": 0.6}, "remove and swap aren't"),
        ({"remove": 0.1, "swap": 0.2, "p": 0.06}, "remove and swap aren't"),
    ],
)
def test_the_falsifier_says_so_where_a_rate_does_not_fall(planting, failed):
    (line,) = verdicts(planted(0.5, **planting), 0.95)
    assert f"{failed} shown to lower the rate" in line and REACTS not in line
    assert "(detectable: 0.123)" in line
    if "p" in planting:
        (line,) = verdicts(planted(0.5, **planting), 0.9)
        assert line.endswith(REACTS)


def test_the_falsifier_does_not_trust_a_judge_that_takes_role_play_for_a_reaction():
    (line,) = verdicts(planted(0.5, remove=0.1, swap=0.2, header_only=0.5), 0.95)
    assert "header_only +0.000" in line and line.endswith("no evidence of a reaction.")


def test_the_falsifier_needs_a_condition_without_the_response():
    (line,) = verdicts(planted(0.5, ask=0.1, header_only=0.1), 0.95)
    assert line == "falsifier, T = 1: neither remove nor swap was made, so it can't be told."


def test_the_falsifier_has_nothing_to_say_where_no_turn_is_genuine():
    (line,) = verdicts(planted(0.0, temperature=0.0, remove=0.0, swap=0.0), 0.95)
    assert line == (
        "falsifier, greedy: no unperturbed turn is judged genuine (of 50, at most 0.900), so "
        "nothing could be lower."
    )


# -- the command ----------------------------------------------------------------------------------


def test_what_is_written(folder):
    names = {path.name for path in folder.iterdir()}
    pictures = {f"{name}.{kind}" for name in ("rates", "profile", "displacement", "references")
                for kind in ("png", "svg")}  # fmt: skip
    assert names == {"conversations.jsonl", "run", "estimates.parquet", *pictures}
    assert (pd.read_parquet(folder / "estimates.parquet")["quantity"] == RATE).sum() == 26


def test_the_second_time_nothing_is_sampled_and_no_model_is_loaded(
    perturb, plain, folder, monkeypatch
):
    def fail(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("experiments.perturbations.sample.load", fail)
    before = files(folder)
    outcome = perturb(plain.path, "--out", folder, "--resamples", "100")
    assert outcome.status == 0, outcome.err
    assert files(folder) == before
    tables = "follow-up rate by condition", "failure profile", "displacement of header_last"
    for said in (*tables, "real follow-ups", "falsifier, T = 1:", "shuffle was made in several"):
        assert said in outcome.out, outcome.out


def test_a_dry_run_shows_the_conditions_and_writes_nothing(perturb, plain, tmp_path):
    out = tmp_path / "out"
    outcome = perturb(plain.path, "--out", out, "--dry-run", "--conditions", "ask", "header_only")
    assert outcome.status == 0 and not out.exists()
    assert "ask " in outcome.out and "(header: alone)" in outcome.out
    assert "18 contexts, 72 user turns of at most 5 tokens" in outcome.out


def test_no_file_of_the_unperturbed_run_changes(perturb, plain, tmp_path):
    before = files(plain.path)
    outcome = perturb(plain.path, "--out", tmp_path / "o", "--limit", "2", "--conditions", "remove")
    assert outcome.status == 0, outcome.err
    assert files(plain.path) == before


def test_other_conversations_in_the_folder_are_refused(refused, plain, folder):
    line = refused(plain.path, "--out", folder, "--limit", "3")
    assert line.startswith(f"{folder} holds other conversations, or other conditions, than these; ")


def test_bad_input_is_refused_in_a_line(refused, sampled, plain, run, tmp_path):
    bare = sampled(CHATS[:2], judge=False)
    colder = sampled(CHATS[2:4], grid=Grid((0.5,), 3, 5, 0))
    other = sampled(CHATS[:2], grid=Grid((1.0,), 3, 6, 0))
    asked = sampled(CHATS[2:4], system="Be brief.")
    out = ("--out", tmp_path / "out")
    assert refused(bare.path, *out).startswith(f"{bare.path} has not been judged; run: python -m")
    assert "no condition 'slice'; use truncate, " in refused(
        plain.path, *out, "--conditions", "slice"
    )
    assert "temperature 0.7 is not in all runs (they have 1); " in refused(
        plain.path, *out, "--temperatures", "0.7"
    )
    assert "no temperature (they have none but greedy)" in refused(plain.path, colder.path, *out)
    assert "--samples 4: the runs have 3; " in refused(plain.path, *out, "--samples", "4")
    assert "differ in max_new_tokens (5, 6); " in refused(plain.path, other.path, *out)
    assert "differ in system (None, 'Be brief.')" in refused(plain.path, asked.path, *out)
    assert "is given twice; " in refused(plain.path, plain.path, *out)
    assert "holds perturbed contexts; " in refused(run.path, *out)
    assert "lies inside the run" in refused(plain.path, "--out", plain.path / "more")
    assert not (tmp_path / "out").exists()


def test_another_experiment_s_results_are_not_replaced(refused, plain, tmp_path):
    found = pd.DataFrame({"quantity": ["accuracy"]})
    out = tmp_path / "out"
    write_estimates(found, out, [plain], 0.95, experiment="decoupling")
    before = files(out)
    line = refused(plain.path, "--out", out)
    assert line == f"{out} holds results of decoupling; name another folder with --out"
    (out / "estimates.parquet").write_bytes(b"mine")
    assert "holds results of something else; " in refused(plain.path, "--out", out)
    assert files(out).keys() == before.keys()


def test_one_conversation_has_no_displacement_and_few_say_so(perturb, sampled, tmp_path):
    run = sampled(CHATS[:1])
    out = tmp_path / "out"
    outcome = perturb(run.path, "--out", out, "--conditions", "remove", "--resamples", "100")
    assert outcome.status == 0, outcome.err
    assert "no displacement: a dataset needs two sources" in outcome.out
    assert "fewer than 24 sources stand behind intervals of plain" in outcome.out
    assert "nan" not in outcome.out and not (out / "displacement.png").exists()
    found = pd.read_parquet(out / "estimates.parquet")
    assert found.loc[found["quantity"] == "detectable difference", "value"].isna().all()


def test_the_lender_of_a_swapped_response_is_named(plain, run):
    for name in plain.contexts["context_id"]:
        row = context(run, f"{name}~swap")
        lender = json.loads(row["metadata"])["lender"]
        lent = context(plain, lender)["messages"][-1]["content"]
        assert row["messages"][-1]["content"] == lent


def test_judging_against_an_unperturbed_response_needs_a_perturbed_context(plain):
    with pytest.raises(UserError, match="holds no perturbed context"):
        label_run(plain, RulesJudge(), "other", Quiet(), unperturbed=True)


def test_the_same_context_in_two_runs_is_refused(refused, sampled, plain, tmp_path):
    same = sampled(CHATS[:2], grid=Grid((1.0, 0.5), 3, 5, 0))
    line = refused(plain.path, same.path, "--out", tmp_path / "out")
    assert line.startswith("context c0 is in two runs; give one of them, or perturb them apart")


def test_other_experiments_take_no_perturbed_runs(run, capfd):
    line = refusal(call(likelihood.main, [str(run.path)], capfd))
    assert line == f"{run.path} holds perturbed contexts; give the run that they were made from"
    assert "perturbed" in refusal(call(temperature_sweep.main, [str(run.path)], capfd))
    words = [str(run.path), "--judge", "rules"]
    assert "were given, not written by" in refusal(call(decoupling.main, words, capfd))


def test_another_judge_is_asked_for_by_name(refused, plain, sampled, tmp_path):
    run = sampled(CHATS[:3])
    labels = run.labels.judgements("rules").to_dict("records")
    record = run.labels.record("judgements", "rules") | {"identity": {"kind": "llm"}}
    (run.path / "judgements" / "rules.parquet").unlink()
    run.labels.write_judgements("gpt", labels, record)
    line = refused_after_sampling(run, tmp_path / "out", refused)
    assert "has not been judged by 'gpt'; run python -m ia_mech.judge run " in line
    assert " --name gpt with the flags that judged " in line


def refused_after_sampling(run: Run, out: Path, refused) -> str:
    """The refusal, the second time: the first one is preceded by the progress of sampling."""
    main([str(run.path), "--out", str(out), "--conditions", "remove"])
    return refused(run.path, "--out", out, "--conditions", "remove")


# -- what can't be made ---------------------------------------------------------------------------


def chat_with(tokenizer, refusing: str) -> ChatFormat:
    """A format whose template refuses responses that hold a word."""
    import copy

    other = copy.deepcopy(tokenizer)
    other.chat_template = (
        "{% for m in messages %}{% if '" + refusing + "' in m['content'] %}"
        "{{ raise_exception('refused') }}{% endif %}{% endfor %}" + tokenizer.chat_template
    )
    return ChatFormat(other)


def test_conditions_and_conversations_that_can_t_be_made_are_left_out_and_said(tokenizer):
    two = [
        Conversation(
            name,
            name,
            "d",
            ({"role": "user", "content": "Why?"}, {"role": "assistant", "content": text}),
        )
        for name, text in (("a", "So it is. And so on."), ("b", "Because. I say so."))
    ]
    chat = chat_with(tokenizer, "So it is. And so on. ")  # with anything appended
    made, left, notes = under_conditions(two, ["ask", "remove"], chat, 0, None)
    assert [one.id for one in made] == ["b~ask", "b~remove"] and left == ["a"]
    assert notes[0].startswith("1 conversations are left out of all conditions")
    made, left, notes = under_conditions(
        two[:1], ["swap", "remove"], ChatFormat(tokenizer), 0, None
    )
    assert [one.id for one in made] == ["a~remove"] and left == []
    assert notes == [NO_LENDER]
    with pytest.raises(UserError, match="no condition can be made"):
        under_conditions(two[:1], ["swap"], ChatFormat(tokenizer), 0, None)
    with pytest.raises(UserError, match="tokens under remove"):
        under_conditions(two, ["remove"], ChatFormat(tokenizer), 0, 10)
