"""Post-training: labels in every template family, rewards, before and after."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import families
import numpy as np
import pandas as pd
import pytest
import torch
from contract import full_logits
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from shell import call, refusal

from experiments import post_training
from experiments.post_training import main
from ia_mech.chat.format import ChatFormat
from ia_mech.collect.command import main as sample
from ia_mech.data.conversations import Conversation
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.likelihood.reaction import evidence
from ia_mech.models import load
from ia_mech.models.load import ModelSpec
from ia_mech.run import Run

TURNS = [
    {"role": "user", "content": "What is 17 times 24?"},
    {"role": "assistant", "content": "17 times 24 is 408."},
]
THOUGHT = "<think>\n17 times 20 is 340.\n</think>\n\n17 times 24 is 408."
KNOWN = [name for name in families.FAMILIES if name not in ("no_user", "swallows")]


def conversation(response=TURNS[1]["content"], turn="And half of that?", **changes) -> Conversation:
    messages = (TURNS[0], {"role": "assistant", "content": response})
    made = Conversation("a/r0", "a", "sums", messages, real_follow_up=turn)
    return replace(made, **changes)


def dialogue(family: str, one: Conversation) -> str:
    """The whole dialogue as the tokenizer's own method renders it."""
    tokenizer = families.build(family)
    messages = [*one.messages, {"role": "user", "content": one.real_follow_up}]
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
    ids, labels = post_training.sequence(ChatFormat(tokenizer), one)
    # Where the turn stands in the dialogue, from characters alone.
    text = dialogue(family, one)
    start = text.rindex(one.real_follow_up)
    end = start + len(one.real_follow_up)
    whole = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    inside = [i for i, (_, b) in enumerate(whole["offset_mapping"]) if start < b <= end]
    following = tokenizer.convert_ids_to_tokens(whole["input_ids"][inside[-1] + 1 :])
    closing = inside[-1] + 2 if following[0] == "Ċ" else inside[-1] + 1
    assert ids == whole["input_ids"][: closing + 1]
    taught = [i for i, label in enumerate(labels) if label != post_training.IGNORED]
    assert taught == [*range(inside[0], closing + 1)]
    assert all(
        label in (post_training.IGNORED, token) for label, token in zip(labels, ids, strict=True)
    )
    assert tokenizer.convert_ids_to_tokens(ids[-1]) in {
        *("<|im_end|>", "<|eot_id|>", "<end_of_turn>", "<|assistant|>", "<|end|>"),
        *("<｜Assistant｜>", "[/INST]", "</s>", "[|assistant|]", "<extra_id_1>", "<|message_sep|>"),
    }


WORDS = np.array([f"w{i}" for i in range(5000)])


def several(queries=6, count=8) -> list[Conversation]:
    rng = np.random.default_rng(0)
    return [
        conversation(
            " ".join(rng.choice(WORDS, 12)) + ".",
            None,
            id=f"q{q}/r{k}",
            source_id=f"q{q}",
            response_index=k,
        )
        for q in range(queries)
        for k in range(count)
    ]


def test_equal_and_empty_responses_are_no_alternatives():
    same = [replace(one, source_id="q") for one in several(1, 3)]
    doubled = [*same, replace(same[0], id="q/r9"), conversation("…", None, source_id="q")]
    assert [*post_training.distinct_responses(doubled).values()] == [same]
    assert post_training.distinct_responses(same[:1]) == {}


def test_sequences_that_are_too_long_are_left_out(tokenizer):
    chat = ChatFormat(tokenizer)
    made = [replace(one, real_follow_up="Why " * n) for n, one in enumerate(several(), start=1)]
    lengths = [len(row["input_ids"]) for row in post_training.sequences(chat, made, 1000)]
    longest = int(np.median(lengths))
    short = post_training.sequences(chat, made, longest)
    assert len(lengths) == 48 and len(short) == np.sum(np.array(lengths) <= longest) < 48
    with pytest.raises(UserError, match="no conversation has a real follow-up and at most 8 tok"):
        post_training.sequences(chat, made, 8)


def test_sources_are_held_out_whole():
    kept, apart = post_training.split(several(), 2)
    assert len({one.source_id for one in apart}) == 2 and len(apart) == 16
    assert not {one.source_id for one in kept} & {one.source_id for one in apart}
    with pytest.raises(UserError, match="leaves none of 6 queries"):
        post_training.split(several(), 6)


# --- commands


def test_prompts_are_texts_that_the_tokenizer_reads_as_the_context():
    for family in ("smollm2", "llama3_1", "gemma3", "gpt_oss"):
        chat = ChatFormat(families.build(family))
        rows, contexts = post_training.prompts(chat, several(2, 3), 1000)
        assert len(rows) == 6 and set(contexts) == {row["source"] for row in rows}
        for row in rows:
            ids = contexts[row["source"]][row["followed"]]
            assert chat.tokenizer(row["prompt"])["input_ids"] == ids
    with pytest.raises(UserError, match="no query has two different responses in conversations"):
        post_training.prompts(chat, several(2, 3), 20)


def by_full_passes(model, contexts, ids) -> list[float]:
    """Log-probabilities of a turn after each context, in nats."""
    passes = (full_logits(model, context, ids).double().log_softmax(-1) for context in contexts)
    return [sum(each[range(len(ids)), ids].tolist()) for each in passes]


def test_the_reward_is_the_evidence_for_the_response_as_the_model_before_training_reads_it(
    tiny_subject,
):
    chat = ChatFormat(tiny_subject.tokenizer)
    rows, contexts = post_training.prompts(chat, several(2, 3), 1000)
    texts = ("What is 17 times", "on and on and on")
    ids = [[*chat.template.encode(text)[0], chat.stop_ids[0]] for text in texts]
    batch = {name: [rows[0][name], rows[4][name]] for name in rows[0]} | {"completion_ids": ids}
    bits = post_training.reward(tiny_subject, contexts)(**batch)
    for at, row in enumerate((rows[0], rows[4])):
        logprobs = by_full_passes(tiny_subject.model, contexts[row["source"]], ids[at])
        wanted = evidence([logprobs], [row["followed"]])[0]
        assert bits[at] == pytest.approx(max(wanted, post_training.WORST), abs=1e-2)


@pytest.fixture
def spoken(tmp_path) -> Path:
    """Conversations with several responses to four queries, each with a follow-up."""
    rows = [one.to_dict() | {"real_follow_up": f"Why {n}?"} for n, one in enumerate(several(4, 4))]
    return written(tmp_path / "spoken.jsonl", rows)


def written(file: Path, rows: list[dict]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_export_writes_sequences_and_what_is_held_out(spoken, tiny_model_dir, tmp_path, capfd):
    out = tmp_path / "out"
    words = ["export", str(spoken), "--model", tiny_model_dir, "--held-out", "1"]
    done = call(main, [*words, "--out", str(out)], capfd)
    assert done.status == 0, done.err
    assert done.out == "12 user turns; 4 conversations are held out\n"
    assert json.loads((out / "post_training.json").read_text())["held_out"] == 1
    table = pd.read_parquet(out / "sequences.parquet")
    apart = [json.loads(line) for line in (out / "held-out.jsonl").read_text().splitlines()]
    assert [row["response_index"] for row in apart] == [0, 1, 2, 3]
    assert {row["source_id"] for row in apart} == {"q0", "q1", "q2", "q3"} - set(table["source_id"])
    # Whatever the seed, the same is held out.
    other = tmp_path / "other"
    assert call(main, [*words, "--seed", "1", "--out", str(other)], capfd).status == 0
    assert (other / "held-out.jsonl").read_text() == (out / "held-out.jsonl").read_text()
    again = refusal(call(main, [*words, "--out", str(out)], capfd))
    assert again.startswith(f"{out} isn't empty")


def test_what_cant_be_trained_on_is_refused(spoken, tiny_model_dir, tmp_path, capfd, monkeypatch):
    silent = str(written(tmp_path / "silent.jsonl", [one.to_dict() for one in several(3, 1)]))
    unanswered = str(written(tmp_path / "unanswered.jsonl", [{"messages": TURNS[:1]}]))
    monkeypatch.setattr(post_training.importlib.util, "find_spec", lambda name: None)
    for words, problem in (
        (["export", silent], "no conversation has a real follow-up and at most 1024 tokens"),
        (["export", unanswered], f"{unanswered} holds no response"),
        (["sft", str(spoken)], "training needs trl and peft; install them: pip"),
    ):
        rest = ["--model", tiny_model_dir, "--held-out", "1", "--out", str(tmp_path / "out")]
        assert refusal(call(main, [*words, *rest], capfd)).startswith(problem)


def test_an_adapter_is_refused_unless_it_is_of_the_model(tiny_model_dir, tmp_path, monkeypatch):
    def check(problem: str) -> None:
        with pytest.raises(UserError, match=problem):
            load.load_files(ModelSpec(name=tiny_model_dir, adapter=str(tmp_path)))

    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: None)
    check("--adapter needs peft")
    monkeypatch.setattr(load.importlib.util, "find_spec", lambda name: name)
    check("holds no adapter_config.json")
    for config, problem in (
        ("{", "is damaged"),
        ('{"base_model_name_or_path": "org/other"}', "was made for org/other, not for"),
    ):
        (tmp_path / "adapter_config.json").write_text(config)
        check(problem)


@pytest.fixture(scope="module")
def pair(tiny_model_dir, tmp_path_factory):
    """Judged runs of the tiny model and of one with other weights."""
    folder = tmp_path_factory.mktemp("pair")
    texts = written(folder / "texts.jsonl", [one.to_dict() for one in several(3, 3)])
    tuned = folder / "tuned"
    shutil.copytree(tiny_model_dir, tuned)
    weights = load_file(tuned / "model.safetensors")
    weights["model.layers.1.mlp.down_proj.weight"] *= 3
    save_file(weights, tuned / "model.safetensors", {"format": "pt"})
    words = ["--dataset", str(texts), "--limit", "all", "--temperatures", "1", "--samples", "1"]
    words += ["--max-new-tokens", "6", "--threads", "1", "--positions", "header_last"]
    for name, model in (("before", tiny_model_dir), ("after", tuned)):
        assert sample([*words, "--model", str(model), "--out", str(folder / name)]) == 0
        assert judge(["run", str(folder / name)]) == 0
    return [str(folder / name) for name in ("before", "after")]


def test_both_models_are_compared_on_the_same_queries(pair, tiny_subject, tmp_path, capfd):
    words = ["compare", *pair, "--queries", "2", "--resamples", "100", "--full"]
    words += ["--out", str(tmp_path / "out")]
    done = call(main, words, capfd)
    assert done.status == 0, done.err
    _, first, second, *_ = done.out.splitlines()  # before it: too few queries
    assert "bits by which a turn tells more" in first.lower()
    assert "after another response to the same query" in second
    assert "with 2, no difference can be shown" in " ".join(done.err.split())
    found = pd.read_parquet(tmp_path / "out" / "estimates.parquet")
    assert set(found.loc[found["low"].notna(), "sources"]) == {2}
    turns = pd.read_parquet(tmp_path / "out" / "turns.parquet")
    assert turns.groupby("term").size().tolist() == [6, 6]
    used = {source.split("\x1f")[1] for source in turns["source"]}
    # By full passes of the model before training.
    read_before = []
    for run in map(Run.open, pair):
        of = {one.context_id: one for one in run.contexts.itertuples()}
        after = run.generations.query("temperature == 1")
        logprobs, followed = [], []
        for turn in after[after["source_id"].isin(used)].itertuples():
            own = of[turn.context_id]
            siblings = [
                one.token_ids.tolist() for one in of.values() if one.source_id == own.source_id
            ]
            logprobs.append(by_full_passes(tiny_subject.model, siblings, turn.token_ids.tolist()))
            followed.append(own.response_index)
        read_before.append(np.mean(evidence(logprobs, followed)))
    rows = found[found["temperature"] == 1].set_index(["quantity", "term"])["value"]
    made = [rows[post_training.EVIDENCE, term] for term in ("before", "after")]
    made.append(rows[f"{post_training.EVIDENCE}, change", "after"])
    changed = read_before[1] - read_before[0]
    assert made == pytest.approx([*read_before, changed], abs=1e-2)


def test_one_run_cant_be_compared(pair, capfd):
    assert refusal(call(main, ["compare", pair[0]], capfd)).startswith("compare takes two runs;")


# --- with trl and peft


@pytest.mark.slow
def test_sft_learns_exactly_the_labels_and_leaves_an_adapter_to_merge(
    spoken, tiny_subject, tiny_model_dir, tmp_path, capfd
):
    pytest.importorskip("trl", reason="needs ia-mech[train]")
    tuned = tmp_path / "tuned"
    words = [str(spoken), "--model", tiny_model_dir, "--held-out", "1", "--threads", "1"]
    sft = ["sft", *words, "--epochs", "1", "--batch", "12", "--out", str(tuned)]
    done = call(main, sft, capfd)
    assert done.status == 0, done.err
    # Of one step over all sequences the loss is the mean over exactly the labelled tokens.
    table = pd.read_parquet(tuned / "sequences.parquet")
    losses = []
    for ids, labels in zip(table["input_ids"], table["labels"], strict=True):
        start = int((labels == post_training.IGNORED).sum())
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
    other = tmp_path / "other"
    shutil.copytree(tuned, other)
    config = json.loads((other / "adapter_config.json").read_text())
    config["r"] = 3
    (other / "adapter_config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=f"the adapter {other} can't be merged into"):
        load.load(replace(spec, adapter=str(other)))


@pytest.mark.slow
def test_reinforcement_learning_leaves_an_adapter(
    spoken, tiny_subject, tiny_model_dir, tmp_path, capfd
):
    pytest.importorskip("trl", reason="needs ia-mech[train]")
    out = tmp_path / "out"
    words = ["grpo", str(spoken), "--model", tiny_model_dir, "--held-out", "1", "--threads", "1"]
    words += ["--steps", "2", "--batch", "4", "--max-new-tokens", "5", "--out", str(out)]
    wrong = call(main, [*words, "--generations", "3"], capfd)
    assert refusal(wrong) == ("--batch 4 isn't a multiple of --generations 3; give --batch 3 or 6")
    done = call(main, words, capfd)
    assert done.status == 0, done.err
    assert "12 prompts of 3 queries; 4 conversations are held out" in done.out
    rows = [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["reward"] == pytest.approx(row["rewards/bits/mean"], abs=1e-4)
    spec = ModelSpec(name=tiny_model_dir, adapter=str(out))
    assert json.loads((out / "post_training.json").read_text())["max_new_tokens"] == 5
    loaded = load.load(spec)
    assert loaded.weights_hash != tiny_subject.weights_hash
    assert loaded.tokenizer.chat_template == tiny_subject.tokenizer.chat_template
