"""The GPU benchmark's arithmetic, records and tables; and the whole of it on a CPU, in small."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from shell import call, refusal
from torch import nn

from benchmarks.sampling.tables import between_markers
from benchmarks.sampling_cuda import __main__ as command
from benchmarks.sampling_cuda import device as devices
from benchmarks.sampling_cuda import peers, processes, worker
from benchmarks.sampling_cuda.contenders import Contender, Ours, Profile
from benchmarks.sampling_cuda.floor import Least, least
from benchmarks.sampling_cuda.peers import Continuous, Generate, demand_complete, errors_logged
from benchmarks.sampling_cuda.processes import Plan, Runner
from benchmarks.sampling_cuda.results import Log, Measured, Results, Setting, Size, collect, ratio
from benchmarks.sampling_cuda.tables import CLOSING, OPENING, full, kernels_table, timed_table
from benchmarks.sampling_cuda.worker import Process, Task
from benchmarks.sampling_cuda.workload import TINY_SIZE, Workload, build
from ia_mech.errors import UserError

CPU = torch.device("cpu")
SETTING = Setting(
    device="NVIDIA X", gpu=True, driver="1", dtype="bfloat16", torch="2", transformers="5",
    besides="none", contexts=4, context_tokens=8, rows=5, new_tokens=10,
)  # fmt: skip
REPOSITORY = Path(__file__).parents[1]


# -- the floor ----------------------------------------------------------------------------------


class Head(nn.Module):
    """Weights of a model: a table of 10 x 4, a matrix of 4 x 4, a norm of 4, perhaps a head."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.table, self.matrix = nn.Embedding(10, 4), nn.Linear(4, 4, bias=False)
        self.norm, self.head = nn.LayerNorm(4, bias=False), nn.Linear(4, 10, bias=False)
        if tied:
            self.head.weight = self.table.weight
        text = SimpleNamespace(num_attention_heads=6)
        self.config = SimpleNamespace(get_text_config=lambda decoder: text)

    def get_input_embeddings(self) -> nn.Module:
        return self.table

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def attended() -> SimpleNamespace:
    """2 key-value heads of width 3, in bfloat16."""
    keys = torch.zeros(1, 2, 8, 3, dtype=torch.bfloat16)
    return SimpleNamespace(keys=keys, values=keys.clone())


def recurrent() -> SimpleNamespace:
    """A state of 5 x 7 in float32 and a window of 6 channels x 4 in bfloat16."""
    states = {0: torch.zeros(1, 5, 7)}
    return SimpleNamespace(
        recurrent_states=states,
        conv_states={0: torch.zeros(1, 6, 4, dtype=torch.bfloat16), 1: None},
    )


@pytest.mark.parametrize("tied", [True, False])
def test_a_floor_by_hand(tied):
    found = least(Head(tied), SimpleNamespace(layers=[attended()]), Size(4, 8, 5, 10))
    # 20 rows, 9 steps, 5 own tokens on average. Weights: 40 + 16 + 4 numbers of 4 bytes, whether
    # or not there is a second table, which is only looked up in. A token: 2 x 2 x 3 x 2 bytes.
    assert found.bytes == 9 * (60 * 4 + 24 * (4 * 8 + 20 * 5) + 20 * 2 * 10 * 4)
    # The norm is no product. Six heads score 3 numbers and add up 3, of 8 + 5 tokens.
    assert found.operations == 9 * 2 * 20 * (56 + 6 * 6 * 13)


def test_recurrent_states_are_read_and_written_in_their_own_dtypes():
    size = Size(4, 8, 5, 10)
    without = least(Head(True), SimpleNamespace(layers=[attended()]), size)
    found = least(Head(True), SimpleNamespace(layers=[attended(), recurrent()]), size)
    assert found.bytes - without.bytes == 9 * 20 * 2 * (35 * 4 + 24 * 2)
    assert found.operations - without.operations == 9 * 2 * 20 * 3 * 35


def test_the_floor_takes_a_real_cache():
    model = build("tiny-hybrid", torch.float32, CPU)
    work = Workload(model, TINY_SIZE)
    cache = next(iter(work.groups(False))).state.cache
    found = least(model, cache, TINY_SIZE)
    weights = sum(p.nbytes for p in model.parameters())
    # One layer of four attends: 2 heads of 8, keys and values. Three have 4 states of 8 x 8 and
    # windows of 4 tokens over 2 x (8 + 8) + 4 x 8 channels; but see what the cache holds of them.
    window = cache.layers[0].conv_states[0].shape[-1]
    state = 3 * 4 * (4 * 8 * 8 + window * (2 * 16 + 32))
    moved = weights + 2 * 2 * 8 * 4 * (4 * 24 + 20 * 3) + 20 * 2 * (state + 300 * 4)
    assert found.bytes == 5 * moved


def test_seconds_of_a_floor_are_by_bytes_and_by_operations():
    assert Least(100.0, 30.0).seconds(50.0, 10.0) == (2.0, 3.0)


# -- what the GPU did ---------------------------------------------------------------------------


def test_idle_time_is_what_no_kernel_covers_and_copies_to_the_host_are_none():
    told = devices.summary(
        [
            devices.Event("a", 0, 4e6),
            devices.Event("b", 2e6, 5e6),  # beside a
            devices.Event("Memcpy DtoH (Device -> Pinned)", 5e6, 8e6),
            devices.Event("a", 8e6, 10e6),
        ]
    )
    assert (told["span"], told["busy"], told["idle"]) == (10, 7, pytest.approx(0.3))
    assert told["kernels"] == [
        {"name": "a", "seconds": 6.0, "count": 2},
        {"name": "b", "seconds": 3.0, "count": 1},
    ]


def test_ten_kernels_are_listed():
    events = [devices.Event(f"k{i}", 100 * i, 100 * i + i) for i in range(1, 20)]
    names = [kernel["name"] for kernel in devices.summary(events)["kernels"]]
    assert names == [f"k{i}" for i in range(19, 9, -1)]


def test_a_profiler_that_sees_nothing_is_said():
    with pytest.raises(UserError, match="saw no kernels"):
        devices.summary([])


def test_without_nvidia_smi_the_state_is_unknown(monkeypatch):
    cuda = torch.device("cuda")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="ab-cd")
    )
    monkeypatch.setenv("PATH", "")
    assert devices.state(cuda) is None and devices.driver(cuda) == "unknown"
    assert devices.state(CPU) is None


def test_the_state_is_read_from_nvidia_smi(monkeypatch, tmp_path):
    script = tmp_path / "nvidia-smi"
    script.write_text('#!/bin/sh\necho "$1" >&2\necho "GPU-ab-cd, 1980, 3201, 41, [N/A]"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="ab-cd")
    )
    assert devices.state(torch.device("cuda")) == {
        "uuid": "GPU-ab-cd", "sm_mhz": 1980.0, "memory_mhz": 3201.0, "celsius": 41.0, "watts": None
    }  # fmt: skip


# -- peers --------------------------------------------------------------------------------------


def results(names: list[str], tokens: int = 3) -> dict[str, SimpleNamespace]:
    return {n: SimpleNamespace(error=None, generated_tokens=[7] * tokens) for n in names}


PARENTS = ["req_0", "req_1"]
ALL = [f"{parent}{child}" for parent in PARENTS for child in ("__child#0", "__child#1", "")]


@pytest.mark.parametrize("names", [PARENTS, ALL], ids=["5.17", "5.23"])
def test_continuous_batching_must_have_written_everything(names):
    demand_complete(results(names), 2, 3, 3)
    with pytest.raises(RuntimeError, match=f"{len(names) - 1} results, not {len(names)}"):
        demand_complete(results(names[1:]), 2, 3, 3)
    with pytest.raises(RuntimeError, match="has 2 tokens, not 3"):
        demand_complete(results(names) | results(names[-1:], 2), 2, 3, 3)
    failed = results(names)
    failed[names[0]].error = "no room"
    with pytest.raises(RuntimeError, match=f"{names[0]}: no room"):
        demand_complete(failed, 2, 3, 3)
    with pytest.raises(RuntimeError, match="0 results"):
        demand_complete({}, 2, 3, 3)


def test_what_continuous_batching_only_logs_is_an_error():
    from transformers.generation.continuous_batching.requests import logger

    with errors_logged() as errors:
        logger.warning("not this")
        logger.error("Requests ['req_0'] failed during generation.")
    logger.error("nor this")
    with pytest.raises(RuntimeError, match="failed during generation"):
        demand_complete(results(PARENTS), 2, 3, 3, errors)


@pytest.fixture
def work() -> Workload:
    return Workload(build("tiny", torch.float32, CPU), TINY_SIZE)


def test_generate_gets_half_as_many_contexts_until_they_fit(work, monkeypatch):
    one, calls = Generate(work, 4), []

    def call(ids) -> None:
        calls.append(len(ids))
        if len(ids) > 1:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 3 GiB")

    monkeypatch.setattr(one, "_call", call)
    resets = []
    monkeypatch.setattr(torch.compiler, "reset", lambda: resets.append(len(calls)))
    work.model._compiled_call = call  # compiled for four contexts, it would not do for two
    one.warm_up()
    assert resets == [1] and not hasattr(work.model, "_compiled_call")
    assert calls == [4, 2, 1] and one.notes["together"] == 1
    assert one.notes["tried"][4].startswith("OutOfMemoryError: CUDA out of memory")
    one.measure()
    assert calls == [4, 2, 1, 1, 1, 1, 1]


def test_generate_that_fits_nothing_or_fails_otherwise_says_so(work, monkeypatch):
    one = Generate(work, 4)

    def call(_ids) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(one, "_call", call)
    with pytest.raises(MemoryError, match="not one context fits"):
        one.warm_up()
    with pytest.raises(ValueError, match="unsupported"):
        peers.too_much(lambda: (_ for _ in ()).throw(ValueError("unsupported")))


def test_generate_that_stops_early_is_not_measured(work, monkeypatch):
    monkeypatch.setattr(work.model, "generate", lambda batch, **_: batch)
    with pytest.raises(RuntimeError, match=r"tokens \(4, 24\), not \(20, 30\)"):
        Generate(work, 4).warm_up()


def test_continuous_batching_gets_other_contexts_each_time_and_says_its_attention(
    work, monkeypatch
):
    given = []

    def generate_batch(ids, generation_config, persistent_manager):
        assert persistent_manager and generation_config.num_return_sequences == 5
        work.model.model(torch.tensor(ids[:1]))
        given.append(ids)
        return results([f"req_{i}" for i in range(4)], 6)

    monkeypatch.setattr(work.model, "generate_batch", generate_batch)
    one = Continuous(work)
    one.warm_up()
    one.measure()
    one.close()
    assert one.notes == {"engine": "attention sdpa"}
    assert [len(ids) for ids in given] == [4, 4] and given[0] != given[1]
    assert not work.blocks[0]._forward_pre_hooks


def test_on_a_cpu_ours_says_that_it_is_the_plain_loop(work):
    assert Ours(work).notes["engine"] == "shared-prefix 2 of 2 layers, plain loop"
    with pytest.raises(UserError, match="without graphs anyway"):
        Ours(work, graphs=False)
    with pytest.raises(UserError, match="a CPU runs no kernels"):
        Profile(work)


# -- records ------------------------------------------------------------------------------------


def seconds(*values: float, **notes) -> Measured:
    gpu = [{"uuid": "GPU-1", "sm_mhz": 1900.0 + i, "celsius": 40.0} for i in range(len(values))]
    return Measured([{"seconds": s, "decode": s / 2} for s in values], gpu, notes)


def test_a_cut_line_costs_only_itself(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.agree(SETTING)
    log.add("warm-up", model="m", contender="ours", seconds=1.5)
    with log.path.open("ab") as file:
        file.write(b'{"kind": "measured", "mod')
    log.add("failed", model="m", contender="ours", why="lost")
    found = collect(log.records())["m", "ours"]
    assert (found.warm_up, found.failed, found.values) == (1.5, "lost", [])
    assert Results.read([log.path]).setting == SETTING


@pytest.mark.parametrize(
    "lines",
    [
        '{"kind": "setting", "at": "2026", "gpu": true}',
        '{"kind": "measured", "at": "2026", "model": "m", "contender": "ours"}',
        '{"kind": "poem"}',
    ],
)
def test_lines_that_say_too_little_are_named(tmp_path, lines):
    log = Log(tmp_path / "log.jsonl")
    log.agree(SETTING)
    log.path.write_text(log.path.read_text() + lines + "\n")
    with pytest.raises(UserError, match=r"line 2 of .* is no measurement"):
        Results.read([log.path])


def test_a_file_of_something_else_is_not_written_to(tmp_path):
    notes = tmp_path / "notes.md"
    notes.write_text("my notes\n")
    with pytest.raises(UserError, match="holds something else"):
        Log(notes).agree(SETTING)
    assert notes.read_text() == "my notes\n"


def test_no_file_counts_twice(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.agree(SETTING)
    with pytest.raises(UserError, match="is named twice"):
        Results.read([log.path, tmp_path / "." / "log.jsonl"])
    with pytest.raises(UserError, match="is a folder"):
        Results.read([tmp_path])


def test_a_log_of_another_setting_is_refused(tmp_path):
    log = Log(tmp_path / "log.jsonl")
    log.agree(SETTING)
    log.agree(SETTING)
    assert len(log.records()) == 1
    other = Setting(**asdict(SETTING) | {"torch": "3"})
    with pytest.raises(UserError, match="torch = 2, not 3"):
        log.agree(other)
    again = Log(tmp_path / "other.jsonl")
    again.agree(other)
    with pytest.raises(UserError, match="different settings"):
        Results.read([log.path, again.path])


@pytest.mark.parametrize("text", ["", "a poem\n", "[1]\n", '{"rows": 3}\n'])
def test_other_files_are_refused(tmp_path, text):
    path = tmp_path / "other.jsonl"
    path.write_text(text)
    with pytest.raises(UserError):
        Results.read([path])
    with pytest.raises(UserError, match="no file"):
        Results.read([tmp_path / "none.jsonl"])


def test_what_is_missing():
    assert Measured().missing(3, 0) == 3
    assert seconds(1.0, 2.0).missing(3, 0) == 1
    failed = Measured(failed="no memory", failures=1)
    assert failed.missing(3, 0) == 0 and failed.missing(3, 1) == 3
    assert Measured(cut="slow").missing(3, 0) == 3  # nothing was measured after that was said
    slow = seconds(1.0)
    slow.cut = "slow"
    assert slow.missing(3, 0) == 0


def test_a_failure_is_forgotten_when_it_was_measured_after_all():
    job = {"model": "m", "contender": "static"}
    failure = {"kind": "failed", "why": "no memory"} | job
    success = {"kind": "measured", "values": {"seconds": 1.0}, "notes": {}, "gpu": None} | job
    found = collect([failure, success])["m", "static"]
    assert (found.failed, found.failures, found.take("seconds")) == ("", 1, [1.0])
    assert collect([success, failure])["m", "static"].failed == "no memory"


def test_a_ratio_is_of_medians_with_the_range_of_all_pairs():
    assert ratio([6.0, 8.0, 9.0], [1.0, 2.0, 4.0]) == (4.0, 1.5, 9.0)


# -- tables -------------------------------------------------------------------------------------


def cells(markdown: str) -> dict[str, list[str]]:
    """Of a table's rows, by the first of them."""
    rows = [line[2:-2].split(" | ") for line in markdown.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


@pytest.fixture
def found() -> Results:
    ours = seconds(1.0, 2.0, 4.0, engine="shared | whole", least_bytes=60.0, least_operations=30.0)
    once = seconds(8.0, engine="static cache, compiled", together=2, tried={"4": "no memory"})
    once.cut = "a warm-up of 99 s"
    stopped = seconds(3.0, engine="attention sdpa")
    stopped.failed = "killed at its limit of 300 s"
    kernels = [{"name": "gemm<a|b>`", "seconds": 3.0, "count": 7}]
    profile = {"span": 10.0, "busy": 9.0, "idle": 0.1, "kernels": kernels}
    taken = {"plain": [1.0, 2.0], "captured": [1.01, 2.04]}
    return Results(
        SETTING,
        {
            ("", "ceilings"): Measured([{"bandwidth": 100.0, "rate": 100.0}]),
            ("m", "ours"): ours,
            ("m", "static"): once,
            ("m", "continuous"): stopped,
            ("m", "generate"): Measured(failed="ValueError: no"),
            ("m", "profile"): Measured([profile]),
            ("m", "capture"): Measured([taken]),
        },
        ["2026-11-21", "2026-11-22"],
    )


def test_tokens_ratios_and_how_it_ran(found):
    shown = cells(timed_table(found, "m"))
    # 4 x 5 x 10 tokens in 2 s
    assert shown["ia_mech, all layers at 5 positions"] == [
        "", "2 (1 … 4)", "100", "", "shared \\| whole", "1900 to 1902, 40"
    ]  # fmt: skip
    assert shown["`generate`, static cache, compiled"] == [
        "4", "8", "25", "4.00 (2.00 … 8.00)",
        "static cache, compiled; 2 contexts a call (4 don't fit); "
        "measured once, after a warm-up of 99 s",
        "1900, 40",
    ]  # fmt: skip
    assert shown["`transformers`' continuous batching"][3:5] == [
        "1.50 (0.75 … 3.00)", "attention sdpa; stopped (killed at its limit of 300 s)"
    ]  # fmt: skip
    assert shown["`generate`"] == ["", "", "", "", "not measured (ValueError: no)", ""]
    assert shown["`generate` with hidden states and scores"][4] == "not measured yet"


def test_everything_is_told(found):
    told = full(found)
    assert "2026-11-21 and 2026-11-22" in told and "GPUs" not in told
    # Decoding took 0.5, 1 and 2 s; bytes alone 0.6 s, operations 0.3.
    assert "1 (0.5 … 2) s, 200 tokens/s" in told
    assert "60% (30% … 120%) of the larger is reached" in told
    assert "adds +1.5% (+1.0% … +2.0%) to a plain prefill (1500 ms)" in told
    assert "idle for 10.0% of a run" in told
    assert "| `gemm<a\\|b>` | 7 | 3 | 33.3% |" in told
    found.of("m", "static").gpu[0]["uuid"] = "GPU-2"
    assert "On 2 GPUs of this kind" in full(found)


def test_nothing_measured_is_told_as_that(found):
    found.measured = {("m", "ours"): Measured(failed="MemoryError: no")}
    told = full(found)
    assert "ceilings: not measured yet" in told
    assert "Decoding alone: not measured (MemoryError: no)." in told
    assert "idle share: not measured yet" in told
    assert kernels_table([], 1.0).count("\n") == 1


def test_the_readme_has_the_markers_and_no_figure():
    text = command.DOCUMENT.read_text(encoding="utf-8")
    assert "new" in between_markers(text, "new", OPENING, CLOSING)


# -- processes ----------------------------------------------------------------------------------


def plan(out: Path, **changes) -> Plan:
    fields = {
        "models": ["tiny"], "contenders": ["ceilings", "ours", "static"], "rounds": 2, "out": out,
        "device": "cpu", "dtype": "float32", "size": TINY_SIZE, "together": 4, "limit": 100,
        "budget": 1000, "retry": False,
    }  # fmt: skip
    return Plan(**fields | changes)


@pytest.fixture
def started(monkeypatch) -> list[tuple[str, dict[str, int], float]]:
    """Processes that would have been started; they measure all they should."""
    begun = []

    def run_process(task: Task, limit: float) -> int:
        begun.append((task.model, task.rounds, limit))
        for contender, rounds in task.rounds.items():
            for _ in range(rounds):
                measured(Log(Path(task.out)), task.model, contender)
        return 0

    monkeypatch.setattr(processes, "run_process", run_process)
    return begun


def measured(log: Log, model: str, contender: str) -> None:
    values = {"seconds": 1.0}
    log.add("measured", model=model, contender=contender, values=values, notes={}, gpu=None)


def test_one_process_for_ours_and_one_for_each_peer(started, tmp_path):
    contenders = ["static", "profile", "ours", "ceilings"]
    chosen = plan(tmp_path / "log", models=["a", "b"], contenders=contenders)
    assert Runner(chosen).run() == []
    assert started == [
        ("", {"ceilings": 1}, 100),
        ("a", {"ours": 2, "profile": 1}, 100),
        ("b", {"ours": 2, "profile": 1}, 100),
        ("a", {"static": 2}, 100),
        ("b", {"static": 2}, 100),
    ]
    started.clear()
    Runner(chosen).run()
    assert started == []


def test_it_goes_on_with_what_is_missing(started, tmp_path):
    log = Log(tmp_path / "log")
    measured(log, "", "ceilings")
    measured(log, "tiny", "ours")
    log.add("failed", model="tiny", contender="static", why="no memory")
    Runner(plan(log.path)).run()
    assert started == [("tiny", {"ours": 1}, 100)]
    Runner(plan(log.path, retry=True)).run()
    assert started[1:] == [("tiny", {"static": 2}, 100)]


def test_what_fails_again_is_not_tried_for_ever(started, tmp_path, monkeypatch):
    log, tries = Log(tmp_path / "log"), []

    def run_process(task: Task, limit: float) -> int:
        tries.append(list(task.rounds))
        return 1

    monkeypatch.setattr(processes, "run_process", run_process)
    chosen = plan(log.path, contenders=["ours", "capture"], retry=True)
    Runner(chosen).run()
    assert tries == [["ours", "capture"], ["capture"]]
    Runner(chosen).run()
    assert tries[2:] == [["ours", "capture"], ["capture"]]
    assert collect(log.records())["tiny", "ours"].failed == "its process ended with status 1"


def test_a_process_killed_at_its_limit_is_a_result(tmp_path, monkeypatch):
    monkeypatch.setattr(processes, "run_process", lambda task, limit: None)
    log = Log(tmp_path / "log")
    assert Runner(plan(log.path, contenders=["static"])).run() == []
    assert collect(log.records())["tiny", "static"].failed == "killed at its limit of 100 s"


def test_the_budget_leaves_the_rest_to_the_next_command(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr(processes.time, "monotonic", lambda: clock[0])
    limits = []

    def run_process(task: Task, limit: float) -> int | None:
        limits.append(limit)
        clock[0] += 60
        if limit < 60:
            return None
        measured(Log(Path(task.out)), task.model, next(iter(task.rounds)))
        return 0

    monkeypatch.setattr(processes, "run_process", run_process)
    chosen = plan(tmp_path / "log", contenders=["ours", "static", "generate"], rounds=1, budget=170)
    left = Runner(chosen).run()
    assert limits == [100, 100, 50]  # the last was cut short by the command's end, not by its own
    assert left == [("tiny", "generate")]
    assert ("tiny", "generate") not in collect(Log(tmp_path / "log").records())


class Slow(Contender):
    """Takes no time and says that it takes a lot."""

    def warm_up(self) -> float:
        return 40.0

    def measure(self) -> dict:
        return {"seconds": 1.0}


class Broken(Contender):
    def measure(self) -> dict:
        raise RuntimeError("CUDA error: an illegal\nmemory access")


@pytest.fixture
def process(tmp_path, monkeypatch):
    """Runs contenders in this process; gives what is in the log then."""
    monkeypatch.setattr(worker.devices, "name", lambda _: "CPU")

    def run(makers: dict, limit: float = 100) -> dict[tuple[str, str], Measured]:
        monkeypatch.setattr(
            worker, "MAKERS", {n: (lambda w, _, c=c: c(w)) for n, c in makers.items()}
        )
        out = tmp_path / "log"
        rounds = dict.fromkeys(makers, 3)
        task = Task("tiny", rounds, str(out), "cpu", "float32", TINY_SIZE, 4, limit)
        assert Task.read(task.written()) == task
        Process(task, worker.time.monotonic()).run()
        return collect(Log(out).records())

    return run


def test_what_would_pass_its_share_is_measured_once(process):
    slow = process({"static": Slow})["tiny", "static"]
    assert len(slow.values) == 1 and slow.cut == "a warm-up of 40 s"
    assert slow.missing(3, 0) == 0


def test_with_time_enough_all_rounds_are_measured(process):
    slow = process({"static": Slow}, limit=200)["tiny", "static"]
    assert len(slow.values) == 3 and not slow.cut


def test_a_contender_that_fails_is_reported_and_the_rest_left_to_another_process(process, capsys):
    known = process({"static": Broken, "generate": Slow})
    assert known["tiny", "static"].failed == "RuntimeError: CUDA error: an illegal memory access"
    assert ("tiny", "generate") not in known
    assert "tiny static: failed" in capsys.readouterr().out


# -- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--device", "cpu"], "take hours on a CPU"),
        (["--device", "cpu", "--models", "tiny", "qwen3-4b"], "tiny ones decode another job"),
        (["--device", "gpu"], "not a device"),
        (["--read", "none.jsonl"], "no file none.jsonl"),
        (["--device", "cpu", "--models", "tiny", "--out", "none/log"], "no folder none"),
        (["--device", "cpu", "--models", "tiny", "--out", "."], "--out . is a folder"),
        (["--device", "cpu", "--models", "tiny", "--write"], "mean nothing"),
        (["--rounds", "0"], "not a whole number"),
        (["--contenders", "vllm"], "invalid choice"),
    ],
)
def test_bad_input_is_refused_in_one_line(words, said, capfd):
    outcome = call(command.main, words, capfd)
    assert said in (refusal(outcome) if "error: " in outcome.err else "")


def test_a_command_that_leaves_something_out_says_so_by_its_status(tmp_path, capfd):
    log = Log(tmp_path / "log")
    log.agree(worker.setting(CPU, "float32", TINY_SIZE))
    words = ["--device", "cpu", "--models", "tiny", "--out", str(log.path), "--budget", "1"]
    outcome = call(command.main, words, capfd)
    assert outcome.status == 3 and "the budget is spent; missing are" in outcome.err
    refused = refusal(call(command.main, [*words, "--dtype", "bfloat16"], capfd))
    assert "was measured with dtype = float32, not bfloat16" in refused
    refused = refusal(call(command.main, [*words, "--contexts", "3"], capfd))
    assert "was measured with contexts = 4, not 3" in refused


def test_tables_of_a_cpu_are_not_written(tmp_path, capfd):
    log = Log(tmp_path / "log")
    log.agree(Setting(**asdict(SETTING) | {"gpu": False}))
    words = ["--read", str(log.path), "--write"]
    assert "mean nothing" in refusal(call(command.main, words, capfd))


def test_tables_of_a_gpu_are_written_between_the_markers(tmp_path, monkeypatch, capfd):
    log, document = Log(tmp_path / "log"), tmp_path / "README.md"
    log.agree(SETTING)
    log.add("failed", model="qwen3-4b", contender="static", why="no memory")
    document.write_text(f"before\n{OPENING}\nold\n{CLOSING}\nafter\n", encoding="utf-8")
    monkeypatch.setattr(command, "DOCUMENT", document)
    outcome = call(command.main, ["--read", str(log.path), "--write"], capfd)
    assert outcome.status == 0, outcome.err
    told = document.read_text(encoding="utf-8")
    assert told.startswith("before\n") and told.endswith("\nafter\n") and "old" not in told
    assert outcome.out.strip() in told and "not measured (no memory)" in told


def start(out: Path, *words: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.sampling_cuda", "--device", "cpu", "--models", "tiny",
         "--out", str(out), *words],
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_killed_run_keeps_its_lines_and_the_next_one_goes_on(tmp_path):
    out = tmp_path / "log"
    words = ["--contenders", "ours", "static", "--rounds", "3"]
    with start(out, *words) as first:
        for line in first.stdout:
            if "measured" in line:
                break
        first.send_signal(signal.SIGKILL)
    before = len(Log(out).records())
    assert before >= 3  # the setting, a warm-up, a round
    with start(out, *words) as second:
        told, _ = second.communicate(timeout=300)
    assert second.returncode == 0
    for name in ("ours", "static"):
        assert len(collect(Log(out).records())["tiny", name].values) == 3
    assert "not compiled, sdpa; 4 contexts a call" in told


@pytest.mark.slow
def test_a_process_is_killed_at_its_limit(tmp_path):
    out = tmp_path / "log"
    with start(out, "--contenders", "ours", "--limit", "1") as run:
        _, err = run.communicate(timeout=100)
    assert run.returncode == 2 and "no process got as far as measuring" in err
    out.unlink()
    Log(out).agree(worker.setting(CPU, "float32", TINY_SIZE))
    with start(out, "--contenders", "ours", "--limit", "1") as run:
        told, err = run.communicate(timeout=100)
    assert run.returncode == 0, err
    assert "not measured (killed at its limit of 1 s)" in told
    assert json.loads(out.read_text().splitlines()[-1])["why"] == "killed at its limit of 1 s"
