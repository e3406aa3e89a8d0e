"""ia-mech perturbations: what it changes, samples, judges, compares and refuses."""

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scored
from conftest import Silent
from runs import sampled
from shell import call, files, refusal, worked
from test_report import no_tokenizer, unpacked

from experiments import change as changes
from experiments.change import (
    GENERIC_QUESTIONS,
    REACH,
    ask,
    contradict,
    other_response,
    sentences,
    shuffle_sentences,
    truncate,
)
from experiments.outcome import IN_ROLE, ONCE_IN_ROLE, RATE
from experiments.perturbations import (
    BITS,
    BITS_DIFFERENCE,
    CONDITIONS,
    DIFFERENCE,
    FITS_ORIGINAL,
    NAMES,
    Perturbations,
    apply_condition,
    main,
)
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import context_and_real_follow_up
from ia_mech.data.conversations import HEADERS, Conversation, open_conversations, validate
from ia_mech.display import Quiet
from ia_mech.judge import builtin_judge
from ia_mech.judge.judging import ON_UNPERTURBED, items_of, label_run
from ia_mech.rates.evidence import UNCHANGED, without_response
from ia_mech.report.__main__ import render_report
from ia_mech.run import Run
from ia_mech.settings import Settings
from ia_mech.stats import cluster_mean, holm, paired_difference

__all__ = ["no_tokenizer"]  # a fixture of the report's tests
DECODING = {"temperatures": (0.5, 1.0), "samples": 3, "max_new_tokens": 5}
CHATS = [one | {"of": "plain"} for one in scored.CONVERSATIONS]


@pytest.fixture(scope="module")
def plain(tiny_subject, tiny_model_dir, tmp_path_factory) -> Run:
    """A judged, unperturbed run as the command line makes it; tests leave it as it is."""
    folder = tmp_path_factory.mktemp("base")
    data = scored.dataset(folder / "chats.jsonl", CHATS)
    settings = Settings(dataset=data, limit=None, model=tiny_model_dir, **DECODING)
    run = sampled(settings, tiny_subject, folder / "run", Silent())
    label_run(run, builtin_judge(), "builtin", Quiet())
    return run


@pytest.fixture(scope="module")
def folder(plain, tmp_path_factory) -> Path:
    """What the command wrote; tests leave it as it is."""
    out = tmp_path_factory.mktemp("perturbed") / "out"
    assert main([str(plain.path), "--out", str(out), "--samples", "2"]) == 0
    return out


def test_the_worked_arm_compares_turns_paired_by_query(plain, tmp_path, capfd):
    out, last_sentence = tmp_path / "out", worked("worked_arm").LastSentence
    outcome = call(last_sentence.main, [str(plain.path), "--out", str(out)], capfd)
    assert outcome.status == 0, outcome.err
    found = pd.read_parquet(out / "estimates.parquet")
    shorter = Run.open(out / "without_its_last_sentence" / "run")
    whole = plain.contexts.set_index("context_id")["messages"]
    for _, one in shorter.contexts.iterrows():
        said, before = one["messages"][-1]["content"], whole[one["context_id"]][-1]["content"]
        assert said == "".join(sentences(before)[:-1]) != ""
    accepted = [
        labelled.groupby(["source_id", "temperature"])["follow_up"].mean().unstack()
        for labelled in (run.labelled("builtin") for run in (shorter, plain))
    ]
    less = (accepted[0] - accepted[1].loc[accepted[0].index]).mean()
    rows = found[found["quantity"] == DIFFERENCE]
    rows = rows[rows["term"] == "without its last sentence"].set_index("temperature")["value"]
    pd.testing.assert_series_equal(rows, less, check_names=False, check_dtype=False)


def test_arms_measure_something_else_of_turns_without_a_judge(plain, tmp_path, capfd):
    class Letters(worked("worked_arm").LastSentence):
        judged, measured = False, {"letters": (0, 400)}

        def measure(self, turns):
            return turns.assign(letters=turns["text"].str.len())[["letters"]]

    out = tmp_path / "out"
    outcome = call(Letters.main, [str(plain.path), "--out", str(out)], capfd)
    assert outcome.status == 0, outcome.err
    shorter = Run.open(out / "without_its_last_sentence" / "run")
    means = [
        run.generations.assign(letters=run.generations["text"].str.len())
        .groupby(["source_id", "temperature"])["letters"]
        .mean()
        .unstack()
        for run in (shorter, plain)
    ]
    found = pd.read_parquet(out / "estimates.parquet")
    found = found[found["term"] == "without its last sentence"].set_index("temperature")
    quantities = {
        "letters": means[0].mean(),
        "letters, minus unchanged": (means[0] - means[1].loc[means[0].index]).mean(),
    }
    for name, value in quantities.items():
        rows = found.loc[found["quantity"] == name, "value"]
        pd.testing.assert_series_equal(rows, value, check_names=False, check_dtype=False)
    said = json.loads((out / "result.json").read_text())["sentence"]
    assert "Letters, minus unchanged, of without its last sentence" in said


def test_the_report_says_how_many_turns_count_that_were_written_without_the_response(
    plain, tmp_path
):
    copy = Run.open(shutil.copytree(plain.path, tmp_path / "copy"))
    assert without_response(copy, "builtin") == ""
    assert main([str(copy.path), "--conditions", "remove", "--samples", "2"]) == 0
    written = Run.open(tmp_path / "copy-perturbations" / "remove" / "run")
    counts = written.labelled("builtin-unperturbed").groupby("temperature")["follow_up"]
    numbers = [f"{yes:g} of {of}" for yes, of in zip(counts.sum(), counts.count(), strict=True)]
    said = without_response(copy, "builtin")
    less = " (not shown to be fewer)"
    greedy, sampled = f"{numbers[0]} greedy ones{less}", f"{numbers[1]} sampled at T = 0.5{less}"
    assert said.endswith(f"that the judge calls follow-ups to it: {greedy} and {sampled}")
    assert without_response(copy, "another") == ""


@pytest.fixture(scope="module")
def written(folder) -> dict[str, Run]:
    """By condition the run of new turns."""
    return {name: Run.open(folder / name / "run") for name in CONDITIONS}


@pytest.fixture(scope="module")
def contexts(written) -> pd.DataFrame:
    """Of all conditions."""
    return pd.concat([run.contexts for run in written.values()], ignore_index=True)


@pytest.fixture(scope="module")
def turns(folder) -> pd.DataFrame:
    return pd.read_parquet(folder / "turns.parquet")


@pytest.fixture(scope="module")
def found(folder) -> pd.DataFrame:
    return pd.read_parquet(folder / "estimates.parquet")


@pytest.fixture
def perturb(capfd):
    return lambda *words: call(main, [str(word) for word in words], capfd)


def context(contexts: pd.DataFrame, name: str) -> pd.Series:
    return contexts.set_index("context_id").loc[name]


# -- what is sampled ------------------------------------------------------------------------------


def test_every_query_appears_under_every_condition_that_changes_it(plain, written, contexts):
    of = contexts.groupby("perturbation")["source_id"].agg(set)
    everything = set(plain.contexts["source_id"])
    assert set(of.index) == set(CONDITIONS)
    assert of["shuffle"] == {"c2"}  # the others have no two sentences that differ
    assert of["truncate"] == {"c1", "c2"}
    assert of["remove"] == everything - {"c6"}  # whose response is empty
    assert all(
        of[name] == everything for name in ("swap", "contradict", "generic_question", "header_only")
    )
    for run in written.values():
        assert run.settings["seed"] == plain.settings["seed"]  # the same random numbers
        assert run.settings["temperatures"] == [0.5] and run.settings["samples"] == 2


@pytest.mark.parametrize("condition", CONDITIONS)
def test_real_follow_ups_are_scored_in_the_context_that_the_condition_made(
    condition, contexts, tiny_subject
):
    """Against one plain forward pass over context and turn."""
    chat = ChatFormat(tiny_subject.tokenizer)
    row = context(contexts, f"c2~{condition}")
    messages, header = tuple(map(dict, row["messages"])), CONDITIONS[condition].header
    conversation = Conversation("c2", "c2", "d", messages, row["real_follow_up"], header=header)
    made, turn = context_and_real_follow_up(chat, conversation)
    assert made.ids == row["token_ids"].tolist()
    assert turn.words == row["real_follow_up_token_ids"].tolist()
    own = scored.logprobs(tiny_subject.model, made.ids, turn.whole)
    assert row["real_follow_up_logprob"] == pytest.approx(own[: len(turn.words)].sum(), abs=1e-4)


# -- judging --------------------------------------------------------------------------------------


def test_both_verdicts_are_read_as_what_they_are(plain, written, turns):
    """Both are the judge's own, turn by turn, after the changed and the unchanged conversation."""
    judge, by_context = builtin_judge(), turns.set_index("context_id")
    for name in ("c1~swap", "c5~remove", "c2~shuffle"):
        own = by_context.loc[[name]].sort_values(["temperature", "sample"])
        run = written[name.partition("~")[2]]
        texts = run.generations[run.generations["context_id"] == name]
        messages = context(run.contexts, name)["messages"]
        before = context(plain.contexts, name.partition("~")[0])["messages"]
        for column, used in (("follow_up", messages), (FITS_ORIGINAL, before)):
            items = [
                type(items_of(run)[0])(used[-2]["content"], used[-1]["content"], text)
                for text in texts["text"]
            ]
            said = [judge.rubric.follow_up(one.category) for one in judge.judge(items)]
            assert own[column].tolist() == [float(s) for s in said]
        assert run.labels.judges == ["builtin", "builtin" + ON_UNPERTURBED]
        assert run.labels.record("judgements", "builtin" + ON_UNPERTURBED)["unperturbed"] is True
    unchanged = turns[turns["condition"] == "none"]
    assert unchanged[FITS_ORIGINAL].tolist() == unchanged["follow_up"].tolist()
    assert len(unchanged) == len(plain.contexts) * 3 and set(unchanged["temperature"]) == {0, 0.5}


# -- estimates ------------------------------------------------------------------------------------


def pick(found: pd.DataFrame, quantity: str, **names) -> pd.Series:
    rows = found[found["quantity"] == quantity]
    for name, value in names.items():
        rows = rows[rows[name] == value]
    assert len(rows) == 1, rows
    return rows.iloc[0]


def test_rates_and_paired_differences_are_those_of_the_turns(turns, found):
    at = turns[turns["temperature"] == 0.5].assign(source=lambda f: f["context_id"].str[:2])
    for condition in ("swap", "shuffle"):
        own, none = (at[at["condition"] == name] for name in (condition, "none"))
        of = {"term": condition, "temperature": 0.5}
        row = pick(found, RATE, **of)
        mean = cluster_mean(own[FITS_ORIGINAL], own["source"], proportion=True)
        ends = mean.value, mean.low, mean.high
        assert [row["value"], row["low"], row["high"]] == pytest.approx(ends, nan_ok=True)
        row = pick(found, DIFFERENCE, **of)
        none = none[none["source"].isin(own["source"])]
        paired = paired_difference(
            own[FITS_ORIGINAL], own["source"], none[FITS_ORIGINAL], none["source"]
        )
        assert (row["value"], row["p"]) == (paired.difference.value, paired.p)
        assert row["sources"] == own["source"].nunique()


def test_likelihoods_are_compared_in_bits_on_the_contexts_that_changed(plain, contexts, found):
    def bits(of: pd.DataFrame) -> pd.Series:
        scores = of.set_index("context_id")["real_follow_up_logprob"].dropna()
        return scores.astype(float) / np.log(2)

    before, after = bits(plain.contexts), bits(contexts)
    assert pick(found, BITS, term="none")["value"] == pytest.approx(before.mean())
    for condition in ("swap", "shuffle", "header_assistant"):
        own = after[after.index.str.endswith(f"~{condition}")]
        own.index = own.index.str.partition("~").get_level_values(0)
        row = pick(found, BITS_DIFFERENCE, term=condition)
        assert row["value"] == pytest.approx((own - before).mean())
        assert row["sources"] == len(own)
    # Tests of one quantity are corrected together.
    for _, rows in found[found["p"].notna()].groupby("quantity"):
        np.testing.assert_allclose(rows["p_holm"], holm(rows["p"].to_numpy()))
    # None of 16 differences of 9 queries can be shown, nor one of 8 with fewer; so the tables say.
    rates = found[found["quantity"] == DIFFERENCE]
    assert len(rates) == 16 and np.isinf(rates["detectable"]).all()
    of_bits = found[found["quantity"] == BITS_DIFFERENCE]
    assert len(of_bits) == 8 and (np.isinf(of_bits["detectable"]) == (of_bits["sources"] < 9)).all()
    parts = {f"{part}, minus unchanged" for part in (IN_ROLE, ONCE_IN_ROLE)}
    assert set(found.loc[found["p"].notna(), "quantity"]) == {DIFFERENCE, BITS_DIFFERENCE, *parts}
    for _, one in found[found["quantity"] == RATE].iterrows():  # the parts' product is the rate
        of = {"term": one["term"], "temperature": one["temperature"]}
        once = found[(found["quantity"] == ONCE_IN_ROLE) & (found["term"] == of["term"])]
        once = once.loc[once["temperature"] == of["temperature"], "value"].sum()
        assert pick(found, IN_ROLE, **of)["value"] * once == pytest.approx(one["value"])


# -- the command ----------------------------------------------------------------------------------


def test_the_second_time_nothing_is_sampled_and_no_model_is_loaded(
    perturb, plain, folder, monkeypatch
):
    def fail(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("ia_mech.models.load.load", fail)
    before, base = files(folder), files(plain.path)
    outcome = perturb(plain.path, "--out", folder, "--samples", "2", "--full")
    assert outcome.status == 0, outcome.err
    after = files(folder)
    tables = {name for name in before if name.endswith((".parquet", ".jsonl"))}
    assert tables <= set(after) and all(after[name] == before[name] for name in tables)
    assert files(plain.path) == base
    verdict = outcome.out.splitlines()[0]
    none = "No change of the response is shown to move the follow-up rate"
    assert verdict.endswith(f"{none} (too few data to show any effect).")
    assert "\nControl: " in outcome.out
    for named in ("no response (remove)", "first half of the response (truncate)"):
        assert f" {named} " in outcome.out


def test_the_sentence_tells_only_changes_that_are_shown(plain, found):
    args = Perturbations.build_parser().parse_args([str(plain.path), "--conditions", "remove"])
    one = Perturbations([plain], args, Path())
    one.gate = one.verdicts.gate
    usual = {"dataset": "d", "sources": 24, "p_holm": 0.4, "low": -0.4, "high": 0.1}
    usual |= {"detectable": 0.36}
    rows = [
        {"quantity": quantity, "term": condition, "temperature": t, "value": -0.25} | usual
        for quantity in (DIFFERENCE, BITS_DIFFERENCE)
        for condition in CONDITIONS
        for t in ((0.0, 1.0) if quantity == DIFFERENCE else (np.nan,))
    ]
    told = pd.DataFrame(rows)
    nothing, control = one.conclude(told)
    unmoved = (
        "No change of the response is shown to move the follow-up rate (0.36 would have been "
        "shown with 80% power, uncorrected)."
    )
    assert nothing == unmoved
    less = "any conversation are not shown to be follow-ups less often. Judge's control failed"
    assert less in control
    removed = told["term"] == "remove"
    told.loc[removed & (told["temperature"] == 1), ["p_holm", "high"]] = 0.01, -0.1
    told.loc[removed & told["temperature"].isna(), ["p_holm", "value", "low", "high"]] = (
        *(0.01, 5.0, 1.0),
        9.0,
    )
    told.loc[(told["term"] == "header_only"), ["p_holm", "high"]] = 0.01, -0.1
    sentence, control = one.conclude(told)
    assert sentence == (
        "Removing the response lowers the follow-up rate by 0.25 [0.10, 0.40] at T = 1 and makes "
        "real follow-ups likelier by 5.0 [1.0, 9.0] bits."
    )
    assert control.startswith(
        "Turns that were written without any conversation are follow-ups less often by 0.25 "
        "[0.10, 0.40] for greedy turns and 0.25 [0.10, 0.40] at T = 1."
    )
    told.loc[told["quantity"] == DIFFERENCE, "p_holm"] = 0.4
    real = "Removing the response makes real follow-ups likelier by 5.0 [1.0, 9.0] bits."
    assert one.conclude(told).sentence == f"{real} {unmoved}"


def test_a_dry_run_writes_nothing_and_bad_input_is_refused(perturb, plain, folder, tmp_path):
    def refused(*words) -> str:
        return refusal(perturb(*words))

    out = ("--out", tmp_path / "out")
    planned = perturb(plain.path, *out, "--dry-run", "--queries", "3")
    assert planned.status == 0 and " conversations to sample 4 user turns after each" in planned.out
    used = "the greedy one and 3 of 3 at T = 0.5 (--samples), none at higher temperatures."
    assert f"compared in each conversation: {used}" in planned.out
    assert re.search(r"too few queries +with 3, no difference can be shown", planned.out)
    swapped = perturb(plain.path, *out, "--dry-run", "--queries", "2", "--conditions", "swap")
    assert "2 conversations to sample" in swapped.out  # donors are of the whole run
    assert not (tmp_path / "out").exists()
    holds = "holds other conversations, or other conditions, than these; give another --out"
    file = folder / "remove" / "conversations.jsonl"
    for more in ((), ("--dry-run",)):
        line = refused(plain.path, "--out", folder, "--queries", "3", *more)
        assert line.startswith(f"{file} {holds}") and line.endswith(f"or remove {file.parent}")
    copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "remove" / "conversations.jsonl").unlink()
    assert "is missing; " in refused(plain.path, "--out", copy)


def test_further_conditions_are_sampled_beside_those_that_are_there(perturb, plain, tmp_path):
    words = plain.path, "--out", tmp_path / "out", "--samples", "2", "--conditions"
    assert perturb(*words, "remove").status == 0
    rows = pd.read_parquet(tmp_path / "out" / "turns.parquet")
    planned = perturb(*words, "remove", "shuffle", "--dry-run").out
    assert planned.count("; done already") == 1 and "shuffle" in planned
    assert "remove" not in perturb(*words, "remove", "shuffle").err.partition("numbers went")[0]
    more = pd.read_parquet(tmp_path / "out" / "turns.parquet")
    assert set(more["condition"]) == {"none", "remove", "shuffle"}
    same = more[more["condition"] != "shuffle"].reset_index(drop=True)
    pd.testing.assert_frame_equal(same, rows)


def test_another_judge_has_to_be_run_by_its_user(perturb, plain, folder, tmp_path):
    base = Run.open(shutil.copytree(plain.path, tmp_path / "base"))
    said = base.labels.judgements("builtin").drop(columns=["decoy", "shown"]).astype(object)
    labels = said.where(said.notna(), None).to_dict("records")
    record = base.labels.record("judgements", "builtin") | {"identity": {"kind": "llm"}}
    base.labels.write_judgements("gpt", labels, record)
    copy = shutil.copytree(folder, tmp_path / "copy")
    line = refusal(perturb(base.path, "--judge", "gpt", "--out", copy, "--samples", "2"))
    runs = " ".join(str(copy / name / "run") for name in CONDITIONS)
    assert f"remove/run and {len(CONDITIONS) - 1} more runs: not judged by 'gpt'; " in line
    assert line.count(f"for run in {runs}; do ia-mech judge run $run --name gpt") == 2
    assert f" --name gpt{ON_UNPERTURBED} --unperturbed; done with the flags that" in line


# -- sentences ------------------------------------------------------------------------------------

TEXT = (
    "First, boil 2.5 l of water, i.e. a lot. Then add salt.\n\n"
    "1. Wait.\n2. Stir it well.\nDone? Serve it."
)
SEEDS = range(60)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.fixture(scope="module")
def builtin() -> list[Conversation]:
    return list(open_conversations("builtin"))


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "a", " a. ", "\n\na. b.\n\n\nc", TEXT, "é…\r\nb"]
)
def test_sentences_joined_are_the_text(text):
    assert "".join(sentences(text)) == text
    assert all(one.strip() for one in sentences(text)) or not text.strip()
    code = "```python\nx = 1\ny = 2. + 3\n```\n"  # is one sentence
    assert any("x = 1\ny = 2" in one for one in sentences(f"{text}\n\n{code}It prints 5."))


def test_shuffling_keeps_sentences_and_white_space_and_changes_the_order(builtin):
    for conversation in builtin:
        text = conversation.response
        changed = shuffle_sentences(text, rng(1))
        before, after = (Counter(one.split()) for one in (text, changed))
        assert before == after and changed != text
        assert text.count("\n") == changed.count("\n")
    assert shuffle_sentences("A b.\n\nC d.", rng()) == "C d.\n\nA b."
    assert shuffle_sentences("Only one.", rng()) is None
    assert shuffle_sentences("Yes.\nYes.", rng()) is None


def test_truncation_keeps_half_of_the_sentences_as_they_are():
    assert truncate("One. Two. Three. Four. Five.") == "One. Two."
    assert truncate("A b.\n\nC d.\n") == "A b." and truncate("Only one.") is None


def test_a_generic_question_is_asked_at_the_end():
    assert ask("", rng()) in GENERIC_QUESTIONS
    asked = {ask("It is blue. ", rng(seed)) for seed in range(100)}
    assert asked == {f"It is blue. {question}" for question in GENERIC_QUESTIONS}
    assert ask("1. A\n2. B", rng()).startswith("1. A\n2. B\n\n")


# -- contradiction --------------------------------------------------------------------------------


def test_the_final_number_becomes_another_one_and_nothing_else_changes():
    text = "There are 18 boxes. So 18 - 3 = 15. The answer is 15 boxes, or 15."
    for seed in SEEDS:
        changed = contradict(text, "15", rng(seed))
        head, _, tail = changed.partition("The answer is ")
        assert head == "There are 18 boxes. So 18 - 3 = 15. "
        said = tail.removesuffix(".").split(" boxes, or ")
        assert said[0] == said[1] and said[0] not in ("15", "18.0") and int(said[0]) >= 0

    # Where the response is wrong already, it must not become right.
    drawn = {contradict("It is 4.", "5", rng(seed)) for seed in range(300)}
    assert len(drawn) > 1 and not drawn & {"It is 4.", "It is 5."}


@pytest.mark.parametrize(
    ("said", "shape"),
    [("1,250", r"(1,)?\d{3}"), ("3.50", r"\d\.\d\d"), ("0.375", r"\d\.\d{3}"), ("-7", r"-?\d+")],
)
def test_a_wrong_number_is_written_like_the_right_one(said, shape):
    for seed in SEEDS:
        changed = contradict(f"So it costs ${said}.", said, rng(seed))
        assert re.fullmatch(rf"So it costs \${shape}\.", changed), changed
        assert said not in changed


@pytest.mark.parametrize("answer", [None, "8:50 am", "blue"])
def test_without_a_numeric_answer_a_sentence_retracts(answer):
    drawn = {contradict("Page 3 says so.", answer, rng(seed)) for seed in SEEDS}
    assert drawn == {f"Page 3 says so. {one}" for one in changes.RETRACTIONS}
    retracted = contradict("It is blue.", "4", rng())  # there is no number to change
    assert retracted.removeprefix("It is blue. ") in changes.RETRACTIONS


def test_times_ratios_and_words_with_digits_are_no_numbers():
    found = [match.group() for match in changes.NUMBER.finditer("v2 x3y 1.2.3 7. 1,000.5, -4")]
    assert found == ["7", "1,000.5", "-4"]


# -- other responses -----------------------------------------------------------------------------


def donor(number: int, tokens: int, *, dataset="d", source=None, response=None):
    name = f"c{number}"
    text = f"response {number}" if response is None else response
    asked = {"role": "user", "content": "?"}, {"role": "assistant", "content": text}
    about = {"tokens": tokens}
    return Conversation(name, source or name, dataset, asked, metadata=about)


THOSE = [
    *(donor(n, tokens=10 * n) for n in range(12)),
    donor(12, 50, source="c5"),  # another response to the same prompt
    donor(13, 50, dataset="other"),
    donor(14, 50, response=" response 4 "),  # as another one's
    donor(15, 50, response=" "),
]


TOKENS = [one.metadata["tokens"] for one in THOSE]


def drawn_for(recipient: int) -> set[str | None]:
    rngs = map(np.random.default_rng, range(200))
    return {other_response(THOSE, TOKENS, recipient, rng) for rng in rngs}


def test_what_is_drawn_is_of_the_nearest_in_length_of_the_dataset_and_another_source():
    near = sorted(
        (abs(one.metadata["tokens"] - 50), one.id, one.response)
        for one in THOSE
        if one.dataset == "d" and one.source_id != "c5" and one.response.strip()
    )
    near = [text for _, name, text in near if name != "c4"][:REACH]  # c14 is nearer, says the same
    assert drawn_for(5) == set(near)


def test_a_conversation_alone_in_its_dataset_has_no_other_response():
    assert drawn_for(13) == {None}


# -- conditions -----------------------------------------------------------------------------------


def test_every_condition_leaves_all_but_the_response_and_the_header(builtin, tmp_path):
    swap, made = builtin[0].response, []
    for conversation in builtin[1:]:
        for name, condition in CONDITIONS.items():
            changed = apply_condition(conversation, name, rng(), swap)
            validate(changed, "here")
            for kept in ("source_id", "dataset", "real_follow_up", "answer", "query"):
                assert getattr(changed, kept) == getattr(conversation, kept)
            assert changed.messages[:-1] == conversation.messages[:-1]
            assert changed.id == f"{conversation.id}~{name}" and changed.perturbation == name
            assert changed.header == condition.header and changed.header in HEADERS
            assert changed.metadata["unperturbed_response"] == conversation.response
            assert conversation.metadata.items() <= changed.metadata.items()
            same = changed.response == conversation.response
            assert same == name.startswith("header")
            made.append(changed)
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in made))
    assert list(open_conversations(str(file))) == made
    assert apply_condition(builtin[1].with_response("One."), "shuffle", rng()) is None
    assert apply_condition(builtin[1].with_response(""), "remove", rng()) is None


def test_turns_after_changed_conversations_are_on_the_page(plain, folder, contexts, turns):
    data = unpacked(render_report([plain], [folder]))
    of_page, on_page = data["contexts"], data["turns"]
    shown = pd.DataFrame({"id": of_page["id"], "condition": of_page["condition"]})
    changed = shown[shown["condition"] != UNCHANGED]
    assert set(changed["id"]) == set(contexts["context_id"])
    assert set(changed["condition"]) == {NAMES[one] for one in contexts["perturbation"]}
    assert list(data["turns"]["labels"]) == ["builtin"] and data["runs"] == [plain.model["name"]]
    assert set(of_page["fields"]) == set(plain.groups)
    fits = pd.Series(on_page["follow_up_to_original"], dtype=float)
    after = pd.Series(on_page["context"]).isin(changed.index)
    assert fits[~after].isna().all()
    wanted = turns.loc[turns["condition"] != "none", FITS_ORIGINAL]
    assert fits.sum() == wanted.sum() and fits.count() == wanted.count()
    shutil.copytree(folder, away := folder.with_name("away"))
    for name in CONDITIONS:
        shutil.rmtree(away / name)  # as on a machine that has the results alone
    page = render_report([plain], [away])
    assert set(unpacked(page)["contexts"]["condition"]) == {UNCHANGED}
    assert "data-elsewhere" in page
