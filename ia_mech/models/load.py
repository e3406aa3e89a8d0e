"""Load a subject model and say exactly which weights it is."""

import contextlib
import functools
import hashlib
import importlib.util
import json
import logging.handlers
import os
import re
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from accelerate.utils import align_module_device
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
)
from transformers import logging as transformers_logging
from transformers.utils import cached_file
from transformers.utils.quantization_config import Mxfp4Config

from ia_mech.cli import expanded
from ia_mech.errors import UserError, exhaustion, is_out_of_memory
from ia_mech.models import embedded, gguf
from ia_mech.run.integrity import replace_file

PROBE_SECONDS = 5
ADAPTER = "adapter_config.json"
WEIGHTS = (  # of a checkpoint in a folder; transformers reads the first that is there
    *("model.safetensors", "model.safetensors.index.json"),
    *("pytorch_model.bin", "pytorch_model.bin.index.json"),
)
CHAT = "chat_template.json"
FETCHING = ("revision", "local_files_only")
LFS = b"version https://git-lfs"  # stands in place of a file that git-lfs hasn't fetched
MISTRAL = "fix_mistral_regex"  # mends Mistral's tokenizers that have a wrong expression
REPORTED = "LOAD REPORT"  # transformers' table of weights that are missing or not used
ROUTED = "ia_mech_"  # stands before the name of an installed model's attention implementation
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class ModelSpec:
    """Which model to load and how; ``name`` is what the user gave.

    ``dtype`` ``auto`` means float32 on a CPU (where half precision is slower and every equality in
    the tests is stated in float32) and the checkpoint's own dtype on a GPU. ``attention`` ``auto``
    leaves the choice to ``transformers``: sdpa, or eager where the architecture lacks it.
    ``adapter`` is a folder with a PEFT adapter, which is merged into the weights. ``device_map``
    ``auto`` distributes the model over this machine's GPUs, memory and disk. ``random_blocks`` is
    the seed with which all blocks are shuffled, see :func:`permute_blocks`.
    """

    name: str = embedded.NAME
    revision: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    attention: str = "auto"
    trust_remote_code: bool = False
    adapter: str | None = None
    device_map: str | None = None
    random_blocks: int | None = None

    def __post_init__(self) -> None:
        for name, default in (("device", "auto"), ("adapter", None), ("random_blocks", None)):
            if self.device_map and getattr(self, name) != default:
                flag = f"--{name.replace('_', '-')}"
                raise UserError(f"--device-map can't be used with {flag}", "leave one of them out")


class ModelFiles(NamedTuple):
    """What a model's folder holds beside its weights: enough to plan a run."""

    tokenizer: Any
    config: Any
    generation_config: Any


@dataclass
class Subject:
    """A loaded model with its tokenizer, its spec and the hash of its weights."""

    spec: ModelSpec
    model: PreTrainedModel
    tokenizer: object
    weights_hash: str

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def files(self) -> ModelFiles:
        """What a plan is made of."""
        return ModelFiles(self.tokenizer, self.model.config, self.model.generation_config)

    def describe(self) -> dict:
        """What ``run.json`` records of the model."""
        return {
            "name": self.spec.name,
            "adapter": self.spec.adapter,
            "random_blocks": self.spec.random_blocks,
            "revision": self.spec.revision,
            "commit": getattr(self.model.config, "_commit_hash", None),
            "weights_hash": self.weights_hash,
            "architecture": type(self.model).__name__,
            "layers": text_config(self.model.config).num_hidden_layers,
            "d_model": text_config(self.model.config).hidden_size,
            "vocab": self.model.get_output_embeddings().weight.shape[0],
            "dtype": str(self.model.dtype).removeprefix("torch."),
            "device": self.device.type,
            "attention": self.model.config._attn_implementation.removeprefix(ROUTED),
        }


def text_config(config: Any) -> Any:
    """The text part of a configuration (multimodal ones nest it)."""
    return config.get_text_config(decoder=True)


def context_limit(config) -> int | None:
    """The longest sequence that the model takes, in tokens; None if that isn't configured."""
    configured = getattr(text_config(config), "max_position_embeddings", None)
    return rotation_border(config) or configured


def rotation_border(config) -> int | None:
    """The longest sequence, in tokens, beyond which a model rotates all tokens differently
    (``dynamic`` and ``longrope`` scaling); None for other models.

    In ``transformers`` the longest row of a batch decides for all rows, and cached keys aren't
    rotated again. So longer rows have no reference to be compared with.
    """
    text = text_config(config)
    each = getattr(text, "rope_parameters", None) or {}
    each = [one for one in each.values() if isinstance(one, dict)] or [each]  # by kind of layer
    if not {one.get("rope_type") for one in each} & {"dynamic", "longrope"}:
        return None
    known = [one.get("original_max_position_embeddings") for one in each]
    return min(filter(None, [text.max_position_embeddings, *known]))


def refuse_unknown_ids(ids: Iterable[int], config: Any) -> None:
    """Raise UserError for a token id that the model's embedding has no row for."""
    largest, rows = max(ids), text_config(config).vocab_size
    if largest >= rows:
        raise UserError(
            f"the tokenizer gives the id {largest}, the model's embedding has {rows} rows",
            "use the tokenizer that the model was trained with, or train the tokens that were "
            "added (resize_token_embeddings); or leave out texts that name such tokens",
        )


def dequantization(name: str, config: Any) -> dict[str, Any]:
    """Arguments that dequantize MXFP4 weights (gpt-oss's) on loading; none if not quantized.

    Raises:
        UserError: the weights are quantized in another way; no other way was tested.
    """
    quantized = getattr(config, "quantization_config", None)
    if quantized is None:
        return {}
    kind = quantized.get("quant_method") if isinstance(quantized, dict) else quantized.quant_method
    if kind != "mxfp4":
        raise UserError(
            f"the weights of {name!r} are quantized ({kind})",
            "give a checkpoint in bfloat16, float16 or float32, or a GGUF file",
        )
    return {"quantization_config": Mxfp4Config(dequantize=True)}


def resolve_device(device: str) -> torch.device:
    """The device of this name; ``auto`` is the first CUDA device if there is one, else the CPU.
    Raises UserError for a device that this machine lacks."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not re.fullmatch(r"cpu|cuda(:[0-9]+)?", device):
        raise UserError(f"--device {device!r} is not a device", "use auto, cpu, cuda or cuda:N")
    made, count = torch.device(device), torch.cuda.device_count()
    if made.type == "cuda" and (made.index or 0) >= count:
        raise UserError(
            f"--device {device}: this machine has {count} CUDA device(s)",
            "use --device cpu" if not count else "name one of cuda:0 …",
        )
    return made


def resolve_dtype(dtype: str, device: torch.device) -> torch.dtype | str:
    """A torch dtype, or ``auto`` for the checkpoint's own (see :class:`ModelSpec`)."""
    if dtype == "auto":
        return torch.float32 if device.type == "cpu" else "auto"
    return DTYPES[dtype]


def stored_dtype(config) -> torch.dtype:
    """The dtype a checkpoint says it is in; float32 if it doesn't say."""
    dtype = getattr(config, "dtype", None) or getattr(text_config(config), "dtype", None)
    return dtype if isinstance(dtype, torch.dtype) else DTYPES.get(str(dtype), torch.float32)


def load_files(spec: ModelSpec, fetch: bool = True, needs_template: bool = False) -> ModelFiles:
    """What a model has beside its weights. Without ``fetch`` nothing is downloaded: the model has
    to be on this machine. With ``needs_template`` a GGUF file without a chat template is refused
    before the rest of it is read, which takes a while.

    Raises:
        UserError: the model cannot be found or read.
    """
    return _files(spec, *_locate(spec, fetch), needs_template)


def _files(
    spec: ModelSpec, place: str, kwargs: dict[str, Any], needs_template: bool = False
) -> ModelFiles:
    _check_adapter(spec)
    tokenizer: Any
    with _errors_in_one_line(spec):
        if "gguf_file" in kwargs:
            path = Path(place) / kwargs["gguf_file"]
            tokenizer, config = gguf.tokenizer(path, needs_template), gguf.configuration(path)
            generation_config = GenerationConfig.from_model_config(config)
        else:
            _refuse_missing_shards(Path(place))
            tokenizer = AutoTokenizer.from_pretrained(place, **kwargs, **{MISTRAL: True})
            if getattr(getattr(tokenizer, "backend_tokenizer", None), MISTRAL, False):
                _note(f"{spec.name}'s tokenizer cuts words wrongly; it is mended ({MISTRAL}=True)")
            config = AutoConfig.from_pretrained(place, **kwargs)
            asked = {name: value for name, value in kwargs.items() if name in FETCHING}
            if not tokenizer.chat_template:  # transformers reads this file for processors alone
                file = cached_file(
                    place, CHAT, _raise_exceptions_for_missing_entries=False, **asked
                )
                if file is not None:
                    tokenizer.chat_template = json.loads(Path(file).read_text())["chat_template"]
            try:
                generation_config = GenerationConfig.from_pretrained(place, **asked)
            except OSError:  # few folders hold none; the loaded model then has this one
                generation_config = GenerationConfig.from_model_config(config)
    dequantization(spec.name, config)
    return ModelFiles(tokenizer, config, generation_config)


_kept: ContextVar[dict[ModelSpec, Subject] | None] = ContextVar("kept", default=None)


@contextmanager
def models_kept() -> Iterator[None]:
    """While it lasts, a model that has been loaded is not loaded again."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def load(spec: ModelSpec) -> Subject:
    """A model for inference, loaded now or kept (:func:`models_kept`); see :func:`_load`."""
    kept = _kept.get()
    if kept is None:
        return _load(spec)
    key = replace(spec, name=_identifier(spec.name, spec.revision)[0])  # however it is spelt
    if key not in kept:
        kept[key] = _load(spec)
    return replace(kept[key], spec=spec)


def _load(spec: ModelSpec) -> Subject:
    """Load a model for inference.

    The global float32 matmul precision is set to full (no TF32): on CUDA devices TF32 changes
    residuals far more than anything measured here.

    Raises:
        UserError: unknown model or device, a model that isn't a causal language model, a checkpoint
            that lacks weights, a device with too little memory, or an adapter that can't be merged.
    """
    if torch.get_default_dtype() != torch.float32:
        raise UserError(
            f"torch's default dtype is {torch.get_default_dtype()}",
            "call torch.set_default_dtype(torch.float32) before; dtype= is of the model alone",
        )
    if any(torch.is_autocast_enabled(device) for device in ("cpu", "cuda")):
        raise UserError("torch.autocast is on", "leave the with block; give the model's dtype=")
    device = resolve_device(spec.device)
    dtype = resolve_dtype(spec.dtype, device)
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = False
    place, kwargs = _locate(spec)
    tokenizer, config, _ = _files(spec, place, kwargs)
    options = {"config": config, "dtype": dtype, "output_loading_info": True}
    options |= dequantization(spec.name, config)
    if spec.device_map or device.type != "cpu":  # read straight to the device
        options["device_map"] = spec.device_map or {"": str(device)}
    if spec.attention != "auto":
        options["attn_implementation"] = spec.attention
    # transformers counts some models that read images among causal language models.
    kind, auto = type(config), cast(Any, AutoModelForCausalLM)
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING:
        auto = AutoModelForImageTextToText
    with _errors_in_one_line(spec):
        model, report = auto.from_pretrained(place, **options, **kwargs)
        model = model.eval().requires_grad_(False)
    if model.device.type == "meta":
        raise UserError(
            f"not even the embeddings of {spec.name!r} fit into memory beside the largest block",
            "use a machine with more memory, or --dtype bfloat16",
        )
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise UserError(
            f"model {spec.name!r} lacks weights ({len(missing)}, such as {missing[0]})",
            "give a checkpoint of a whole causal language model",
        )
    if unused := sorted(report["unexpected_keys"]):
        _note(f"weights of {spec.name} are not used ({len(unused)}, such as {unused[0]})")
    if spec.adapter is not None:
        model = _merge_adapter(spec, model)
    if spec.random_blocks is not None:
        permute_blocks(model, spec.random_blocks)
    return Subject(spec, model, tokenizer, weights_hash(model))


@torch.no_grad()
def permute_blocks(model: PreTrainedModel, seed: int) -> None:
    """Shuffle the entries of each tensor of the blocks, in place.

    Embeddings, final norm and head stay. Such a model has trained embeddings but has learnt no
    computation: a control for whatever is read from a model's states. Shuffling keeps the
    distribution of the entries; under a default initialisation attention would be uniform. Blocks
    are the tensors in a numbered list. A permutation depends on the seed and its tensor's name.
    """
    numbered = [(n, p) for n, p in model.named_parameters() if re.search(r"\.\d+\.", n)]
    for name, tensor in numbered:
        digest = hashlib.sha256(f"{seed}|{name}".encode()).digest()
        random = torch.Generator().manual_seed(int.from_bytes(digest[:4]))
        order = torch.randperm(tensor.numel(), generator=random)
        tensor.copy_(tensor.cpu().flatten()[order].view_as(tensor))


def _refuse_missing_shards(folder: Path) -> None:
    """Raise UserError if a local folder lacks files of weights that its index names."""
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if weights is None or weights.suffix != ".json":
        return
    named = {*json.loads(weights.read_text())["weight_map"].values()}
    if lacking := sorted(name for name in named if not (folder / name).exists()):
        raise UserError(
            f"{folder} lacks {len(lacking)} of {len(named)} files of weights, such as {lacking[0]}",
            "copy or download the whole checkpoint",
        )


def _check_adapter(spec: ModelSpec) -> None:
    """Raise UserError unless an adapter's configuration says that it was made for this model."""
    if spec.adapter is None:
        return
    if importlib.util.find_spec("peft") is None:
        raise UserError("--adapter needs peft", "install it: pip install 'ia-mech[train]'")
    file = expanded(spec.adapter) / ADAPTER
    if not file.is_file():
        raise UserError(f"{spec.adapter} holds no {ADAPTER}", "give a folder that peft has saved")
    try:
        base = json.loads(file.read_text()).get("base_model_name_or_path")
    except (ValueError, AttributeError, RecursionError):  # no JSON, or no object
        raise UserError(f"{file} is damaged", "train or copy the adapter again") from None
    if not isinstance(base, str) or not same_model(base, None, spec.name, None):
        raise UserError(
            f"the adapter {spec.adapter} was made for {base}, not for {spec.name}",
            f"give --model {base}" if base else f"name its base model in {file}",
        )


def _merge_adapter(spec: ModelSpec, model: PreTrainedModel) -> PreTrainedModel:
    """The model with the adapter's changes in its weights."""
    from peft import PeftModel

    assert spec.adapter is not None
    folder, device = str(expanded(spec.adapter)), str(model.device)
    try:
        with warnings.catch_warnings():  # about weights that an adapter lacks
            warnings.simplefilter("error", UserWarning)
            warnings.simplefilter("ignore", FutureWarning)  # transformers', about peft's calls
            tuned: Any = PeftModel.from_pretrained(model, folder, torch_device=device)
            return tuned.merge_and_unload().requires_grad_(False)
    except Exception as error:  # peft, safetensors and torch raise their own
        if exhaustion(error):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise UserError(
            f"the adapter {spec.adapter} can't be merged into {spec.name} ({reason[:160]})",
            "give a LoRA adapter that was made for this model",
        ) from error


def remember(spec: ModelSpec, weights_hash: str) -> None:
    """Note where a local model and its adapter are: a run records the hash of the weights, but no
    folders. The same weights may be in several folders, so each folder has its own note."""
    for given in (spec.name, spec.adapter):
        if given is None or given in embedded.MODELS or not expanded(given).exists():
            continue
        place = os.path.abspath(expanded(given))
        note = _places(weights_hash) / hashlib.blake2b(place.encode(), digest_size=8).hexdigest()
        with contextlib.suppress(OSError):  # a cache that can't be written to
            note.parent.mkdir(parents=True, exist_ok=True)
            replace_file(note, partial(Path.write_text, data=place))


def recall(settings: Mapping[str, Any], weights_hash: str) -> ModelSpec:
    """Find the model of a run on this machine. Of a local model, the run's settings have only the
    folder's name; :func:`remember` has noted the whole path under the hash of the weights. Where
    no folder of that name is left, it is another folder that was noted."""
    known = {f.name: settings[f.name] for f in fields(ModelSpec) if f.name in settings}
    known["name"] = settings["model"]
    notes = sorted(_places(weights_hash).glob("*"), key=lambda note: note.stat().st_mtime_ns)
    places = [note.read_text() for note in reversed(notes)]  # the last used folder first
    there = [one for one in places if Path(one).exists()]
    for field in ("name", "adapter"):
        recorded = known.get(field)
        if recorded is None or recorded in embedded.MODELS:
            continue
        # A hub's author/model isn't the local folder of that name.
        named = [one for one in there if one.endswith(f"/{recorded}")]
        if "/" not in recorded and known.get("revision") is None:  # of the same weights: renamed
            adapts = field == "adapter"
            named += [one for one in there if (Path(one) / ADAPTER).is_file() == adapts]
        known[field] = (named or [recorded])[0]
    return ModelSpec(**known)


def _places(weights_hash: str) -> Path:
    """The folder of notes that say where these weights are."""
    return embedded.models_dir() / weights_hash / "places"


def same_model(name: str, revision: str | None, other: str, other_revision: str | None) -> bool:
    """Whether two names that a user may give mean the same model, as far as names can tell.

    Local names are compared by their resolved paths. An embedded model also goes by its folder and
    by the hub's original that its weights were made from, a snapshot in the hub's local cache by
    its hub id.
    """
    return _identifier(name, revision) == _identifier(other, other_revision)


def _identifier(name: str, revision: str | None) -> tuple[str, str]:
    path = expanded(name).resolve()
    snapshot = re.search(r"/models--([^/]+)--([^/]+)/snapshots/([^/]+)", str(path))
    for model in embedded.MODELS.values():
        if name.lower() in (model.name, str(model.original).lower()) or path.name == model.folder:
            return model.name, "main"
    if snapshot:
        return f"{snapshot[1]}/{snapshot[2]}".lower(), revision or snapshot[3]
    if path.exists():
        return str(path), ""
    return name.lower(), revision or "main"


def weights_hash(model: PreTrainedModel) -> str:
    """SHA-256 over names, dtypes, shapes and bytes of what the model would save, 16 hex digits.

    It is of the weights as loaded: the same checkpoint in another dtype is another subject.
    """
    items = sorted(model.state_dict().items())
    # Offloaded or reordered weights are made whole one at a time, or they might not fit.
    elsewhere = any(tensor.is_meta or tensor.is_mkldnn for _, tensor in items)

    def digest(item: tuple[str, torch.Tensor]) -> bytes:
        name, tensor = item
        if elsewhere:
            path, _, own = name.rpartition(".")
            tensor = whole_weight(model.get_submodule(path), own)
        tensor = tensor.detach().contiguous().cpu()
        h = hashlib.sha256(f"{name}|{tensor.dtype}|{tuple(tensor.shape)}".encode())
        h.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
        return h.digest()

    with ThreadPoolExecutor(1 if elsewhere else None) as pool:  # hashlib releases the lock
        return hashlib.sha256(b"".join(pool.map(digest, items))).hexdigest()[:16]


def whole_weight(module: torch.nn.Module, name: str) -> torch.Tensor:
    """A module's whole weight, even if it is offloaded or reordered (``engine/weights.py``)."""
    weight = getattr(module, name)
    if weight.is_mkldnn:
        return weight.to_dense()
    if not weight.is_meta:
        return weight
    with align_module_device(module, torch.device("cpu")):
        return getattr(module, name).detach()


def _locate(spec: ModelSpec, fetch: bool = True) -> tuple[str, dict]:
    """The place for ``from_pretrained`` and its keyword arguments."""
    kwargs = {"trust_remote_code": spec.trust_remote_code}
    embedded.refuse_missing_model(spec.name)
    path = expanded(spec.name)
    if spec.revision is not None and (spec.name in embedded.MODELS or path.exists()):
        raise UserError(
            f"--revision {spec.revision}: {spec.name} is not a model of the hub",
            "leave --revision out",
        )
    if spec.name in embedded.MODELS:
        return str(embedded.directory(spec.name, fetch)), kwargs
    if path.suffix.lower() == ".gguf":
        return str(path.parent), kwargs | {"gguf_file": path.name}
    if path.is_dir():
        return str(path), kwargs
    # Without the hub, from_pretrained retries for most of a minute and prints a line each time;
    # with local_files_only it looks into the local cache at once.
    kwargs["local_files_only"] = not (fetch and _hub_answers(spec.name))
    return spec.name, kwargs | {"revision": spec.revision or "main"}


def _hub_answers(name: str) -> bool:
    from huggingface_hub import HfApi, constants

    expanded(constants.HF_HUB_CACHE)  # without a home folder it would be ./~
    if constants.HF_HUB_OFFLINE:
        return False
    try:
        HfApi().model_info(name, timeout=PROBE_SECONDS)
    except Exception as error:  # from_pretrained tells of an unknown or gated one
        return not type(error).__name__.startswith(("Connect", "ReadTimeout"))
    return True


@functools.cache  # once, however often a model is read
def _note(text: str) -> None:
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def _errors_in_one_line(spec: ModelSpec) -> Iterator[None]:
    """Turn what ``from_pretrained`` raises for a model that it can't find or read into one line,
    and show what it warns of, a line each."""
    progress = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    logger, warned = logging.getLogger("transformers"), logging.handlers.BufferingHandler(10_000)
    before, level = (logger.handlers, logger.propagate), logger.level
    logger.handlers, logger.propagate = [warned], False
    logger.setLevel(logging.WARNING)
    try:
        yield
    except Exception as error:  # transformers, safetensors, gguf and the hub raise their own
        if isinstance(error, UserError) or (exhaustion(error) and not is_out_of_memory(error)):
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        problem = f"model {spec.name!r} could not be loaded ({reason[:200]})"
        raise UserError(problem, _remedy(spec, error)) from error
    finally:
        logger.handlers, logger.propagate = before
        logger.setLevel(level)
        if progress:
            transformers_logging.enable_progress_bar()
    for one in warned.buffer:
        text = " ".join(one.getMessage().split())
        if REPORTED not in text:
            _note(f"transformers says of {spec.name}: {text[:200]}")


def _remedy(spec: ModelSpec, error: Exception) -> str:
    if is_out_of_memory(error):
        return "use --dtype bfloat16, a smaller model, or another --device"
    path = expanded(spec.name)
    for file in [path] if path.is_file() else path.glob("*"):
        if file.is_file() and file.stat().st_size < 1000 and file.read_bytes().startswith(LFS):
            return f"{file} is a git-lfs pointer: fetch the files, with git lfs pull in that folder"
    if (path / ADAPTER).is_file() and not (path / "config.json").is_file():
        return f"it is an adapter: give --adapter {path}, and its base model to --model"
    if "trust_remote_code" in str(error) and not spec.trust_remote_code:
        return "if you trust its code: --trust-remote-code (trust_remote_code=True)"
    attention = "leave out --attention, or " if spec.attention != "auto" else ""
    if spec.name in embedded.MODELS:
        folder = embedded.directory(spec.name)
        return f"{attention}remove {folder}, so that the next command makes it again"
    return (
        f"{attention}name {' or '.join(embedded.MODELS)} (embedded), a complete local "
        "directory, a GGUF file, or a hub id that this machine can reach (HF_TOKEN for gated ones)"
    )
