import os, shutil
from pathlib import Path
import torch
from shell import call
from test_steering import folder, small  # noqa
from experiments.steering import main
from ia_mech.run import Run
from ia_mech.steering import ADD, TURN, SteeringVector
OUT = Path(os.environ["SAME_OUT"])

def test_same(folder, small, tmp_path, capfd):
    model = Run.open(folder).model
    d = torch.randn(32, generator=torch.Generator().manual_seed(1))
    v = SteeringVector(ADD, 2, ("header_last", TURN), d, 9.0, "tiny", model["weights_hash"])
    v.save(tmp_path / "v.safetensors")
    for name, more in (
        ("stp", ["--probe", str(folder.parent / "probe"), "--kl", "0.01"]),
        ("stv", ["--vector", str(tmp_path / "v.safetensors"), "--kl", "0.02", "--queries", "4"]),
    ):
        shutil.rmtree(OUT / name, ignore_errors=True)
        words = [str(folder), "--resamples", "200", *more, "--out", str(OUT / name), "--full"]
        plan = call(main, [*words, "--dry-run"], capfd)
        found = call(main, words, capfd)
        (OUT / f"{name}.txt").write_text(plan.out + "=====\n" + found.out)
        assert found.status == 0, found.err
