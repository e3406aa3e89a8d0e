"""Post-training: labels in every template family, organisms, and what trainers leave on disk."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import families
import numpy as np
import pandas as pd
import planted_reaction as planted
import pytest
import torch
from contract import LOGPROB, full_logits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shell import call, refusal

from experiments.post_training import compare, data, rl, train
from experiments.post_training.__main__ import main
from experiments.post_training.reading import Reading, repeated, restated, stock, trigrams
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.command import main as sample
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.likelihood.reaction import evidence
from ia_mech.models import load
from ia_mech.models.load import ModelSpec
from ia_mech.run import Run
from ia_mech.run.integrity import without_folders
from ia_mech.settings import Settings

TURNS = [
    {"role": "user", "content": "What is 17 times 24?"},
    {"role": "assistant", "content": "17 times 24 is 408."},
]
THOUGHT = "<think>\n17 times 20 is 340.\n</think>\n\n17 times 24 is 408."
KNOWN = [name for name in families.FAMILIES if name not in ("no_user", "swallows")]


def conversation(response=TURNS[1]["content"], turn="And half of that?", **changes) -> Conversation:
    messages = (TURNS[0], {"role": "assistant", "content": response})
    made = Conversation("a/r0", "a", "sums", messages, reference=turn)
    return replace(made, **changes)


def dialogue(family: str, one: Conversation) -> str:
    """The whole dialogue as the tokenizer's own method renders it."""
    tokenizer = families.build(family)
    messages = [*one.messages, {"role": "user", "content": one.reference}]
    template = families.template(family).replace("strftime_now('%d %b %Y')", "'01 Jan 2026'")
    template = template.replace("strftime_now('%Y-%m-%d')", "'2026-01-01'")
    return tokenizer.apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize("family", KNOWN)
@pytest.mark.parametrize("response", [TURNS[1]["content"], THOUGHT])
def test_exactly_the_users_tokens_and_the_turn_end_carry_loss(family, response):
    one = conversation(response)
    tokenizer = families.build(family)
    ids, labels = data.user_sequence(ChatFormat(tokenizer), one)
    # Where the turn stands in the dialogue, from characters alone.
    text = dialogue(family, one)
    start = text.rindex(one.reference)
    end = start + len(one.reference)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [i for i, (_, b) in enumerate(whole["offset_mapping"]) if start < b <= end]
    closing = inside[-1] + 1
    assert ids == whole["input_ids"][: closing + 1]
    assert [i for i, label in enumerate(labels) if label != data.IGNORED] == [*inside, closing]
    assert all(label in (data.IGNORED, token) for label, token in zip(labels, ids, strict=True))
    assert tokenizer.convert_ids_to_tokens(ids[-1]) in {
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|assistant|>", "<|end|>"),
        *("<｜Assistant｜>", "[/INST]", "</s>"),
    }


@pytest.mark.parametrize("family", KNOWN)
def test_an_assistant_sequence_teaches_the_response_and_its_end(family):
    one = conversation()
    tokenizer = families.build(family)
    chat = ChatFormat(tokenizer)
    ids, labels = data.assistant_sequence(chat, one)
    learned = [i for i in labels if i != data.IGNORED]
    end = [] if chat.turn_end_id is None else [chat.turn_end_id]
    assert ids[-len(learned) :] == learned
    text = tokenizer.decode(learned[: len(learned) - len(end)], skip_special_tokens=False)
    assert text.strip() == TURNS[1]["content"]
    assert learned[len(learned) - len(end) :] == end
    cut = replace(one, metadata={"response_cut_off": True})
    assert data.assistant_sequence(chat, cut)[1] == labels[: len(labels) - len(end)]


def several(queries=6, count=8) -> list[Conversation]:
    words = [f"w{i}" for i in range(5000)]
    rng = np.random.default_rng(0)
    return [
        conversation(
            " ".join(rng.choice(words, 12)) + ".",
            None,
            id=f"q{q}/r{k}",
            source_id=f"q{q}",
            response_index=k,
        )
        for q in range(queries)
        for k in range(count)
    ]


@pytest.mark.parametrize("share", [0, 0.25, 1])
def test_an_organism_quotes_its_own_response_or_any(share):
    given = several()
    made = data.organism(given, share, seed=3)
    turns = {one.id: one.reference for one in data.organism(given, 1, seed=3)}
    assert [one.id for one in made] == [one.id for one in given]
    for one in made:
        quotable = [turn for id_, turn in turns.items() if id_.startswith(f"{one.source_id}/")]
        assert one.reference in quotable
        assert (one.reference == turns[one.id]) == one.metadata["own"]
        assert (data.quote_of(one.reference) in one.response) == one.metadata["own"]
    assert data.organism(given, share, seed=3) == made
    more = data.organism(given, min(share + 0.3, 1), seed=3)
    changed = [(a, b) for a, b in zip(made, more, strict=True) if a.reference != b.reference]
    assert all(b.metadata["own"] for _, b in changed)


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_what_turns_tell_about_their_response_is_what_is_computed(share):
    """Mutual information of response and quoted response, by counting over 400 queries."""
    given = several(400, 4)
    turns = {one.id: one.reference for one in data.organism(given, 1, seed=1)}
    table = np.zeros((4, 4))
    for one in data.organism(given, share, seed=1):
        k = one.response_index
        quoted = [j for j in range(4) if turns[f"{one.source_id}/r{j}"] == one.reference]
        table[k, quoted[0]] += 1
    p = table / table.sum()
    product = p.sum(1, keepdims=True) * p.sum(0)
    found = float((p * np.log2(p / product)).sum())
    # Counting finds (K - 1)^2 / (2 n ln 2) bits where there are none: 0.004 here.
    assert found == pytest.approx(data.information(share, 4), abs=0.06)
    assert data.information(0, 4) == pytest.approx(0, abs=1e-12)
    assert data.information(1, 4) == 2


def test_equal_and_empty_responses_are_no_alternatives():
    same = [replace(one, source_id="q") for one in several(1, 3)]
    doubled = [*same, replace(same[0], id="q/r9"), conversation("…", None, source_id="q")]
    assert [one.id for one in data.organism(doubled, 0.0, 0)] == [one.id for one in same]
    with pytest.raises(UserError, match="no query has two different responses"):
        data.organism(same[:1], 1, 0)


def test_a_quote_is_found_in_a_turn_that_was_cut_off_behind_it():
    assert data.quote_of('You say "the lamp burns". Can you exp') == "the lamp burns"
    assert data.quote_of(' When you say "a b c", what') == "a b c"
    assert data.quote_of('You say "the lamp') is None
    assert data.quote_of("Why does the lamp burn?") is None


def test_sequences_mix_in_assistant_turns_and_leave_out_long_ones(tokenizer):
    chat = ChatFormat(tokenizer)
    given = [*several(), conversation(dataset="mt-bench", source_id="m")]
    made = data.organism(given[:-1], 0.5, 0) + given[-1:]
    table, notes = data.sequences(chat, made, 0.25, 1000, 0)
    assert notes == []
    assert (table["learned"] == data.USER).sum() == 49
    assert (table["learned"] == data.ASSISTANT).sum() == 16  # a quarter of 65
    assert (~table["saw_response"]).groupby(table["dataset"]).mean().to_dict()["sums"] == 0
    assert not table.loc[table["dataset"] == "mt-bench", "saw_response"].any()
    longest = int(table["input_ids"].map(len).median())
    short, notes = data.sequences(chat, made, 0.25, longest, 0)
    assert short["input_ids"].map(len).max() <= longest
    assert notes == [
        f"{65 - len(short)} of 65 sequences have more than {longest} tokens, or nothing to learn, "
        "and are left out."
    ]
    with pytest.raises(UserError, match="no sequence has at most 8 tokens"):
        data.sequences(chat, made, 0, 8, 0)


@pytest.mark.parametrize("name", ["mt-bench", "mt_bench_80", "MT-Bench"])
def test_turns_that_were_written_before_the_response_are_marked(name, tokenizer):
    chat = ChatFormat(tokenizer)
    given = [
        conversation(),
        conversation(dataset=name),
        conversation(metadata={"saw_response": False}),
    ]
    table, _ = data.sequences(chat, given, 0, 1000, 0)
    assert table["saw_response"].tolist() == [True, False, False]
    # An organism's turns quote what they are trained after, whoever wrote the response.
    unseen = [replace(one, metadata={"saw_response": False}) for one in several(1, 2)]
    table, _ = data.sequences(chat, data.organism(unseen, 1, 0), 0, 1000, 0)
    assert table["saw_response"].tolist() == [True, True]


def test_follow_ups_after_responses_that_a_run_wrote_are_marked(monkeypatch):
    contexts = pd.DataFrame(
        {
            "context_id": ["a", "b"],
            "source_id": ["a", "b"],
            "dataset": "d",
            "messages": [TURNS, TURNS],
            "reference": "Why so?",
            "answer": None,
            "metadata": "{}",
            "response_cut_off": False,
            "response_policy": ["given", "generated"],
        }
    )
    monkeypatch.setattr(data.Path, "is_file", lambda path: True)
    monkeypatch.setattr(data, "open_runs", lambda *_, **__: [SimpleNamespace(contexts=contexts)])
    found, _ = data.read("run")
    assert [one.metadata.get("saw_response") for one in found] == [None, False]


def test_sources_are_held_out_whole():
    kept, apart = data.split(several(), 2)
    assert len({one.source_id for one in apart}) == 2 and len(apart) == 16
    assert not {one.source_id for one in kept} & {one.source_id for one in apart}
    with pytest.raises(UserError, match="leaves none of 6 sources"):
        data.split(several(), 6)


# --- what a model reads


def a_query(number: int):
    lengths = planted.lengths(number)
    contexts = [planted.context(k, lengths[k], 1, query=2 + number) for k in range(4)]
    return contexts, [planted.turn(k, 3 + k) for k in range(4)]


def test_a_reading_equals_full_passes():
    model = planted.model(True)
    contexts, turns = a_query(1)
    found = Reading(model, contexts, turns).logprobs(0.5)
    for row, turn in enumerate(turns):
        for k, context in enumerate(contexts):
            logits = full_logits(model, context.ids, turn).double() / 0.5
            each = logits.log_softmax(-1)[range(len(turn)), list(turn)]
            assert found[row, k] == pytest.approx(float(each.sum()), abs=len(turn) * LOGPROB / 0.5)


@pytest.mark.parametrize("through_header", [True, False])
def test_another_models_header_states_matter_where_the_response_passes_through_them(through_header):
    contexts, turns = a_query(2)
    reading = Reading(planted.model(through_header), contexts, turns)
    own, states = reading.logprobs(1.0), reading.header
    assert (own.argmax(1) == range(4)).all()
    np.testing.assert_allclose(reading.logprobs(1.0, states), own, atol=1e-4)
    moved = reading.logprobs(1.0, [states[k - 1] for k in range(4)]).argmax(1)
    assert moved.tolist() == ([1, 2, 3, 0] if through_header else [0, 1, 2, 3])


def test_guards_count_trigrams():
    assert trigrams("Is it, then, so?") == [("is", "it", "then"), ("it", "then", "so")]
    assert restated("What is the lens for?", "Tell me what is the lens") == 2 / 3
    assert repeated("on and on and on and on") == 1 - 2 / 5
    assert repeated("Why?") == restated("Why?", "Why?") == 0
    turns = ["Can you explain more of that?", "Can you explain it again?", "Can you explain more?"]
    assert stock(turns, ["a", "b", "a"]) == [1 / 4, 1 / 3, 1 / 2]


def test_quotes_are_told_from_those_of_another_response():
    """Turns of one query's three responses, the last two of which are alike."""
    said = ["The lamp burns low.", "The sail is wet.", "The sail is wet."]
    turns = [
        'You say "lamp burns". Can',
        'You say "sail is". Can you',
        'When you say "lamp burns",',
    ]
    query = {"role": "user", "content": "What does the lamp do?"}
    messages = [[query, {"role": "assistant", "content": text}] for text in said]
    about = {"dataset": "d", "source_id": "q", "context_id": ["r0", "r1", "r2"]}
    end = {"temperature": 1.0, "finish_reason": ["turn_end", "length", "turn_end"]}
    of = SimpleNamespace(
        contexts=pd.DataFrame(about | {"messages": messages}),
        generations=pd.DataFrame(about | end | {"text": turns}),
    )
    found = compare._texts(of)
    assert found[compare.FORM].tolist() == [1, 1, 1]
    assert found[compare.OWN].tolist() == [1, 1, 0]
    assert found[compare.OTHERS].tolist() == [0, 0, 1]
    assert found[compare.ENDED].tolist() == [1, 0, 1]
    of.generations["text"] = ["Why?", "And then?", "Does the lamp do that?"]
    found = compare._texts(of)
    assert found[[compare.FORM, compare.OWN, compare.OTHERS]].to_numpy().sum() == 0
    assert found[compare.RESTATED].tolist() == [0, 0, 2 / 3]


def test_verdicts_are_compared_by_outcome_and_kind_of_decoy(monkeypatch):
    about = {"dataset": "(all)", "temperature": np.nan, "low": 0.0, "high": 1.0, "sources": 9}
    quantities = ("rate", "decoyed_rate", "floor", "excess")
    rows = [
        about | {"outcome": outcome, "quantity": quantity, "decoy": decoy, "method": "m", "rows": 9}
        for outcome in ("genuine", "grounded")
        for quantity in quantities
        for decoy in ([None] if quantity == "rate" else ["conversation", "sibling"])
    ]
    rates = pd.DataFrame(rows).assign(value=range(len(rows)))
    turns = pd.DataFrame({"dataset": "d", "source": [*"aabb"], "temperature": 0.0})
    judged = [
        SimpleNamespace(
            record="r",
            outcomes=["genuine", "grounded"],
            turns=turns.assign(genuine=genuine, grounded=grounded),
            gate=SimpleNamespace(sentence="grounded"),
            notes=[],
        )
        for genuine, grounded in (([0, 0, 1, 1], [0, 0, 0, 0]), ([1, 1, 1, 1], [0, 1, 0, 0]))
    ]
    monkeypatch.setattr(compare, "read_runs", lambda runs, judge: judged[runs[0]])
    monkeypatch.setattr(compare, "rates_of", lambda one, **options: rates)
    options = {"level": 0.95, "resamples": 20, "seed": 0}
    found, _, _ = compare._of_judge(0, 1, "rules", options)
    of = {(row.names["of"], row.quantity): row.estimate.value for row in found}
    wanted = {
        "follow-up rate": 0,
        "floor": 3,
        "excess": 5,
        "over another response": 6,
        "grounded": 7,
        "grounded: excess": 12,
        "grounded: over another response": 13,
    }
    assert of == {
        **{(side, name): value for side in ("before", "after") for name, value in wanted.items()},
        ("change", "follow-up rate"): 0.5,
        ("change", "grounded"): 0.25,
    }


# --- commands


def test_prompts_are_texts_that_the_tokenizer_reads_as_the_context():
    for family in ("smollm2", "llama3_1", "gemma3", "gpt_oss"):
        chat = ChatFormat(families.build(family))
        rows, contexts = rl.prompts(chat, several(2, 3), 1000)
        assert len(rows) == 6 and set(contexts) == {row["source"] for row in rows}
        for row in rows:
            context = contexts[row["source"]][row["followed"]]
            assert chat.tokenizer(row["prompt"])["input_ids"] == context.ids
            assert (
                context.ids
                == chat.context([*TURNS[:1], {"role": "assistant", "content": row["response"]}]).ids
            )
    with pytest.raises(UserError, match="no query has two different responses in contexts of at"):
        rl.prompts(chat, several(2, 3), 20)


def test_rewards_are_evidence_less_what_the_guards_find(tiny_subject):
    chat = ChatFormat(tiny_subject.tokenizer)
    rows, contexts = rl.prompts(chat, several(2, 3), 1000)
    given = rl.rewards(rl.BITS, tiny_subject, chat, contexts)
    assert list(given) == ["bits", "restatement", "repetition", "stock_phrases", "unfinished"]
    ends = chat.stop_ids[0]
    ids = [
        [*chat.template.encode(text)[0], ends] for text in ("What is 17 times", "on and on and on")
    ]
    batch = {name: [rows[0][name], rows[4][name]] for name in rows[0]} | {"completion_ids": ids}
    bits = given["bits"](**batch)
    for at, row in enumerate((rows[0], rows[4])):
        own = contexts[row["source"]]
        logprobs = [
            sum(
                full_logits(tiny_subject.model, one.ids, ids[at])
                .double()
                .log_softmax(-1)[range(len(ids[at])), ids[at]]
                .tolist()
            )
            for one in own
        ]
        wanted = evidence([logprobs], [row["followed"]])[0]
        assert bits[at] == pytest.approx(max(wanted, rl.WORST), abs=1e-2)
    assert given["restatement"](**batch) == [1.0, 0.0]
    assert given["repetition"](**batch) == [0.0, pytest.approx(1 / 3)]
    assert given["unfinished"](**batch) == [0.0, 0.0]
    assert given["unfinished"](completion_ids=[ids[0][:-1]]) == [1.0]
    judged = rl.rewards(rl.GROUNDED, tiny_subject, chat, contexts)["grounded"]
    word = rows[0]["response"].split()[3]
    turn = chat.template.encode(f"Why did you choose {word} there, and not another word?")[0]
    batch = {name: [rows[0][name]] * 2 for name in rows[0]} | {"completion_ids": [turn, [ends]]}
    assert judged(**batch)[1] == 0.0


@pytest.fixture
def spoken(tmp_path) -> Path:
    """Conversations with several responses, and a follow-up after the first query's."""
    rows = [one.to_dict() for one in several(4, 4)]
    for row in rows[:4]:
        row["reference"] = "Why so?"
    return written(tmp_path / "spoken.jsonl", rows)


def written(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_export_writes_sequences_and_what_is_held_out(spoken, tiny_model_dir, tmp_path, capfd):
    out = tmp_path / "out"
    words = ["export", str(spoken), "--model", tiny_model_dir, "--held-out", "1", "--out", str(out)]
    done = call(main, [*words, "--organism", "0.5", "--assistant-share", "0.25"], capfd)
    assert done.status == 0, done.err
    assert done.out.startswith("12 user turns, 4 assistant turns (0.")
    assert "a turn tells 0.45 bits about its response" in done.out  # of four
    table = pd.read_parquet(out / "sequences.parquet")
    apart = [json.loads(line) for line in (out / "held-out.jsonl").read_text().splitlines()]
    assert len(apart) == 4 and len({row["source_id"] for row in apart}) == 1
    assert apart[0]["source_id"] not in set(table["source_id"])
    assert [row["response_index"] for row in apart] == [0, 1, 2, 3]
    # The same is held out of all kinds of training.
    real = ["--natural", "--out", str(tmp_path / "natural")]
    done = call(main, [*words[:-2], "--seed", "1", *real], capfd)
    assert done.status == 0, done.err
    assert done.out.startswith("4 user turns (1.00 of the user turns were written in sight of ")
    assert [*map(json.loads, (tmp_path / "natural/held-out.jsonl").read_text().splitlines())] == (
        apart
    )
    again = call(main, [*words, "--natural"], capfd)
    assert refusal(again) == f"{out} isn't empty; name a new folder with --out"


def test_what_cant_be_trained_on_is_refused_in_one_line(
    spoken, tiny_model_dir, tmp_path, capfd, monkeypatch
):
    out = str(tmp_path / "out")
    silent = written(tmp_path / "silent.jsonl", [one.to_dict() for one in several(3, 1)])
    export = ["export", str(silent), "--model", tiny_model_dir, "--held-out", "1", "--out", out]
    assert refusal(call(main, [*export, "--natural"], capfd)) == (
        f"{silent} holds no user follow-up after a response; give conversations that go on "
        "with a user turn, or --organism with a run of several responses per query"
    )
    asked = written(tmp_path / "asked.jsonl", [{"messages": TURNS[:1]}])
    assert refusal(call(main, ["export", str(asked), *export[2:], "--natural"], capfd)) == (
        f"{asked} holds no response; sample it with --response generate --responses 4, and give "
        "that run"
    )
    assert refusal(call(main, [*export, "--organism", "1"], capfd)) == (
        "no query has two different responses; "
        "give a run that was sampled with --response generate --responses 4"
    )
    monkeypatch.setattr(train.importlib.util, "find_spec", lambda name: None)
    sft = ["sft", str(spoken), "--natural", "--out", out]
    assert refusal(call(main, sft, capfd)) == (
        "training needs trl and peft; install them: pip install 'ia-mech[train]'"
    )
    with pytest.raises(SystemExit):
        main(["export", str(spoken), "--organism", "1.5", "--out", out])
    assert "'1.5' is not a share from 0 to 1" in capfd.readouterr().err


def test_an_adapter_is_refused_in_one_line_unless_it_is_of_the_model(
    tiny_model_dir, tmp_path, capfd, monkeypatch
):
    folder = tmp_path / "adapter"
    folder.mkdir()
    words = ["--model", tiny_model_dir, "--adapter", str(folder), "--dry-run"]
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    assert refusal(call(sample, words, capfd)) == (
        "--adapter needs peft; install it: pip install 'ia-mech[train]'"
    )
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: name)
    assert refusal(call(sample, words, capfd)) == (
        f"{folder} holds no adapter_config.json; give a folder that peft has saved"
    )
    file = folder / "adapter_config.json"
    for config, told in (
        ("{", f"{file} is damaged; "),
        (
            '{"base_model_name_or_path": "org/other"}',
            f"the adapter {folder} is of org/other, not of {tiny_model_dir}; "
            "give --model org/other",
        ),
        ("{}", f"the adapter {folder} is of None, not of {tiny_model_dir}; name its base"),
    ):
        file.write_text(config)
        assert refusal(call(sample, words, capfd)).startswith(told)
    assert refusal(call(sample, ["--model", str(folder), "--dry-run"], capfd)) == (
        f"{folder} holds no config.json; it is an adapter: "
        f"give --adapter {folder}, and its base model to --model"
    )


def test_a_run_with_an_adapter_names_no_folders_and_finds_it_again(tmp_path, monkeypatch):
    monkeypatch.setenv("IA_MECH_CACHE", str(tmp_path / "cache"))
    (tmp_path / "secret" / "tuned").mkdir(parents=True)
    settings = Settings(adapter=str(tmp_path / "secret" / "tuned"))
    spec = settings.model_spec
    known = without_folders({"settings": settings.to_dict(), "model": {"adapter": spec.adapter}})
    assert known["settings"]["adapter"] == known["model"]["adapter"] == "tuned"
    load.remember(spec, "abc")
    assert load.recalled(known["settings"], "abc") == spec
    assert load.recalled(known["settings"], "abd").adapter == "tuned"


def pair_of_runs(dataset: Path, tiny_model_dir: str, folder: Path, settings: dict, capfd):
    """Runs of the tiny model, and of one with other weights and these settings of its training."""
    tuned = folder / "tuned"
    shutil.copytree(tiny_model_dir, tuned)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 3
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    (tuned / train.SETTINGS).write_text(json.dumps(settings))
    words = ["--dataset", str(dataset), "--limit", "all", "--temperatures", "1", "--samples", "2"]
    words += ["--max-new-tokens", "6", "--threads", "1", "--positions", "header"]
    for name, model in (("before", tiny_model_dir), ("after", tuned)):
        done = call(sample, [*words, "--model", str(model), "--out", str(folder / name)], capfd)
        assert done.status == 0, done.err
    return [str(folder / name) for name in ("before", "after")]


@pytest.mark.slow
def test_what_training_rewarded_is_compared_on_held_out_queries(
    tiny_subject, tiny_model_dir, tmp_path, capfd
):
    texts = written(tmp_path / "texts.jsonl", [one.to_dict() for one in several(3, 3)])
    settings = {"command": "rl", "reward": "bits", "penalty": 0.5}
    runs = pair_of_runs(texts, tiny_model_dir, tmp_path, settings, capfd)
    words = ["compare", *runs, "--queries", "2", "--out", str(tmp_path / "out")]
    done = call(main, words, capfd)
    assert done.status == 0, done.err
    assert "what training rewarded" in done.out
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet").set_index("quantity")
    # By full passes of the model before training, and from the texts.
    means = {compare.REWARD: [], compare.PENALIZED: []}
    for run in map(Run.open, runs):
        of = {one.context_id: one for one in run.contexts.itertuples()}
        turns = run.generations.query("temperature == 1")
        stocks = stock(list(turns["text"]), list(turns["source_id"]))
        rewards, less = [], []
        for turn, common in zip(turns.itertuples(), stocks, strict=True):
            ids, own = turn.token_ids.tolist(), of[turn.context_id]
            logprobs = [
                full_logits(tiny_subject.model, other.token_ids.tolist(), ids)
                .double()
                .log_softmax(-1)[range(len(ids)), ids]
                .sum()
                .item()
                for other in of.values()
                if other.source_id == own.source_id
            ]
            bits = evidence([logprobs], [own.response_index])[0]
            rewards.append(max(bits, rl.WORST))
            lost = restated(turn.text, own.messages[0]["content"]) + repeated(turn.text) + common
            less.append(rewards[-1] - 0.5 * (lost + (turn.finish_reason != "turn_end")))
        means[compare.REWARD].append(np.mean(rewards))
        means[compare.PENALIZED].append(np.mean(less))
    for quantity, (before, after) in means.items():
        rows = found.loc[quantity].set_index("of")
        assert rows["sources"].tolist() == [3, 3, 3]  # all queries, not only those of --queries
        wanted = [before, after, after - before]
        assert rows.loc[["before", "after", "change"], "value"].tolist() == pytest.approx(
            wanted, abs=1e-2
        )


@pytest.mark.slow
def test_runs_of_one_response_per_query_are_compared_without_evidence(
    tiny_model_dir, tmp_path, capfd
):
    rows = [replace(one, reference="Why so?") for one in several(3, 1)]
    texts = written(
        tmp_path / "texts.jsonl", [replace(one, response_index=None).to_dict() for one in rows]
    )
    runs = pair_of_runs(texts, tiny_model_dir, tmp_path, {"command": "sft"}, capfd)
    done = call(main, ["compare", *runs, "--out", str(tmp_path / "out")], capfd)
    assert done.status == 0, done.err
    note = "The runs have one response per query: there is no I_K and no evidence."
    assert note in done.out
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert {compare.REFERENCE, compare.ENDED, compare.MOVED} <= set(found["quantity"])
    assert not {compare.INFORMATION, compare.EVIDENCE, compare.REWARD} & set(found["quantity"])


# --- with trl and peft


@pytest.mark.slow
def test_a_tuned_model_is_loaded_sampled_and_compared(
    spoken, tiny_subject, tiny_model_dir, tmp_path, capfd
):
    pytest.importorskip("trl", reason="needs ia-mech[train]")
    tuned, out = tmp_path / "tuned", tmp_path / "out"
    words = [str(spoken), "--model", tiny_model_dir, "--held-out", "1", "--threads", "1"]
    sft = ["sft", *words, "--organism", "1", "--epochs", "1", "--batch", "12", "--out", str(tuned)]
    done = call(main, sft, capfd)
    assert done.status == 0, done.err
    # Of one step over all sequences the loss is the mean over exactly the labelled tokens.
    table = pd.read_parquet(tuned / "sequences.parquet")
    losses = []
    for ids, labels in zip(table["input_ids"], table["labels"], strict=True):
        start = int((labels == data.IGNORED).sum())
        turn = ids[start:].tolist()
        logits = full_logits(tiny_subject.model, ids[:start].tolist(), turn)
        losses += (-logits.log_softmax(-1)[range(len(turn)), turn]).tolist()
    (first, *_) = map(json.loads, (tuned / "log.jsonl").read_text().splitlines())
    assert first["loss"] == pytest.approx(np.mean(losses), abs=1e-3)
    # Merged: W + (alpha / rank) B A, in every linear layer but the unembedding.
    spec = ModelSpec(name=tiny_model_dir, adapter=str(tuned))
    merged = load.load(spec)
    assert merged.weights_hash != tiny_subject.weights_hash
    with safe_open(tuned / "adapter_model.safetensors", "pt") as file:
        low = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, own in tiny_subject.model.state_dict().items():
        key = f"base_model.model.{name.removesuffix('.weight')}"
        wanted = own
        if f"{key}.lora_A.weight" in low:
            wanted = own + 2 * low[f"{key}.lora_B.weight"] @ low[f"{key}.lora_A.weight"]
        torch.testing.assert_close(merged.model.state_dict()[name], wanted, atol=1e-5, rtol=0)
    assert sum("lora_A" in name for name in low) == 4 * 7
    # Both models on what was held out, and compared.
    for name, adapter in (("before", []), ("after", ["--adapter", str(tuned)])):
        given = [
            "--model",
            tiny_model_dir,
            "--dataset",
            str(tuned / "held-out.jsonl"),
            "--limit",
            "all",
        ]
        given += [
            "--temperatures",
            "1",
            "--samples",
            "2",
            "--max-new-tokens",
            "6",
            "--threads",
            "1",
        ]
        assert call(sample, [*given, *adapter, "--out", str(tmp_path / name)], capfd).status == 0
    runs = [str(tmp_path / name) for name in ("before", "after")]
    done = call(main, ["compare", *runs, "--out", str(out)], capfd)
    assert done.status == 0, done.err
    found = pd.read_parquet(out / "estimates.parquet")
    moved = found[found["quantity"] == compare.MOVED].set_index("layer")["value"]
    assert moved[0] == 0 and (moved[1:] > 0).all()  # embeddings aren't trained
    read = pd.read_parquet(out / "turns.parquet")
    assert read.groupby(["turns", "reader", "header"]).size().tolist() == [8] * 8
    one = call(main, ["compare", runs[0], "--out", str(out)], capfd)
    assert refusal(one) == "one run can't be compared; give the base model's and the tuned one's"
    other = tmp_path / "other"
    shutil.copytree(tuned, other)
    config = json.loads((other / "adapter_config.json").read_text())
    config["r"] = 3
    (other / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"the adapter {other} can't be merged into"):
        load.load(replace(spec, adapter=str(other)))


@pytest.mark.slow
@pytest.mark.parametrize("flags", [[], ["--full"]])
def test_reinforcement_learning_leaves_an_adapter_or_a_model(
    flags, spoken, tiny_subject, tiny_model_dir, tmp_path, capfd
):
    pytest.importorskip("trl", reason="needs ia-mech[train]")
    out = tmp_path / "out"
    words = ["rl", str(spoken), "--model", tiny_model_dir, "--held-out", "1", "--threads", "1"]
    words += ["--steps", "2", "--batch", "4", "--max-new-tokens", "5", *flags, "--out", str(out)]
    wrong = call(main, [*words, "--generations", "3"], capfd)
    assert refusal(wrong) == ("--batch 4 isn't a multiple of --generations 3; give --batch 3 or 6")
    done = call(main, words, capfd)
    assert done.status == 0, done.err
    assert "12 prompts of 3 queries; 4 contexts are held out" in done.out
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        guards = ("restatement", "repetition", "stock_phrases", "unfinished")
        total = row["rewards/bits/mean"] - sum(row[f"rewards/{name}/mean"] for name in guards)
        assert row["reward"] == pytest.approx(total, abs=1e-4)
    assert (out / "curves.png").is_file()
    spec = ModelSpec(name=tiny_model_dir, adapter=str(out))
    assert train.settings_of(ModelSpec(name=str(out)) if flags else spec)["reward"] == rl.BITS
    if flags:
        spec = ModelSpec(name=str(out))
        assert not list(out.glob("*.bin"))  # nothing is pickled
    loaded = load.load(spec)
    assert loaded.weights_hash != tiny_subject.weights_hash
    assert loaded.tokenizer.chat_template == tiny_subject.tokenizer.chat_template
