"""What only a GPU can show; skipped without one. Run with: pytest -m gpu -n 0"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import test_fused
import test_kernels
import tiny
import torch
from contract import near_ties
from scipy import stats
from test_stream import LENGTHS, ROWS, STOPS, prefilled_by
from transformers import GenerationConfig

from ia_mech.collect.config import SampleConfig
from ia_mech.collect.job import collect
from ia_mech.engine.capture import find_blocks
from ia_mech.engine.cuda import check, fused
from ia_mech.engine.cuda.copies import CopyStream
from ia_mech.engine.cuda.seating import Seating
from ia_mech.engine.cuda.sizes import Shape, Sizes, free_bytes, needed_bytes
from ia_mech.engine.cuda.stepper import FIELDS, STEPS, Stepper
from ia_mech.engine.decode import decode, decode_stream
from ia_mech.engine.loop import Row, sample
from ia_mech.engine.plan import Grid
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared_prefix import Engine
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load, text_config

DENSE = ("llama", "mistral", "qwen3", "qwen3_5", "glm4", "gemma3")  # without experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def exact_products():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def model_of(architecture: str, dtype: torch.dtype = torch.float32):
    return copy.deepcopy(tiny.model(architecture)).to("cuda", dtype)


def greedy(model, prompt: list[int], tokens: int) -> list[int]:
    """What ``generate`` writes."""
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=tokens, eos_token_id=tiny.EOS, pad_token_id=0
    )
    ids = torch.tensor([prompt], device="cuda")
    written = model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=settings)
    return written[0, len(prompt) :].tolist()


def stepper_of(model, rows: int = 3, graphs: bool = True) -> Stepper:
    """Greedy rows of one context, that drew their first token."""
    group = prefilled_by(model, (9,))
    sizes = Sizes.of_rows([0] * rows, rows, 9, 40)
    stepper, seating = Stepper(model, sizes, group, graphs=graphs), Seating(sizes.slots)
    stepper.put_contexts([seating.hold(0)], group, [0])
    greedy = torch.zeros(rows), torch.zeros(rows, 2).long()
    stepper.begin(range(rows), [0] * rows, group, torch.zeros(rows).long(), *greedy)
    stepper.seat(*seating.tables([0] * rows, sizes))
    return stepper


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_greedy_equals_generate_in_float32(architecture):
    model = model_of(architecture)
    prompts = [tiny.prompt(n, seed=n) for n in LENGTHS]
    group = prefill(model, [Prefix(prompt) for prompt in prompts])
    engine = check.with_graphs(model, tiny.prompt(12, seed=0), Engine.possible(model))
    rows = [Row(c, 0.0, (0, 0)) for c in range(len(prompts))]
    share = engine.shared > 0
    ours = decode(model, group, rows, [tiny.EOS], 24, share=share, graphs=engine.graphs)
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = greedy(model, prompt, 24)
        if row.token_ids.tolist() != theirs:
            length = min(len(theirs), len(row.token_ids))
            first = int(np.argmax(row.token_ids[:length] != np.array(theirs[:length])))
            assert row.margins[first] < 1e-4


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_the_engine_uses_graphs_or_says_why(architecture):
    model = model_of(architecture)
    engine = check.with_graphs(model, tiny.prompt(12, seed=0), Engine.possible(model))
    assert engine.graphs or "no CUDA graphs: " in engine.why
    if architecture in DENSE:  # nothing speaks against it
        assert engine.graphs, engine.why


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "gemma3"])
def test_graph_and_eager_steps_are_bit_for_bit_the_same(architecture, dtype):
    model = model_of(architecture, dtype)
    replayed, stepped = (stepper_of(model, graphs=g) for g in (True, False))
    for _ in range(6):
        ours, theirs = (stepper.run(3, STEPS).wait() for stepper in (replayed, stepped))
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
        assert ours[:, FIELDS.index("logprob")].isfinite().all()


@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("architecture", DENSE)
def test_rows_equal_between_graphs_the_loop_and_widths(architecture, triton, monkeypatch):
    monkeypatch.setenv("IA_MECH_TRITON", triton)
    model = model_of(architecture)
    group = prefilled_by(model, LENGTHS)
    loops = decode(model, group, ROWS, STOPS, 12)
    for width in (1, 5, 17, len(ROWS)):
        sizes = Sizes.of_rows([row.context for row in ROWS], width, max(LENGTHS), 12)
        ours = decode_stream(model, [group], ROWS, STOPS, 12, width=width, static=sizes)
        assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


@pytest.mark.parametrize("architecture", DENSE)
def test_a_step_never_waits_for_the_host_to_be_told(architecture):
    stepper = stepper_of(model_of(architecture))
    stepper.run(3, 1)  # captures
    stepped = stepper_of(model_of(architecture), graphs=False)
    stepped.run(3, 1)  # makes what libraries make on first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            for graph in stepper._graphs.values():
                graph.replay()
            stepped._at.zero_()
            stepped._step(stepped.sizes.bucket(3))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_residuals_equal_the_cpus():
    for architecture in tiny.ARCHITECTURES:
        cpu, gpu = tiny.model(architecture), model_of(architecture)
        prefixes = [Prefix(tiny.prompt(n, seed=n), [0, n - 1]) for n in (9, 23, 14)]
        ours, theirs = (prefill(m, prefixes, find_blocks(m)).residuals.cpu() for m in (gpu, cpu))
        error = (ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)
        assert error.max() <= 1e-4, architecture


@pytest.mark.skipif(not fused.available(GPU), reason="no Triton that works")
def test_the_kernel_draws_what_pytorch_operations_draw():
    test_fused.check("cuda", (97, 5001, 151_936))


@pytest.mark.skipif(not fused.available(GPU), reason="no Triton that works")
def test_the_kernels_of_attention_in_float64():
    test_kernels.check("cuda")


@pytest.mark.skipif(not fused.available(GPU), reason="no Triton that works")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
@pytest.mark.parametrize("window", [None, 700])
def test_the_kernels_of_attention_at_real_sizes(dtype, dim, window):
    """33 rows of each of four contexts, of 1 to 2000 tokens."""
    lengths = (2000, 1, 511, 900)
    case = test_kernels.Case(
        dtype,
        group=4,
        dim=dim,
        value_dim=dim,
        contexts=(*range(4),) * 33,
        lengths=lengths,
        room=2048,
        own=128,
        scaling=dim**-0.5,
        window=window,
    )
    test_kernels.check("cuda", [case])
    alone = replace(case, contexts=(0,), lengths=lengths[:1])  # in splits
    test_kernels.check("cuda", [alone])


def test_the_embedded_model_end_to_end(tmp_path, progress):
    """Real text, in float32 on both devices: the same rows but for near-ties, and residuals."""
    if not embedded.models_dir().is_dir():
        pytest.skip("the embedded model isn't in the cache: run `make sample` once")
    runs = []
    for device in ("cpu", "cuda"):
        spec = ModelSpec(dtype="float32", device=device)
        config = SampleConfig(model=spec, limit=4, grid=Grid((0.7, 1.0), 4, 24, 0), batch_rows=20)
        runs.append(collect(config, load(spec), tmp_path / device, progress))
    assert runs[1].record["identity"]["engine"].endswith("CUDA graphs")
    rows = list(zip(*(run.generations.iloc for run in runs), strict=True))
    assert len(rows) == 4 * 9
    for cpu, gpu in rows:
        ours, theirs = gpu["token_ids"], cpu["token_ids"]
        length = min(len(ours), len(theirs))
        same = ours[:length] == theirs[:length]
        first = length if same.all() else int(np.argmin(same))
        if first < length:
            assert min(gpu["margins"][first], cpu["margins"][first]) < 1e-3
        apart = np.abs(gpu["logprobs_raw"][:first] - cpu["logprobs_raw"][:first])
        assert apart.max(initial=0.0) < 1e-3
    for layer in (0, 15, 30):
        theirs, ours = (run.residuals(layer, "header_last").double() for run in runs)
        assert ((ours - theirs).norm(dim=-1) / theirs.norm(dim=-1)).max() <= 1e-4


@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_draws_follow_the_distribution(triton, temperature, monkeypatch):
    monkeypatch.setenv("IA_MECH_TRITON", triton)
    draws, vocab = 200_000, 50
    logits = torch.randn(vocab, generator=torch.Generator().manual_seed(1)).cuda() * 2
    keys = torch.tensor([stream_key(0, "chi", i) for i in range(draws)], device="cuda")
    drawn = sample(
        logits.expand(draws, vocab),
        torch.full((draws,), temperature, device="cuda"),
        keys,
        torch.full((draws,), 3, device="cuda"),
    )
    expected = (logits.double() / temperature).softmax(-1).cpu().numpy() * draws
    counts = np.bincount(drawn.token.cpu().numpy(), minlength=vocab)
    rare = expected < 5
    counts, expected = (np.append(x[~rare], x[rare].sum()) for x in (counts, expected))
    keep = expected > 0
    assert stats.chisquare(counts[keep], expected[keep]).pvalue > 1e-3


def test_tensors_leave_while_the_device_works():
    """The copy is kept waiting until the memory would have been given to others."""
    copies, tensor = CopyStream(GPU), torch.randn(512, 512, device="cuda")
    expected = tensor.cpu()
    with torch.cuda.stream(copies._stream):
        torch.cuda._sleep(200_000_000)
    copy = copies.start(tensor)
    del tensor
    others = [torch.full((512, 512), 7.0, device="cuda") for _ in range(8)]
    assert copy.wait().is_pinned() and torch.equal(copy.wait(), expected)
    assert all(bool((other == 7).all()) for other in others)


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("architecture", ["llama", "qwen3_5", "gemma3"])
def test_a_batch_takes_what_was_planned(architecture, triton, graphs, monkeypatch):
    """At its peak, of 512 rows and 150k logits: gigabytes, besides which nothing else counts."""
    monkeypatch.setenv("IA_MECH_TRITON", triton)
    model = copy.deepcopy(tiny.model(architecture, 151_936)).to("cuda")
    group = prefilled_by(model, (9,))
    layers, config = group.state.cache.layers, text_config(model.config)
    shape = Shape.of(config, layers, group.logits, model.dtype)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    stepper = stepper_of(model, rows=512, graphs=graphs)
    stepper.run(512, 1).wait()
    taken = torch.cuda.max_memory_allocated() - before
    planned = needed_bytes(shape, stepper.sizes, fused.available(GPU))
    assert planned / 4 < taken < planned + 2**26, (planned, taken)  # libraries' workspaces
    assert free_bytes(GPU) <= torch.cuda.mem_get_info()[1]
