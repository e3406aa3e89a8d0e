"""The sampling kernel in Triton's interpreter, if there is Triton, against PyTorch operations."""

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from ia_mech.engine.cuda import fused
from ia_mech.engine.sampling import draw, gumbel

TRITON = importlib.util.find_spec("triton") is not None


def differences(vocab: int, scale: float, dtype: torch.dtype, device: str) -> dict[str, float]:
    """Largest ones by field, of nine rows at temperatures from greedy to 2."""
    generator = torch.Generator().manual_seed(vocab)
    logits = (torch.randn(9, vocab, generator=generator) * scale).to(dtype)
    temperature = torch.tensor([0, 0.5, 1.0, 1.3, 2.0, 0.05, 1.0, 1.0, 0])
    keys = torch.randint(0, 2**32, (9, 2), generator=generator)
    step = torch.arange(9) * 7
    logits, temperature, keys, step = (t.to(device) for t in (logits, temperature, keys, step))
    ours = fused.draw(logits, temperature, keys, step)
    noise = gumbel(keys, step[:, None], vocab)
    theirs = draw(logits.float(), temperature, noise, torch.arange(9, device=device))
    assert ours.logprob_tempered.isnan().tolist() == theirs.logprob_tempered.isnan().tolist()
    return {
        name: float((value.double() - getattr(theirs, name).double()).nan_to_num().abs().max())
        for name, value in vars(ours).items()
    }


def check(device: str, vocabularies=(97, 4096, 5001)) -> None:
    """Asserts that the kernel draws what PyTorch operations draw."""
    for vocab in vocabularies:
        for scale, dtype in ((3.0, torch.float32), (8.0, torch.bfloat16)):
            found = differences(vocab, scale, dtype, device)
            assert found["token"] == found["rank"] == 0, (vocab, dtype, found)
            # Divided by the coldest temperature, logits of so many times the deviation round so.
            cold = 4 * torch.finfo(torch.float32).eps * 6 * scale / 0.05
            assert max(found.pop(name) for name in ("logprob_tempered", "margin")) < cold
            assert max(found.values()) < 1e-5, (vocab, dtype, found)


@pytest.mark.slow
@pytest.mark.skipif(not TRITON, reason="Triton isn't installed: pip install triton")
def test_the_kernel_in_the_interpreter():
    """In a process of its own: Triton decides on import whether it interprets."""
    paths = os.pathsep.join([os.path.dirname(__file__), *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, "-c", "import test_fused; test_fused.check('cpu')"],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths},
        check=True,
    )


def test_kernels_are_used_on_gpus_where_triton_works(monkeypatch):
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.setattr(fused, "problem", lambda device: "")
    monkeypatch.delenv("IA_MECH_TRITON", raising=False)
    assert fused.available(gpu) is TRITON and not fused.available(cpu)
    assert fused.missed(gpu) == ("" if TRITON else "Triton isn't installed")
    assert fused.missed(cpu) == ""
    monkeypatch.setattr(fused, "triton", object())
    monkeypatch.setattr(fused, "problem", lambda device: "no C compiler")
    assert not fused.available(gpu) and fused.missed(gpu) == "no C compiler"
    monkeypatch.setenv("IA_MECH_TRITON", "0")
    assert not fused.available(gpu) and fused.missed(gpu) == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, which draws")
def test_what_a_trial_raises_is_the_reason():
    assert fused.problem(torch.device("cuda")) != ""


def test_the_series_of_the_exponential_is_exact_where_it_is_used():
    """Ten terms, at the largest u that takes them, against float64."""
    u = torch.tensor([2.0**-33, 1e-6, 0.01, 0.125])
    series = torch.full_like(u, 0.1)
    for n in range(9, 0, -1):
        series = series * u + 1.0 / n
    exact = -torch.log1p(-u.double())
    assert ((series * u).double() / exact - 1).abs().max() < 2e-7
