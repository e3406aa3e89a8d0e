"""What only a GPU can show; skipped without one. Run with: pytest -m gpu -n 0"""

import copy
from dataclasses import replace

import numpy as np
import pytest
import tiny
import torch
import two_level
from contract import near_ties, prefilled
from runs import sampled

from ia_mech.engine.check import check_engine
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import installed
from ia_mech.engine.sampling import draw_tokens, stream_key
from ia_mech.engine.score import Turn, score
from ia_mech.engine.state import Prefix, prefill
from ia_mech.models import embedded
from ia_mech.models.load import ModelSpec, load
from ia_mech.settings import Settings

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
LENGTHS = (3, 5, 9, 14, 17, 23)
# What is captured; where experts are, it may depend on versions.
CAPTURED = ("llama", "mistral", "qwen3", "glm4", "gemma3")
EXPERTS = ("qwen3_moe", "gpt_oss", "glm4_moe")
EACH = pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)


@pytest.fixture(autouse=True)
def exact_products():
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False


def model_of(architecture: str, dtype: torch.dtype = torch.float32):
    return copy.deepcopy(tiny.model(architecture)).to("cuda", dtype)


@EACH
def test_rows_scores_and_residuals_equal_the_cpus(architecture):
    rows = [
        Row(c, t, stream_key(1, f"s{c}", s)) for c in range(6) for t in (0, 0.7) for s in (0, 1)
    ]
    turns = [Turn(c, tiny.prompt(n, seed=n)) for c, n in ((5, 9), (0, 8), (3, 1), (1, 30))]
    found = []
    for model in (tiny.model(architecture), model_of(architecture)):
        groups = [prefilled(model, LENGTHS[:4]), prefilled(model, LENGTHS[4:])]
        wrote = decode(model, groups, rows, [tiny.EOS, *range(90, 97)], 12)
        prefixes = [Prefix(tiny.prompt(n, seed=n), [0, n - 1]) for n in (9, 23, 14)]
        residuals = prefill(model, prefixes).residuals.cpu()
        found.append((wrote, score(model, groups, turns), residuals))
    (wrote, scored, residuals), (ours, rescored, again) = found
    assert near_ties(tiny.model(architecture), LENGTHS, rows, ours, wrote) <= 1
    for a, b in zip(scored, rescored, strict=True):
        np.testing.assert_allclose(a.logprobs_raw, b.logprobs_raw, rtol=0, atol=4e-4)
    assert ((again - residuals).norm(dim=-1) / residuals.norm(dim=-1)).max() <= 1e-4


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_the_check_passes(architecture, dtype):
    engine = check_engine(model_of(architecture, dtype), tiny.prompt(24, seed=0))
    assert engine.share and not engine.why


@EACH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_captured_steps_write_the_rows_of_plain_ones(architecture, dtype):
    """With rows that join, twice; in half precision the check alone compares them."""
    model = model_of(architecture, dtype)
    engine = check_engine(model, tiny.prompt(24, seed=0))
    assert engine.captured or engine.uncaptured
    assert engine.captured == (architecture in CAPTURED) or architecture in EXPERTS
    rows = [
        Row(c, t, stream_key(1, f"s{c}", 0), drawn=drawn)
        for c in range(6)
        for t, drawn in ((0, None), (0.7, None), (1.3, 2))
    ]
    groups = [prefilled(model, LENGTHS[:4]), prefilled(model, LENGTHS[4:])]
    stops, wrote = [tiny.EOS, *range(88, 97)], []
    for captured in (engine.captured, engine.captured, False):
        if not captured:
            installed(model).engine = replace(engine, captured=False)
        wrote.append(decode(model, groups, rows, stops, 12, together=11))
    first, second, plain = wrote
    for a, b in zip(first, second, strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert np.array_equal(a.logprobs_raw, b.logprobs_raw)
    if dtype == torch.float32:
        assert near_ties(tiny.model(architecture), LENGTHS, rows, first, plain) <= 1


def test_a_step_that_waits_is_found_before_it_is_captured(monkeypatch):
    from ia_mech.engine import captured

    model, honest = model_of("llama"), captured._Numbers._step
    groups, rows = [prefilled(model, LENGTHS)], [Row(0, 0.0, (0, 0))]
    plain = decode(model, groups, rows, [], 6)
    made = installed(model)
    made.engine = replace(made.engine, captured=True)
    monkeypatch.setattr(
        captured._Numbers,
        "_step",
        lambda self, *given: (honest(self, *given), int(self.token[0])),
    )
    found = decode(model, groups, rows, [], 6)
    assert not made.engine.captured and "synchroniz" in made.engine.uncaptured
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()
    assert found[0].token_ids.tolist() == plain[0].token_ids.tolist()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_steps_are_captured_on_a_device_that_is_not_the_current_one():
    for device in ("cuda:1", "cuda:0"):
        model = copy.deepcopy(tiny.model("llama")).to(device)
        assert check_engine(model, tiny.prompt(24, seed=0)).captured


@pytest.mark.parametrize("vocab", [40, 97, 5001, 151_936])
def test_the_draw_equals_the_cpus(vocab):
    generator = torch.Generator().manual_seed(vocab)
    for rows, step in ((9, 0), (9, 1), (33, 2), (1, 3)):
        given = (
            torch.randn(rows, vocab, generator=generator) * 3,
            torch.tensor([0, 0.5, 1.0, 1.3, 2.0, 0.05]).repeat(6)[:rows],
            torch.randint(0, 2**32, (rows, 2), generator=generator),
        )
        theirs = draw_tokens(*given, step)
        ours = vars(draw_tokens(*(one.cuda() for one in given), step))
        ours = {name: found.cpu() for name, found in ours.items()}
        # Sums, powers and logarithms may round differently: tokens may differ at a near-tie.
        same = ours["token"] == theirs.token
        assert (same | (theirs.margin < 4 * two_level.ROUNDING)).all()
        assert torch.equal(ours["rank"][same], theirs.rank[same])
        torch.testing.assert_close(ours["logprob"][same], theirs.logprob[same], atol=1e-5, rtol=0)


def test_the_embedded_model_end_to_end(tmp_path, progress):
    """Real text, in float32 on both devices: the same rows but for near-ties, and residuals."""
    if not embedded.models_dir().is_dir():
        pytest.skip("the embedded model isn't in the cache: run `make sample` once")
    runs = []
    for device in ("cpu", "cuda"):
        settings = Settings(
            dtype="float32", device=device, limit=4, temperatures=(0.7, 1.0), max_new_tokens=24
        )
        subject = load(ModelSpec(dtype="float32", device=device))
        runs.append(sampled(settings, subject, tmp_path / device, progress))
    for cpu, gpu in zip(*(run.generations.iloc for run in runs), strict=True):
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
