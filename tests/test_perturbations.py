"""python -m experiments.perturbations: what it samples, judges, compares and refuses."""

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
from shell import call, files, refusal

from experiments.perturbations import conditions as responses
from experiments.perturbations import sample, show
from experiments.perturbations.__main__ import main
from experiments.perturbations.analyse import (
    DISTANCE,
    HALVED,
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
from experiments.perturbations.conditions import CONDITIONS, UNCHANGED, perturbed, sentences
from experiments.perturbations.read import compare, read_base
from experiments.perturbations.sample import judged, under_conditions
from ia_mech.chat.format import ChatFormat
from ia_mech.chat.headers import rendered
from ia_mech.collect.job import collect
from ia_mech.data.conversations import HEADERS, Conversation, open_conversations, validate
from ia_mech.display import Quiet
from ia_mech.errors import UserError
from ia_mech.judge.label import UNSEEN, items_of, label_run
from ia_mech.judge.rules import RulesJudge
from ia_mech.rates.load import read_runs
from ia_mech.run import Run
from ia_mech.settings import Settings
from ia_mech.stats import cluster_mean, paired_difference

DECODING = {"temperatures": (1.0,), "samples": 3, "max_new_tokens": 5}
KEYS = ["context_id", "temperature", "sample"]
NO_SWAP_SOURCE = (
    "condition swap is left out: none of these conversations has another response of its dataset "
    "to swap with."
)
CHATS = [one | {"of": "plain"} for one in scored.CONVERSATIONS]


@pytest.fixture(scope="module")
def sampled(tiny_subject, tiny_model_dir, tmp_path_factory):
    """Make a judged run of the tiny model, as the command line would."""

    def make(conversations=CHATS, judge: bool = True, **options) -> Run:
        folder = tmp_path_factory.mktemp("base")
        options = DECODING | {"model": tiny_model_dir} | options
        data = scored.dataset(folder / "chats.jsonl", conversations)
        settings = Settings(dataset=data, limit=None, **options)
        run = collect(settings, tiny_subject, folder / "run", Silent())
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
    return compare(read_base([plain]), run, "rules", [])


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
    messages, header = tuple(map(dict, row["messages"])), CONDITIONS[condition]
    conversation = Conversation("c1", "c1", "d", messages, row["reference"], header=header)
    made, turn = rendered(chat, conversation)
    assert made.ids == row["token_ids"].tolist()
    assert turn == row["reference_token_ids"].tolist()
    own = scored.logprobs(tiny_subject.model, made.ids, [*turn, chat.closing_id])
    assert row["reference_logprob"] == pytest.approx(own[: len(turn)].sum(), abs=1e-4)


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


# -- displacement ---------------------------------------------------------------------------------


def test_displacement_is_the_distance_over_the_distance_between_conversations(plain, run, compared):
    moved = {tuple(names.values()): found for names, *found in displacements(compared)}
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
        own, relative = moved[condition, layer, position]
        np.testing.assert_allclose(own, distance / np.mean(gaps), rtol=1e-9)
        norm = np.linalg.norm(before, axis=1)
        np.testing.assert_allclose(relative, distance / norm, rtol=1e-9)


def test_the_header_s_embedding_stays_and_so_does_an_unchanged_context(compared, plain):
    both = {tuple(names.values()): found for names, *found in displacements(compared)}
    assert (both["swap", 0, "header_last"][1] == 0).all()
    moved = {key: distance for key, (distance, _) in both.items()}
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


def test_close_states_do_not_lose_their_distance_to_cancellation():
    """As a difference of squares, 1 between 1e8 and 1e8 + 1 would be lost in rounding."""
    states = np.array([[1e8], [1e8 + 1]])
    assert typical_distance(states, np.array(["a", "a"]), np.array(["s", "t"])).tolist() == [1, 1]
    rng = np.random.default_rng(0)
    equal = np.tile(1e3 * rng.standard_normal(576), (3, 1))
    assert np.isnan(typical_distance(equal, np.array(["a"] * 3), np.arange(3))).all()


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


def test_tests_of_one_quantity_are_corrected_together(found):
    for quantity in (RATE + LESS, HELD + LESS, REFERENCE + LESS):
        rows = found[found["quantity"] == quantity].sort_values("p")
        smallest = rows.iloc[0]
        assert smallest["p_holm"] == pytest.approx(min(1, len(rows) * smallest["p"]))
        assert (rows["p_holm"] >= rows["p"]).all()
    assert found.loc[found["quantity"].isin([RATE, DISTANCE, RELATIVE]), "p"].isna().all()


def planted(before: float, wide: float = 0.05, temperature: float = 1.0, **after) -> pd.DataFrame:
    """The held rates of conditions, and what tells whether they halve the unperturbed one."""
    rows = []
    for condition, rate in {"none": before, **after}.items():
        names = {"dataset": "d", "condition": condition, "temperature": temperature}
        rows.append(names | {"quantity": HELD, "value": rate, "high": 0.9, "rows": 50})
        if condition != "none":
            left = before - 2 * rate
            ends = {"value": left, "low": left - wide, "high": left + wide}
            rows.append(names | {"quantity": HALVED} | ends)
    return pd.DataFrame(rows).astype({"rows": "Int64"})


DEPENDS = "The rate falls by more than half without the response: what was measured depends on it."
NOT_SHOWN = "shown to halve the rate: what was measured is not shown to depend on the response."
FALL = {"remove": 0.1, "swap": 0.2}


@pytest.mark.parametrize(
    ("planting", "end"),
    [
        (FALL, DEPENDS),
        (FALL | {"header_only": 0.05}, DEPENDS),
        (FALL | {"wide": 0.11}, f"swap isn't {NOT_SHOWN}"),
        (FALL | {"wide": 0.31}, f"remove and swap aren't {NOT_SHOWN}"),
        ({"remove": 0.1, "swap": 0.4}, f"swap isn't {NOT_SHOWN}"),  # lower, but by a fifth
        ({"remove": 0.6, "swap": 0.6, "header_only": 0.6}, f"remove and swap aren't {NOT_SHOWN}"),
        (FALL | {"header_only": 0.5}, "by this judge, the rate is no evidence of a reaction."),
        ({"ask": 0.1, "header_only": 0.1},
         "falsifier, T = 1: neither remove nor swap was made, so it can't be told."),
    ],
)  # fmt: skip
def test_the_falsifier_passes_where_an_effect_is_large_not_where_it_is_significant(planting, end):
    (line,) = verdicts(planted(0.5, **planting))
    assert line.endswith(end)
    if planting == FALL:
        assert line.startswith(
            "falsifier, T = 1: of a rate of 0.500 remain (in brackets: the rate less twice that) "
            "remove 0.100 (+0.300 [+0.250, +0.350]); swap 0.200 (+0.100 [+0.050, +0.150]). "
        )


def test_the_falsifier_has_nothing_to_say_where_no_turn_is_genuine():
    (line,) = verdicts(planted(0.0, temperature=0.0, remove=0.0, swap=0.0))
    assert line == (
        "falsifier, greedy: no unperturbed turn is judged genuine (of 50, at most 0.900), so "
        "nothing could be lower."
    )


# -- the command ----------------------------------------------------------------------------------


def test_the_second_time_nothing_is_sampled_and_no_model_is_loaded(
    perturb, plain, folder, monkeypatch
):
    def fail(*args, **options):
        raise AssertionError("the model was loaded")

    monkeypatch.setattr("experiments.resample.load", fail)
    monkeypatch.setattr("ia_mech.display.save_figure", lambda *_: None)  # drawn once already
    figures = {f"{name}.{kind}" for name in ("rates", "profile", "displacement", "references")
               for kind in ("png", "svg", "pdf")}  # fmt: skip
    assert {path.name for path in folder.iterdir()} == {
        *("conversations.jsonl", "run", "estimates.parquet", "result.json"), *figures
    }  # fmt: skip
    before, base = files(folder), files(plain.path)
    outcome = perturb(plain.path, "--out", folder, "--resamples", "100")
    assert outcome.status == 0, outcome.err
    assert files(folder) == before and files(plain.path) == base
    tables = "follow-up rate by condition", "failure profile", "displacement of header_last"
    for said in (*tables, "real follow-ups", "falsifier, T = 1:", "shuffle was made in several"):
        assert said in outcome.out, outcome.out


def test_a_dry_run_shows_the_conditions_and_writes_nothing(perturb, plain, tmp_path):
    out = tmp_path / "out"
    outcome = perturb(plain.path, "--out", out, "--dry-run", "--conditions", "ask", "header_only")
    assert outcome.status == 0 and not out.exists()
    assert "ask " in outcome.out and "(header: alone)" in outcome.out
    assert "18 contexts, 72 user turns of at most 5 tokens" in outcome.out


def test_bad_input_is_refused_in_a_line(refused, sampled, plain, folder, tmp_path):
    bare = sampled(CHATS[:2], judge=False)
    out = ("--out", tmp_path / "out")
    assert refused(bare.path, *out).startswith(f"{bare.path} has not been judged; run: python -m")
    line = refused(plain.path, *out, "--conditions", "slice")
    assert "no condition 'slice'; use truncate, " in line
    assert not (tmp_path / "out").exists()
    holds = "holds other conversations, or other conditions, than these; give another --out"
    line = refused(plain.path, "--out", folder, "--limit", "3")
    assert line.startswith(f"{folder / 'conversations.jsonl'} {holds}")


def test_damaged_conversations_of_a_perturbed_run_are_refused(refused, plain, folder, tmp_path):
    copy = shutil.copytree(folder, tmp_path / "copy")
    file = copy / "conversations.jsonl"
    file.write_bytes(b"\xff" + file.read_bytes()[1:])
    assert refused(plain.path, "--out", copy).startswith(f"{file} holds other conversations, or ")
    file.unlink()
    assert refused(plain.path, "--out", copy).startswith(f"{file} is missing; ")


def test_runs_that_differ_or_lack_the_decoding_are_refused(sampled, plain):
    def refusal_of(*runs, **grid) -> str:
        with pytest.raises(UserError) as problem:
            read_base(list(runs), **grid)
        return str(problem.value)

    few = {"judge": False}
    colder = sampled(CHATS[2:4], temperatures=(0.5,), **few)
    longer = sampled(CHATS[:2], max_new_tokens=6, **few)
    system = sampled(CHATS[2:4], system="Be brief.", **few)
    same = sampled(CHATS[:2], temperatures=(1.0, 0.5), **few)
    line = "temperature 0.7 is not in all runs (they have 1); "
    assert line in refusal_of(plain, temperatures=[0.7])
    assert "no temperature (they have none but greedy)" in refusal_of(plain, colder)
    assert "--samples 4: the runs have 3; " in refusal_of(plain, samples=4)
    assert "differ in max_new_tokens (5, 6); " in refusal_of(plain, longer)
    assert "differ in system (None, 'Be brief.')" in refusal_of(plain, system)
    line = refusal_of(plain, same)
    assert line.startswith("context c0 is in two runs; give one of them, or perturb them apart")


def test_one_conversation_has_no_displacement_and_no_interval(sampled, tmp_path):
    base = read_base([sampled(CHATS[:1])])
    conversations, left_out, _ = sample.prepare(base, ["remove"])
    run = sample.sampled(base, conversations, tmp_path / "out")
    judged(run, "rules", base)
    found = estimates(compare(base, run, "rules", left_out), resamples=100)
    assert not (found.loc[found["quantity"] == HALVED, "low"] > 0).any()
    gate = read_runs([run], "rules").gate
    assert set(show.figures(found, "model", gate)) == {"rates", "profile", "references"}


def test_another_judge_has_to_be_run_by_its_user(plain, run, tmp_path):
    base = Run.open(shutil.copytree(plain.path, tmp_path / "base"))
    labels = base.labels.judgements("rules").drop(columns=["decoy", "shown"]).to_dict("records")
    record = base.labels.record("judgements", "rules") | {"identity": {"kind": "llm"}}
    base.labels.write_judgements("gpt", labels, record)
    with pytest.raises(UserError) as refused:
        judged(run, "gpt", read_base([base]))
    assert "has not been judged by 'gpt'; run python -m ia_mech.judge run " in str(refused.value)
    assert " --name gpt with the flags that judged " in str(refused.value)
    with pytest.raises(UserError, match="holds no perturbed context"):
        label_run(plain, RulesJudge(), "other", Quiet(), unperturbed=True)


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
    assert notes == [NO_SWAP_SOURCE]
    with pytest.raises(UserError, match="no condition can be made"):
        under_conditions(two[:1], ["swap"], ChatFormat(tokenizer), 0, None)
    with pytest.raises(UserError, match="tokens under remove"):
        under_conditions(two, ["remove"], ChatFormat(tokenizer), 0, 10)


# -- what each condition changes ------------------------------------------------------------------

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


# -- sentences ------------------------------------------------------------------------------------


def test_a_code_block_is_one_sentence():
    code = "```python\nx = 1\ny = 2. + 3\n```\n"
    assert code in "".join(sentences(f"Run this:\n\n{code}It prints 5."))
    assert any("x = 1\ny = 2" in one for one in sentences(f"Run this:\n\n{code}It prints 5."))


@pytest.mark.parametrize(
    "text", ["", " ", "\n\n", "a", " a. ", "\n\na. b.\n\n\nc", TEXT, "é…\r\nb"]
)
def test_sentences_joined_are_the_text(text):
    assert "".join(sentences(text)) == text
    assert all(one.strip() for one in sentences(text)) or not text.strip()


# -- cutting --------------------------------------------------------------------------------------


def test_truncate_keeps_whole_sentences_up_to_half():
    cut = responses.truncate(TEXT)
    assert (cut.text, cut.how) == ("First, boil 2.5 l of water, i.e. a lot.", "sentences")
    long = "One two three. Four five. Six seven eight nine ten. Eleven."
    assert responses.truncate(long).text == "One two three. Four five."
    assert (
        responses.truncate(long, 0.9).text == "One two three. Four five. Six seven eight nine ten."
    )
    # the first sentence stays even where it is more than half, and the last one never
    first = "A very long first sentence."
    assert responses.truncate(f"{first} No.").text == first
    assert responses.truncate("A. B. C.", 1.0).text == "A. B."


def test_a_cut_inside_a_sentence_ends_with_a_word():
    cut = responses.truncate_mid("One two. Three four five six seven.")
    assert cut.text == "One two. Three" and cut.how == "words"
    # half of the characters is where a sentence ends: one word less
    assert responses.truncate_mid("One two. Abc def.").text == "One"
    cut = responses.truncate("The answer is forty two")
    assert (cut.text, cut.how) == ("The answer", "words")
    assert responses.truncate("408.") == responses.Change("408.", UNCHANGED)
    assert responses.truncate("") == responses.Change("", UNCHANGED)


def test_both_cuts_are_beginnings(builtin):
    for conversation in builtin:
        text = conversation.response
        whole, mid = responses.truncate(text).text, responses.truncate_mid(text).text
        ends = np.cumsum([len(one) for one in sentences(text)])
        assert text.startswith(whole) and text.startswith(mid)
        assert len(whole) in {len(text[:end].rstrip()) for end in ends}
        assert len(mid) not in {len(text[:end].rstrip()) for end in ends}
        assert text[len(mid)].isspace()
        assert len(mid) <= len(text) / 2


# -- additions ------------------------------------------------------------------------------------


def test_a_question_is_appended_or_an_acknowledgement_given_and_all_wordings_are_drawn():
    drawn = {responses.ask("Yes. \n", rng(seed)).text for seed in SEEDS}
    assert drawn == {f"Yes. {question}" for question in responses.QUESTIONS}
    assert responses.ask("", rng()).text in responses.QUESTIONS
    drawn = {responses.neutral(rng(seed)).text for seed in SEEDS}
    assert drawn == set(responses.ACKNOWLEDGEMENTS)


# -- contradiction --------------------------------------------------------------------------------


def wrong(text: str, answer: str | None, seed: int = 0) -> responses.Change:
    return responses.contradict(text, answer, rng(seed))


def test_the_final_number_becomes_another_one_and_nothing_else_changes():
    text = "There are 18 boxes. So 18 - 3 = 15. The answer is 15 boxes, or 15."
    for seed in SEEDS:
        changed = wrong(text, "15", seed)
        assert changed.how == "number"
        head, _, tail = changed.text.partition("The answer is ")
        assert head == "There are 18 boxes. So 18 - 3 = 15. "
        said = tail.removesuffix(".").split(" boxes, or ")
        assert said[0] == said[1] and said[0] not in ("15", "18.0") and int(said[0]) >= 0


def test_a_wrong_answer_is_never_the_gold_one():
    """Where the response is wrong already, it must not become right."""
    drawn = {wrong("It is 4.", "5", seed).text for seed in range(300)}
    assert len(drawn) > 1 and not drawn & {"It is 4.", "It is 5."}


@pytest.mark.parametrize(
    ("said", "shape"),
    [("1,250", r"(1,)?\d{3}"), ("3.50", r"\d\.\d\d"), ("0.375", r"\d\.\d{3}"), ("-7", r"-?\d+")],
)
def test_a_wrong_number_is_written_like_the_right_one(said, shape):
    for seed in SEEDS:
        changed = wrong(f"So it costs ${said}.", said, seed).text
        assert re.fullmatch(rf"So it costs \${shape}\.", changed), changed
        assert said not in changed


@pytest.mark.parametrize("answer", [None, "8:50 am", "blue"])
def test_without_a_numeric_answer_a_sentence_retracts(answer):
    drawn = {wrong("Page 3 says so.", answer, seed).text for seed in SEEDS}
    assert drawn == {f"Page 3 says so. {one}" for one in responses.RETRACTIONS}
    assert wrong("It is blue.", "4").how == "retraction"  # an answer, but no number to change


def test_times_ratios_and_words_with_digits_are_no_numbers():
    found = [match.group() for match in responses.NUMBER.finditer("v2 x3y 1.2.3 7. 1,000.5, -4")]
    assert found == ["7", "1,000.5", "-4"]


# -- order ----------------------------------------------------------------------------------------


def test_shuffling_keeps_sentences_and_white_space_and_changes_the_order(builtin):
    for conversation in builtin:
        text = conversation.response
        changed = responses.shuffle(text, rng(1)).text
        before, after = (Counter(one.split()) for one in (text, changed))
        assert before == after and changed != text
        assert [c for c in text if c.isspace()].count("\n") == changed.count("\n")
    assert responses.shuffle("A b.\n\nC d.", rng()).text == "C d.\n\nA b."
    for text in ("Only one.", "Yes.\nYes."):
        assert responses.shuffle(text, rng()) == responses.Change(text, UNCHANGED)


# -- conditions -----------------------------------------------------------------------------------


def test_every_condition_leaves_all_but_the_response_and_the_header(builtin):
    swapped = builtin[0].response
    for conversation in builtin[1:]:
        for name, header in CONDITIONS.items():
            changed = perturbed(conversation, name, 0, swapped)
            validate(changed, "here")
            for kept in ("source_id", "dataset", "reference", "answer", "query"):
                assert getattr(changed, kept) == getattr(conversation, kept)
            assert changed.messages[:-1] == conversation.messages[:-1]
            assert changed.id == f"{conversation.id}~{name}" and changed.perturbation == name
            assert changed.header == header and changed.header in HEADERS
            assert changed.metadata["unperturbed_response"] == conversation.response
            assert changed.metadata["unperturbed_id"] == conversation.id
            assert conversation.metadata.items() <= changed.metadata.items()
            same = changed.response == conversation.response
            assert same == (name.startswith("header") or changed.metadata["how"] == UNCHANGED)


def test_draws_depend_on_seed_condition_and_conversation_alone(builtin):
    def drawn(seed: int) -> list[str]:
        names = ("ask", "neutral", "contradict", "shuffle")
        return [perturbed(c, n, seed).response for c in builtin[:20] for n in names]

    assert drawn(0) == drawn(0) != drawn(1)
    alone = perturbed(builtin[7], "ask", 0)
    assert alone.response == drawn(0)[28]


def test_a_perturbed_conversation_can_t_be_perturbed_again(builtin):
    with pytest.raises(ValueError, match="unperturbed"):
        perturbed(perturbed(builtin[0], "ask", 0), "shuffle", 0)
    with pytest.raises(ValueError, match="another conversation"):
        perturbed(builtin[0], "swap", 0)


def test_jsonl_takes_perturbed_conversations_and_back(builtin, tmp_path):
    made = [perturbed(builtin[i], name, 0, "Swapped.") for i in range(3) for name in CONDITIONS]
    file = tmp_path / "made.jsonl"
    file.write_text("".join(json.dumps(one.to_dict()) + "\n" for one in [builtin[0], *made]))
    assert list(open_conversations(str(file))) == [builtin[0], *made]
    assert "perturbation" not in builtin[0].to_dict()  # the hash of older snapshots stays
