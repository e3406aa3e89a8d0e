"""The main job: parts, memory, precision, and what can't be used."""

import copy
import json
import os
import re
import shutil
import signal
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import tiny
import torch
from contract import VECTOR, relative_l2
from runs import sampled
from shell import call
from transformers import AutoTokenizer, GenerationConfig

import ia_mech.collect.compute as compute
import ia_mech.collect.job as job
import ia_mech.collect.parts as parts
from ia_mech.collect.command import main
from ia_mech.collect.memory import Memory
from ia_mech.collect.parts import plan_parts
from ia_mech.collect.plan import Plan, PlannedContext
from ia_mech.collect.progress import PhaseProgress
from ia_mech.collect.summary import print_run
from ia_mech.display import Quiet
from ia_mech.engine.check import TOKENS, check_engine
from ia_mech.engine.memory import footprint
from ia_mech.engine.workers import Crew
from ia_mech.errors import UserError
from ia_mech.judge.__main__ import main as judge
from ia_mech.models.load import ModelSpec, Subject, weights_hash
from ia_mech.rates.__main__ import main as rates
from ia_mech.report.contents import facts
from ia_mech.run import Run
from ia_mech.settings import Settings

SETTINGS = Settings(
    limit=6, temperatures=(0.7, 1.0), samples=2, max_new_tokens=5, batch_rows=20
)  # five rows to a context
CONTEXTS = ["maths-01", "instructions-01", "open-01", "maths-02", "instructions-02", "open-02"]


@pytest.fixture(scope="module")
def whole(tiny_subject, tmp_path_factory) -> Run:
    return sampled(SETTINGS, tiny_subject, tmp_path_factory.mktemp("whole") / "run")


# -- words that turns are made to begin with -------------------------------------------------------


def test_turns_go_on_from_an_opening_and_do_not_hold_it(tiny_subject, whole, tmp_path, capfd):
    opening = "Thanks. You say that"
    run = sampled(replace(SETTINGS, opening=opening, limit=3), tiny_subject, tmp_path / "run")
    words = run.record["identity"]["chat"]["opening_ids"]
    model, stops = tiny_subject.model, whole.record["identity"]["chat"]["stop_ids"]
    neutral = GenerationConfig(
        do_sample=False, max_new_tokens=5, eos_token_id=[int(i) for i in stops], pad_token_id=0
    )
    greedy = run.generations[run.generations["temperature"] == 0].set_index("order")
    plain = whole.generations[whole.generations["temperature"] == 0].set_index("order")
    logits = run.header_logits()
    for at, context in run.contexts.iterrows():
        without = whole.contexts.iloc[at]
        ids = context["token_ids"].tolist()
        assert ids == [*without["token_ids"], *words]
        assert context["positions"] == without["positions"]
        written = model.generate(torch.tensor([ids]), generation_config=neutral)[0, len(ids) :]
        turn = greedy.loc[context["order"]]
        assert turn["token_ids"].tolist() == written.tolist()
        assert opening not in turn["text"]
        with torch.inference_mode():
            expected = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
        assert torch.allclose(logits.log_probs(at).float(), expected, atol=5e-3)
    assert (greedy["text"] != plain.loc[greedy.index, "text"]).any()
    # The header comes before the words, so that its states are those without them; the users' real
    # turns don't begin so, and aren't scored.
    torch.testing.assert_close(
        run.residuals(), whole.residuals()[:3], atol=1e-4, rtol=1e-4, equal_nan=True
    )
    assert whole.contexts["real_follow_up_logprob"].notna().any()
    assert run.contexts["real_follow_up_logprob"].isna().all()
    print_run(run)
    assert f"note: every turn continues {opening!r}" in capfd.readouterr().out


# -- architectures --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "architecture",
    [
        "gemma3",
        "qwen3vl",
        *(
            pytest.param(x, marks=pytest.mark.slow)
            for x in sorted({*tiny.WRAPPERS} - {"gemma3", "qwen3vl"})
        ),
    ],
)
def test_the_text_of_a_model_that_reads_images_is_planned_and_sampled(
    architecture, tokenizer, tmp_path, capfd
):
    model = tiny.wrapper(architecture, len(tokenizer))
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    words = ["--model", str(tmp_path / "model"), "--limit", "2", "--temperatures", "1"]
    words += ["--samples", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "run")]
    planned = call(main, [*words, "--dry-run"], capfd)
    assert planned.status == 0 and not (tmp_path / "run").exists(), planned.err
    assert re.search(r"time +about \S+ min on an idle", planned.out)
    assert re.search(r"memory +known once the run has begun", planned.out)
    run = call(main, words, capfd).run
    for at, ids in enumerate(run.contexts["token_ids"]):
        with torch.inference_mode():
            whole = model(torch.tensor([ids.tolist()]), output_hidden_states=True, use_cache=False)
        states = torch.stack(whole.hidden_states)[:-1, 0, -1]  # the last one is normed
        assert relative_l2(run.residuals(position="header_last")[at, :-1], states) <= VECTOR
    planned = call(main, [*words, "--dry-run"], capfd)
    assert re.search(r"memory +\S+ .B for weights, at most \S+ .B for each part", planned.out)


OWN_CODE = """
from transformers import LlamaConfig, LlamaForCausalLM

class OwnConfig(LlamaConfig):
    model_type = "own"

class Own(LlamaForCausalLM):
    config_class = OwnConfig
"""


def test_a_model_with_code_of_its_own_is_planned_and_sampled(
    tokenizer, tmp_path, capfd, monkeypatch
):
    monkeypatch.setattr(
        "transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "code")
    )
    monkeypatch.syspath_prepend(tmp_path / "code")
    folder = tmp_path / "model"
    tiny.model("llama", len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "own.py").write_text(OWN_CODE)
    own = {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.Own"}
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "own", "architectures": ["Own"], "auto_map": own}
    (folder / "config.json").write_text(json.dumps(config))
    words = ["--model", str(folder), "--trust-remote-code", "--limit", "1", "--temperatures", "1"]
    words += ["--samples", "1", "--max-new-tokens", "4", "--out", str(tmp_path / "run")]
    planned = call(main, [*words, "--dry-run"], capfd)
    assert planned.status == 0 and re.search(r"time +about \S+ min on an idle", planned.out), (
        planned.err
    )
    assert call(main, words, capfd).run.complete


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (600, "the tokenizer gives the id 677, the model's embedding has 600 rows"),
        (700, r"\w+.jsonl line 1 \(id maths-01\), .*: the tokenizer gives the id 7.., the model's"),
    ],
    ids=["of the template", "of a text"],
)
def test_ids_beyond_the_embedding_are_refused_with_the_cause(
    rows, problem, tokenizer, tmp_path, capfd
):
    model = tiny.model("llama", rows)
    subject = Subject(ModelSpec(name="small"), model, tokenizer, weights_hash(model))
    with pytest.raises(UserError, match=f"^{problem}.*; use the tokenizer that the model was"):
        sampled(SETTINGS, subject, tmp_path / "run")
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    for dry in ([], ["--dry-run"]):
        words = ["--model", str(tmp_path / "model"), "--out", str(tmp_path / "run"), *dry]
        assert re.search(problem, call(main, words, capfd).err)
    assert not (tmp_path / "run").exists()


# -- parts ----------------------------------------------------------------------------------------


check_engine(tiny.model("llama"), tiny.prompt(TOKENS, seed=0))
SIZE = footprint(tiny.model("llama"))


def planned(settings: Settings, lengths: list[int], prompt: int = 0) -> SimpleNamespace:
    """A plan of contexts of such lengths; responses are written after prompts of ``prompt`` tokens,
    if it isn't 0."""
    contexts = [PlannedContext(None, tokens, None, (1,) * prompt) for tokens in lengths]
    written = [0 if prompt else None] * len(lengths)
    return SimpleNamespace(
        settings=settings,
        contexts=contexts,
        batch_rows=settings.batch_rows,
        device=torch.device("cpu"),
        parts=plan_parts(settings, "cpu", written),
    )


def test_a_part_fills_a_batch_and_a_part_of_responses_serves_whole_ones():
    plan = plan_parts(SETTINGS, "cpu", [0] * 10)
    # Four contexts of five rows fill 20 rows; four parts of a size hold ten contexts.
    assert list(plan.contexts.values()) == [[0, 1], [2, 3, 4], [5, 6], [7, 8, 9]]
    assert list(plan.responses.values()) == [list(range(10))]  # few rows cost as much as 16
    assert plan.counts == {"responses": 1, "contexts": 4}
    wide = plan_parts(SETTINGS, "cpu", [0] * 50)
    for some in wide.responses.values():
        inside = [part for part in wide.contexts.values() if part[0] in some]
        assert some == [order for part in inside for order in part] and len(some) <= 20
    alone = plan_parts(replace(SETTINGS, batch_rows=2), "cpu", [None] * 3)
    assert list(alone.contexts.values()) == [[0], [1], [2]]
    settings = replace(SETTINGS, responses=2, response_temperature=1.0)
    several = plan_parts(settings, "cpu", [0, 1] * 5)
    assert all(part[0] % 2 == 0 for part in several.contexts.values())  # no query is split


def test_memory_limits_what_is_computed_together():
    settings = replace(SETTINGS, batch_rows=100)
    row, context = SIZE.row(3000, 5), SIZE.context(3000)
    plan = planned(settings, [3000, 30, 3000, 30, 3000] * 4)  # four parts of five contexts
    enough = 3 * context + 2 * SIZE.context(30) + 25 * row
    for room, limit in ((enough, 100), (enough - 1, 24), (context + 3 * row, 3), (0, 1)):
        memory = Memory(plan, SIZE, room)
        rows, taken = memory.together("contexts", range(5))
        assert rows == limit and memory.part_bytes == taken
        assert taken <= room or limit == 1
    prompts = planned(settings, [3000] * 9, 2900)
    room = 3 * (SIZE.context(2900) + SIZE.row(2900, settings.max_response_tokens))
    assert Memory(prompts, SIZE, room).together("responses", range(9)) == (3, room)
    # Others wait for the places of long responses.
    thoughts = planned(replace(settings, max_response_tokens=3000), [3030] * 9, 30)
    memory = Memory(thoughts, SIZE, 2 * SIZE.row(30, 3000) + 8 * SIZE.context(30))
    assert memory.together("responses", range(9)) == (2, memory.room) and memory.waiting == 4


def test_the_machine_that_begins_a_run_says_how_much_memory_all_use(
    tiny_subject, tmp_path, monkeypatch
):
    """It has room for two contexts with their rows, the others for all at once, or for none."""
    few = 2 * (SIZE.context(200) + 5 * SIZE.row(200, 3))
    out, settings = tmp_path / "run", replace(SETTINGS, limit=5, max_new_tokens=3)
    changed: list[str] = []

    def unchanged(conversation, context) -> list:
        changed.append(conversation.id)
        return []

    def begin(*_):  # another machine does so while this one plans
        monkeypatch.setattr(job, "part_bytes", lambda *_: few)
        sampled(settings, tiny_subject, out, shard=(1, 2))
        return 10**9

    monkeypatch.setattr(job, "part_bytes", begin)
    run = sampled(settings, tiny_subject, out, shard=(2, 2), interventions=unchanged)
    assert run.complete and run.record["part_room"] == few
    mine = run.parts("contexts")[1::2]
    assert len(changed) == sum(part["contexts"] for part in mine) > 0
    monkeypatch.setattr(job, "part_bytes", lambda *_: 1)
    again = sampled(settings, tiny_subject, out)
    assert again.digest() == run.digest() and again.record == run.record
    alone = sampled(replace(settings, limit=1), tiny_subject, tmp_path / "alone")
    assert alone.record["part_room"] == 1 and alone.settings["batch_rows"] == 20
    assert [part["batch_rows"] for part in alone.parts("contexts")] == [1]
    whole = sampled(settings, tiny_subject, tmp_path / "whole")
    assert {part["batch_rows"] for part in whole.parts("contexts")} == {1}
    assert_same_but_at_near_ties(run, whole)


@pytest.mark.parametrize("of", [1, 2, 3, 5])
def test_every_part_is_dealt_to_one_shard_with_the_responses_that_it_needs(of):
    for written in ([None] * 90, [0, None] * 45):
        plan = plan_parts(SETTINGS, "cpu", written)
        shards = [plan.of_shard((number, of)) for number in range(1, of + 1)]
        for kind in ("contexts", "responses"):
            dealt = [name for shard in shards for name in getattr(shard, kind)]
            assert sorted(dealt) == sorted(getattr(plan, kind))
        for shard in shards:
            served = {order for part in shard.responses.values() for order in part}
            needed = {order for part in shard.contexts.values() for order in part}
            assert not plan.responses or needed == served


# -- memory and precision -------------------------------------------------------------------------


def tight(honest, most: int, begin: int = 0):
    """A function of rows that runs out of memory where there are more, from its n-th call on."""
    calls = []

    def limited(model, groups, rows, *arguments, **options):
        calls.append(len(rows))
        if len(rows) > most and len(calls) > begin:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return honest(model, groups, rows, *arguments, **options)

    return limited


def test_memory_running_out_is_said_recorded_in_its_parts_and_survived(
    whole, tiny_subject, tmp_path, progress, monkeypatch
):
    """Memory runs out in the second part of four; the later parts use the smaller batches, too."""
    monkeypatch.setattr(compute, "decode", tight(compute.decode, 8, begin=1))
    crew = Crew(workers=1)
    run = sampled(SETTINGS, tiny_subject, tmp_path / "run", progress, crew=crew)
    assert [line for line in progress.lines if "memory" in line] == [
        "out of memory: going on with batches of 5 turns or fewer"  # of 10
    ]
    assert [part.get("batch_rows") for part in run.parts("contexts")] == [None, 5, 5, 5]
    assert all("batch_rows" not in part for part in whole.parts("contexts"))
    assert_same_but_at_near_ties(whole, run)


def assert_same_but_at_near_ties(one: Run, other: Run) -> None:
    """Rows of batches of other widths differ only where rounding may decide."""
    for a, b in zip(one.generations.iloc, other.generations.iloc, strict=True):
        if a["token_ids"].tolist() != b["token_ids"].tolist():
            n = min(len(a["token_ids"]), len(b["token_ids"]))
            first = int(np.argmax(a["token_ids"][:n] != b["token_ids"][:n]))
            assert min(a["margins"][first], b["margins"][first]) < 1e-4


def test_responses_and_prefills_that_are_too_large_are_halved(
    tiny_subject, tmp_path, progress, monkeypatch
):
    settings = replace(SETTINGS, limit=3, response="generate", max_response_tokens=4)
    honest = compute.prefill_all

    def limited(model, prefixes, *others):
        if len(prefixes) > 1:
            raise MemoryError
        return honest(model, prefixes, *others)

    monkeypatch.setattr(compute, "prefill_all", limited)
    run = sampled(settings, tiny_subject, tmp_path / "run", progress)
    assert run.complete and len(run.generations) == 3 * 5
    assert [part["batch_rows"] for part in run.parts("responses")] == [1]
    monkeypatch.setattr(compute, "decode", tight(compute.decode, 0))
    with pytest.raises(UserError, match="out of memory with a batch of one; use a smaller model"):
        sampled(settings, tiny_subject, tmp_path / "none")


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)]
)
def test_half_precision_goes_through_to_the_files(dtype, tokenizer, tmp_path):
    model = copy.deepcopy(tiny.model("llama", len(tokenizer))).to(dtype)
    subject = Subject(ModelSpec(name="half"), model, tokenizer, weights_hash(model))
    settings = replace(SETTINGS, limit=2, samples=1)
    run = sampled(settings, subject, tmp_path / "run")
    kept = run.residuals(3, "header_last")
    assert kept.dtype == dtype and not kept.isnan().any()
    assert run.model["dtype"] == str(dtype).removeprefix("torch.")
    assert np.isfinite(run.generations["logprob_raw"]).all()
    assert run.digest() == sampled(settings, subject, tmp_path / "again").digest()


def test_logits_that_are_not_numbers_end_the_run_with_nothing_of_them_written(
    tiny_subject, tmp_path, monkeypatch
):
    honest = compute.prefill_all

    def broken(*arguments):
        groups, order = honest(*arguments)
        logits = groups[-1].logits.clone()
        logits[-1, 5] = torch.nan
        return [*groups[:-1], replace(groups[-1], logits=logits)], order

    monkeypatch.setattr(compute, "prefill_all", broken)
    with pytest.raises(UserError, match=r"logits are not numbers for the context of .* in float32"):
        sampled(SETTINGS, tiny_subject, tmp_path / "run")
    assert Run.open(tmp_path / "run", unfinished=True).counts == {"responses": 0, "contexts": 0}
    assert not list((tmp_path / "run").rglob("*.safetensors"))


# -- what can't be used ---------------------------------------------------------------------------


@pytest.mark.parametrize("refused", [["maths-01", *CONTEXTS[3:]], CONTEXTS])
def test_a_written_response_that_the_template_refuses_is_left_out_and_said(
    tiny_subject, tmp_path, progress, monkeypatch, refused
):
    """The template refuses one response of a part, all of a part, or all."""
    settings = replace(SETTINGS, response="generate", max_response_tokens=4)
    honest, chosen = Plan.render, set(refused)

    def picky(plan, conversation):
        if conversation.id in chosen and conversation.response != "Yes.":
            raise UserError("the template refuses it", "remove it")
        return honest(plan, conversation)

    monkeypatch.setattr(Plan, "render", picky)
    run = sampled(settings, tiny_subject, tmp_path / "run", progress)
    assert run.complete and run.verify() == []
    for name in refused:
        assert f"conversation {name} is left out: the template refuses it" in progress.lines
    left = [name for name in CONTEXTS if name not in refused]
    assert run.counts["contexts"] == len(left)
    if left:
        assert run.contexts["context_id"].tolist() == left
    else:
        with pytest.raises(UserError, match="holds no contexts"):
            run.contexts  # noqa: B018


def test_a_mark_that_only_the_generation_configuration_lists_is_refused_before_the_run(
    tiny_model_dir, tmp_path, capfd
):
    """As Qwen's ``<|endoftext|>``, which its template never writes, and which data from the web
    has."""
    model = shutil.copytree(tiny_model_dir, tmp_path / "model")
    end = AutoTokenizer.from_pretrained(model).convert_tokens_to_ids("<|endoftext|>")
    GenerationConfig(eos_token_id=[tiny.EOS, end]).save_pretrained(model)
    rows = [{"id": name, "question": "Why?", "response": name} for name in ("a", "b<|endoftext|>")]
    (tmp_path / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    words = ["--model", str(model), "--dataset", str(tmp_path / "rows.jsonl"), "--samples", "1"]
    words += ["--max-new-tokens", "3", "--out", str(tmp_path / "run")]
    for dry in (["--dry-run"], []):
        problem = call(main, [*words, *dry], capfd).err
        place = "rows.jsonl line 2 (id b<|endoftext|>)"
        assert f"{place}: the assistant turn 'b<|endoftext|>' holds" in problem
        assert not (tmp_path / "run").exists()
    run = call(main, [*words, "--skip-unusable"], capfd).run
    assert run.contexts["context_id"].tolist() == ["a"] and len(run.record["skipped"]) == 1
    assert str(end) in run.record["identity"]["chat"]["stop_ids"]


def test_contexts_that_are_too_long_are_refused_or_skipped_counted_and_recorded(
    whole, tokenizer, tmp_path, progress
):
    model = copy.deepcopy(tiny.model("llama", len(tokenizer)))
    lengths = whole.contexts["context_tokens"]
    follow_ups = whole.contexts["real_follow_up_token_ids"].map(len) + 1
    needed = lengths + follow_ups.clip(lower=SETTINGS.max_new_tokens)
    model.config.max_position_embeddings = int(needed.max()) - 1
    subject = Subject(ModelSpec(name="short"), model, tokenizer, weights_hash(model))
    long = whole.contexts["context_id"][needed == needed.max()].tolist()
    assert len(long) < 6
    with pytest.raises(UserError, match=rf"\(id {long[0]}\): it needs \d+ tokens, the model ha"):
        sampled(SETTINGS, subject, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    settings = replace(SETTINGS, skip_unusable=True)
    run = sampled(settings, subject, tmp_path / "run", progress)
    assert not {*long} & {*run.contexts["context_id"]} and len(run.contexts) == 6 - len(long)
    skipped = [line.split(":")[0] for line in run.record["skipped"]]
    assert [line.split("(id ")[1] for line in skipped] == [f"{name})" for name in long]
    assert any(
        line.startswith(f"skipped: {len(long)}, such as builtin_") for line in progress.lines
    )
    model.config.max_position_embeddings = 4096  # which isn't where rotations change
    model.config.rope_parameters = {
        "rope_type": "longrope", "original_max_position_embeddings": 5
    }  # fmt: skip
    with pytest.raises(UserError, match=r"no conversation of builtin can be used \(6 skipped, su"):
        sampled(settings, subject, tmp_path / "none")


# -- the start-up check ----------------------------------------------------------------------------


def test_a_failed_check_is_refused_or_recorded_and_shown_wherever_results_are(
    loaded_anew, tiny_model_dir, tmp_path, capfd, monkeypatch
):
    words = ["--model", tiny_model_dir, "--limit", "1", "--samples", "1", "--temperatures", "1"]
    words += ["--max-new-tokens", "3", "--out", str(tmp_path / "run")]
    problem = "LlamaForCausalLM gives other logits in "
    monkeypatch.setattr("ia_mech.engine.check.TOLERANCE", 0.0)
    monkeypatch.setattr("ia_mech.engine.check.ROUNDINGS", 0)
    refused = call(main, words, capfd)
    assert refused.status == 2 and problem in refused.err and not (tmp_path / "run").exists()
    done = call(main, [*words, "--ignore-check"], capfd)
    assert problem in done.err and f"start-up check found {problem}" in done.out
    run = done.run
    assert problem in run.sessions[0]["ignored_check"] and problem in run.ignored_check
    assert problem in facts(run)["start-up check"]
    assert call(judge, ["run", str(run.path)], capfd).status == 0
    assert problem in " ".join(call(rates, [str(run.path)], capfd).out.split())
    sound = Run.open(tmp_path / "run")
    sound.sessions[0].pop("ignored_check")
    assert sound.ignored_check == "" and "start-up check" not in facts(sound)


# -- resuming --------------------------------------------------------------------------------------


class Stop(Quiet):
    """A progress during which somebody presses Ctrl-C, once, when so many parts are written."""

    def __init__(self, parts: int) -> None:
        self.parts, self.pressed = parts, False

    def advance(self, steps: int = 1, note: str = "") -> None:
        self.parts -= "writing" in note
        if self.parts < 0 and not self.pressed:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)


def test_resuming_elsewhere_says_what_differs(tiny_subject, tmp_path, progress, monkeypatch):
    out = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        sampled(SETTINGS, tiny_subject, out, Stop(0))
    session = Run.open(out, unfinished=True).sessions[0]
    assert session["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert session["weights"] in ("plain", "reordered")
    honest = job.machine
    other = {"threads": 64, "cpu_capability": "SSE"}
    monkeypatch.setattr(job, "machine", lambda *arguments: honest(*arguments) | other)
    assert sampled(SETTINGS, tiny_subject, out, progress).complete
    assert progress.lines[0] == (
        f"note: threads {session['threads']} → 64, cpu_capability {session['cpu_capability']} → "
        "SSE since this run was last worked on; turns written now may round differently"
    )


def test_a_run_goes_on_with_its_threads_unless_others_are_given(tiny_subject, tmp_path, progress):
    """Also in a shard of a run that was begun whole. The workers are those asked for now."""
    settings = replace(SETTINGS, batch_rows=5)
    out, before = tmp_path / "run", torch.get_num_threads()
    with pytest.raises(KeyboardInterrupt):
        sampled(settings, tiny_subject, out, Stop(0), crew=Crew(1, 2))
    crew = Crew(workers=2)
    sampled(settings, tiny_subject, out, progress, shard=(1, 2), crew=crew)
    assert not any("threads" in line for line in progress.lines)
    run = sampled(settings, tiny_subject, out, progress, crew=Crew(threads=1))
    assert torch.get_num_threads() == before
    assert [session["threads"] for session in run.sessions] == [2, 2, 1]
    assert [session["workers"] for session in run.sessions][:2] == [1, 2]
    assert [line for line in progress.lines if "threads 2 → 1" in line]


def test_rows_do_not_depend_on_the_workers(tiny_subject, tmp_path):
    """Nor do rows depend on a kill after which another number of workers goes on."""
    settings = replace(SETTINGS, limit=4, batch_rows=10, response="generate")
    settings = replace(settings, max_new_tokens=4, max_response_tokens=4)
    digests = {
        sampled(settings, tiny_subject, tmp_path / str(n), crew=Crew(n, 1)).digest() for n in (1, 3)
    }
    with pytest.raises(KeyboardInterrupt):
        sampled(settings, tiny_subject, tmp_path / "on", Stop(0), crew=Crew(2, 1))
    assert not Run.open(tmp_path / "on", unfinished=True).complete
    digests.add(sampled(settings, tiny_subject, tmp_path / "on", crew=Crew(4)).digest())
    assert len(digests) == 1


def test_rows_that_wait_for_places_are_those_of_batches_of_their_own(
    tiny_subject, tmp_path, monkeypatch
):
    """As on a GPU, where a part holds more rows than are decoded together."""
    settings = replace(SETTINGS, batch_rows=7)
    monkeypatch.setattr(parts, "PARTS", {"cpu": 1})
    apart = sampled(settings, tiny_subject, tmp_path / "apart")
    for where in (parts, compute):
        monkeypatch.setattr(where, "QUEUE", {"cpu": 4})
    drawn: list[int] = []
    honest = compute.PartProgress.decoded
    monkeypatch.setattr(
        compute.PartProgress, "decoded", lambda self, *n: (drawn.append(n[0]), honest(self, *n))
    )
    queued = sampled(settings, tiny_subject, tmp_path / "queued")
    assert_same_but_at_near_ties(apart, queued)
    assert max(drawn) == 7 and len(queued.parts("contexts")) < len(apart.parts("contexts"))


def test_it_is_said_early_and_once_that_most_responses_are_unfinished(progress):
    phase = PhaseProgress(progress, "responses", "response", {"a": (9, 10)}, ["a"], 5, 3)
    for written, unfinished, said in ((4, 4, 0), (6, 1, 0), (2, 2, 1), (6, 6, 1)):
        phase.responded(written, unfinished)
        assert len(progress.lines) == 1 + said
    assert "7 of the first 12 responses didn't end within 5 tokens" in progress.lines[1]


def test_first_tokens_that_are_not_there_are_not_counted_as_turns(progress):
    phase = PhaseProgress(progress, "user turns", "turn", {"a": (41, 10)}, ["a"], 5)
    part = phase.begin("a")
    part.fewer(37, 37 * 5)
    part.decoded(4, 4, 16)
    assert progress.note.startswith("4 turns, decoding") and progress.steps == 41 * 5


def test_the_bar_has_room_for_responses_that_are_drawn_again(progress):
    phase = PhaseProgress(progress, "responses", "response", {"a": (4, 10)}, ["a"], 5, 3)
    assert progress.lines == [f"responses {3 * (4 * 5 + 10)} 0"]
    part = phase.begin("a")
    part.prefilled(10)
    part.decoded(4, 4, 16)
    assert progress.steps == 4 * 5 + 10 and progress.note.endswith(" tokens/s")
    part.prefilled(0)
    assert progress.note.endswith("prefilling"), "no rate of decoding"
    part.redraw(2)
    assert progress.note.startswith("4/4 responses, 2 sampled again, decoding")
    for _ in range(5):
        part.decoded(2, 0, 0)
    assert progress.steps == 30 + 10
    part.end()
    assert progress.steps == 90
