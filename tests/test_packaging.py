"""What a user installs: a wheel with everything that the program reads, and its version."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import ia_mech
from ia_mech.console import main

ROOT = Path(__file__).parent.parent
PACKAGES = ("ia_mech", "probes", "experiments")
NOT_CODE = (".html", ".js", ".css", ".json", ".jsonl", ".md", ".typed", ".toml", ".npz", ".jinja")


def test_the_version_names_the_commit_of_a_checkout(capsys):
    assert main(["--version"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"ia-mech {ia_mech.__version__}")
    git = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    found = subprocess.run(git, capture_output=True, text=True, check=False)
    if (ROOT / ".git").exists() and found.returncode == 0:
        assert found.stdout.strip()[:7] in shown


@pytest.mark.slow
def test_a_wheel_holds_every_file_of_the_packages_and_nothing_else(tmp_path):
    source = tmp_path / "source"  # building leaves a folder behind
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--wheel-dir", str(tmp_path)]
    subprocess.run([*command, str(source)], check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"ia_mech-{ia_mech.__version__}-")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    files = {
        str(path.relative_to(ROOT))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", *NOT_CODE)
    }
    assert held == files
