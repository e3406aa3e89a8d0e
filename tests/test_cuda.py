"""What only a GPU can show; skipped without one. Run with: pytest -m gpu -n 0"""

import copy

import numpy as np
import pytest
import test_fused
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
from ia_mech.engine.cuda.stepper import FIELDS, StaticBuffers, Stepper, free_bytes, start_copy
from ia_mech.engine.cuda.stream import PrefixSlots
from ia_mech.engine.decode import decode, decode_stream
from ia_mech.engine.loop import Row, sample
from ia_mech.engine.plan import Grid
from ia_mech.engine.prefill import Prefix, prefill
from ia_mech.engine.sampling import stream_key
from ia_mech.engine.shared_prefix import Engine
from ia_mech.errors import UserError
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load

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
    group, sizes = prefilled_by(model, (9,)), StaticBuffers(None, 1, rows, 9, 40).sizes(rows)
    stepper, held = Stepper(model, sizes, group, graphs), PrefixSlots(sizes.prefixes)
    stepper.put_prefixes([held.hold(0)], group, [0])
    greedy = torch.zeros(rows), torch.zeros(rows, 2).long()
    stepper.begin(range(rows), [0] * rows, group, torch.zeros(rows).long(), *greedy)
    stepper.put_tables(*held.tables([0] * rows, sizes))
    return stepper


def buffers_for(model, engine: Engine, contexts: int, rows: int, longest: int, own: int):
    """Static buffers, where the engine has any."""
    if not engine.static:
        return None
    return StaticBuffers(model, contexts, rows, longest, own, engine.graphs)


def engine_of(model, wanted: str) -> Engine:
    return check.with_static_buffers(model, tiny.prompt(24, seed=0), Engine.possible(model), wanted)


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_greedy_equals_generate_in_float32(architecture):
    model = model_of(architecture)
    prompts = [tiny.prompt(n, seed=n) for n in LENGTHS]
    group = prefill(model, [Prefix(prompt) for prompt in prompts])
    engine = engine_of(model, "auto")
    rows = [Row(c, 0.0, (0, 0)) for c in range(len(prompts))]
    static = buffers_for(model, engine, len(prompts), 1, max(LENGTHS), 24)
    ours = decode(model, group, rows, [tiny.EOS], 24, share=engine.shared > 0, static=static)
    for prompt, row in zip(prompts, ours, strict=True):
        theirs = greedy(model, prompt, 24)
        if row.token_ids.tolist() != theirs:
            length = min(len(theirs), len(row.token_ids))
            first = int(np.argmax(row.token_ids[:length] != np.array(theirs[:length])))
            assert row.margins[first] < 1e-4


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_architecture_has_static_buffers_and_no_graphs_by_default(architecture):
    engine = engine_of(model_of(architecture), "auto")
    assert engine.static and not engine.graphs, engine.why


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_graphs_can_be_had_or_are_refused_with_the_reason(architecture):
    try:
        assert engine_of(model_of(architecture), "graphs").graphs
    except UserError as error:
        assert architecture not in DENSE, "nothing speaks against it"
        assert error.problem.startswith("--engine graphs: no static buffers: ")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["qwen3", "qwen3_5", "gemma3"])
def test_graph_and_eager_steps_are_bit_for_bit_the_same(architecture, dtype):
    model = model_of(architecture, dtype)
    replayed, stepped = (stepper_of(model, graphs=g) for g in (True, False))
    for _ in range(12):
        ours, theirs = (stepper.step(stepper.sizes)() for stepper in (replayed, stepped))
        torch.testing.assert_close(ours, theirs, atol=0, rtol=0, equal_nan=True)
        assert ours[FIELDS.index("logprob")].isfinite().all()


@pytest.mark.parametrize("triton", ["1", "0"])
@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("architecture", DENSE)
def test_rows_equal_between_static_buffers_the_loop_and_widths(
    architecture, graphs, triton, monkeypatch
):
    monkeypatch.setenv("IA_MECH_TRITON", triton)
    model = model_of(architecture)
    group = prefilled_by(model, LENGTHS)
    loops = decode(model, group, ROWS, STOPS, 12)
    static = StaticBuffers(model, len(LENGTHS), 5, max(LENGTHS), 12, graphs)
    for width in (1, 5, 17, len(ROWS)):
        ours = decode_stream(model, [group], ROWS, STOPS, 12, width=width, static=static)
        assert near_ties(model, LENGTHS, ROWS, ours, loops) <= 1


@pytest.mark.parametrize("architecture", DENSE)
def test_a_step_never_makes_the_host_wait(architecture):
    replayed = stepper_of(model_of(architecture))
    stepped = stepper_of(model_of(architecture), graphs=False)
    stepped.step(stepped.sizes)()  # makes what libraries make on first use
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.inference_mode():
            replayed._graph.replay()
            stepped._step(stepped.sizes)
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


def test_the_embedded_model_end_to_end(tmp_path, progress):
    """Real text, in float32 on both devices: the same rows but for near-ties, and residuals."""
    if not embedded.models_dir().is_dir():
        pytest.skip("the embedded model isn't in the cache: run `make sample` once")
    runs = []
    for device in ("cpu", "cuda"):
        spec = ModelSpec(dtype="float32", device=device)
        config = SampleConfig(model=spec, limit=4, grid=Grid((0.7, 1.0), 4, 24, 0), batch_rows=20)
        runs.append(collect(config, load(spec), tmp_path / device, progress))
    assert runs[1].record["identity"]["engine"].endswith(", static buffers")
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


def test_a_copy_has_what_the_tensor_held_when_it_was_begun():
    tensor = torch.randn(512, 512, device="cuda")
    expected = tensor.cpu()
    torch.cuda._sleep(200_000_000)
    copy = start_copy(tensor)
    tensor.zero_()
    del tensor
    others = [torch.full((512, 512), 7.0, device="cuda") for _ in range(8)]
    assert copy().is_pinned() and torch.equal(copy(), expected)
    assert all(bool((other == 7).all()) for other in others)


def test_free_memory_counts_what_pytorch_reserves():
    before = free_bytes(GPU)
    tensor = torch.empty(2**28, dtype=torch.uint8, device="cuda")
    during = free_bytes(GPU)
    del tensor
    assert during <= before - 2**28 and free_bytes(GPU) >= during + 2**28
    assert free_bytes(GPU) <= torch.cuda.mem_get_info()[1]
