"""From the residual stream to logits without the model: its final norm and unembedding.

Offline analyses (the logit lens, probes of the model's output distribution) need no other part of a
model. Both tensors are saved once per model, beside the embedded models in ``<weights hash>/``.
"""

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ia_mech.engine.blocks import find_final_norm
from ia_mech.engine.state import Prefix, prefill
from ia_mech.engine.workers import Team
from ia_mech.errors import UserError
from ia_mech.models.embedded import models_dir
from ia_mech.models.load import Subject, text_config, whole_weight
from ia_mech.run.integrity import HASH, replace_file

TENSORS = ("norm_weight", "norm_bias", "unembedding")
TOLERANCE = 1e-3  # largest error of the lens against the model, relative to the largest logit


class NoLens(UserError):
    """There is no lens for a model. Analyses that don't need one can go on."""


@dataclass(frozen=True)
class Lens:
    """The final norm, written out as a formula, and the unembedding.

    ``norm_weight`` ``[d_model]`` is the factor that is applied (1 + w for Gemma). ``centred`` is
    true for a LayerNorm, whose bias is ``norm_bias``, and false for an RMSNorm. ``unembedding`` is
    ``[vocab, d_model]``. Logits are multiplied by ``scale`` and then, if ``softcap`` is set,
    squashed to ``±softcap``.
    """

    norm_weight: Tensor
    norm_bias: Tensor
    unembedding: Tensor
    eps: float
    centred: bool
    scale: float
    softcap: float | None

    def norm(self, residual: Tensor) -> Tensor:
        """The final norm of a residual stream ``[…, d_model]``, in float32."""
        x = residual.float()
        if self.centred:
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps)
        return x * self.norm_weight.float() + self.norm_bias.float()

    def logits(self, residual: Tensor) -> Tensor:
        """The logits ``[…, vocab]`` float32 that the model would give if its last layer had this
        state."""
        logits = self.norm(residual) @ self.unembedding.float().T * self.scale
        return logits if self.softcap is None else self.softcap * (logits / self.softcap).tanh()

    def logits_in_slices(self, residual: Tensor, most: int = 2**23) -> Iterator[Tensor]:
        """The same logits, one slice of the vocabulary at a time: ``[rows, slice]`` each.

        Memory never holds all logits, nor a float32 copy of the whole unembedding.

        Args:
            residual: ``[rows, d_model]``.
            most: how many numbers a slice may have, both of logits and of the unembedding.
        """
        vocab, width = self.unembedding.shape
        step = max(1, most // max(len(residual), width, 1))
        for start in range(0, vocab, step):
            part = replace(self, unembedding=self.unembedding[start : start + step])
            yield part.logits(residual)

    def save(self, weights_hash: str) -> Path:
        """Write the lens where :meth:`load` finds it; an older file is replaced whole."""
        file = lens_file(weights_hash)
        file.parent.mkdir(parents=True, exist_ok=True)
        tensors = {name: getattr(self, name).contiguous().cpu() for name in TENSORS}
        settings = {k: getattr(self, k) for k in ("eps", "centred", "scale", "softcap")}
        metadata = {"lens": json.dumps(settings | {HASH: _hash(weights_hash, settings, tensors)})}
        replace_file(file, lambda scratch: save_file(tensors, scratch, metadata=metadata))
        return file

    @classmethod
    def load(cls, weights_hash: str) -> "Lens":
        """The lens of a model that was sampled here.

        Raises:
            NoLens: there is no lens for this hash.
            UserError: the file is damaged, or belongs to other weights.
        """
        file = lens_file(weights_hash)
        if not file.is_file():
            raise NoLens(
                f"no lens for the model with weights {weights_hash}",
                "sample from the model once on this machine, or copy its folder in models/ of the "
                "cache",
            )
        try:
            with safe_open(file, framework="pt") as content:
                settings = json.loads(content.metadata()["lens"])
                tensors = {name: content.get_tensor(name) for name in TENSORS}
            if settings.pop(HASH) != _hash(weights_hash, settings, tensors):
                raise ValueError("its content is not what was written")
            return cls(**tensors, **settings)
        except (SafetensorError, AttributeError, ValueError, TypeError, KeyError) as error:
            reason = (str(error).splitlines() or [type(error).__name__])[0][:120]
            raise UserError(
                f"{file} is damaged ({reason})", "remove it and sample from the model again"
            ) from None


def _hash(weights_hash: str, settings: dict[str, Any], tensors: dict[str, Tensor]) -> str:
    """A hash of everything that :meth:`Lens.load` reads, and of the weights' hash."""
    content = xxhash.xxh3_128(json.dumps([weights_hash, settings], sort_keys=True).encode())
    for name in TENSORS:
        content.update(f"{tensors[name].dtype} {list(tensors[name].shape)}".encode())
        content.update(tensors[name].reshape(-1).view(torch.uint8).numpy().data)
    return content.hexdigest()


def lens_file(weights_hash: str) -> Path:
    """Where the lens of a model is kept."""
    return models_dir() / weights_hash / "lens.safetensors"


def save_lens(team: Team, weights_hash: str, ids: list[int]) -> str | None:
    """Write a model's lens unless it is there already.

    Args:
        team: the workers that have the model.
        ids: token ids of real text; a few dozen are enough.

    Returns:
        Why no lens could be written, or None.
    """
    if _is_whole(weights_hash):
        return None
    found = team.call(read_lens, ids)
    if isinstance(found, str):
        return found
    found.save(weights_hash)
    return None


def read_lens(subject: Subject, ids: list[int], _: Any = None) -> Lens | str:
    """The lens of a model, or why there is none.

    The formula is read off the model's modules and then compared with the model itself on a short
    context. A lens that doesn't reproduce the model's logits isn't given.
    """
    lens = _lens_of(subject.model)
    if lens is None:
        return "its final norm is of an unknown kind"
    result = prefill(subject.model, [Prefix(ids, [len(ids) - 1])])
    assert result.residuals is not None
    error = (lens.logits(result.residuals[:, -1, 0].cpu()) - result.logits.cpu()).abs().max()
    largest = result.logits.abs().max().cpu()
    # In half precision the model's own rounding is the larger error by far.
    allowed = max(TOLERANCE, 8 * torch.finfo(subject.model.dtype).eps) * largest
    if not error <= allowed:
        return f"final norm and unembedding miss the model's logits by {error:.2g}"
    return lens


def _is_whole(weights_hash: str) -> bool:
    try:
        Lens.load(weights_hash)
    except UserError:
        return False
    return True


@torch.inference_mode()
def _lens_of(model: Any) -> Lens | None:
    norm, head = find_final_norm(model), model.get_output_embeddings()
    eps = next(
        (
            float(getattr(norm, n))
            for n in ("variance_epsilon", "eps", "epsilon")
            if hasattr(norm, n)
        ),
        None,
    )
    if norm is None or eps is None or getattr(head, "bias", None) is not None:
        return None
    config = text_config(model.config)
    unembedding = whole_weight(head, "weight").detach().cpu()
    # The norm of a known vector shows the norm's weight, whether it is stored as w or as 1 + w.
    signs = torch.ones(1, unembedding.shape[1])
    signs[:, 1::2] = -1  # zero mean (for even widths) and unit mean square
    norm = copy.deepcopy(norm).float()  # half precision would round the weight
    up, down, higher = (norm(x.to(model.device)).cpu() for x in (signs, -signs, signs + 3))
    # A LayerNorm, whatever its class is called, removes a constant that is added to its input.
    centred = torch.allclose(higher, up, atol=1e-4)
    bias = (up + down)[0] / 2
    weight = ((up - down)[0] / 2) * signs[0] * (1 + eps) ** 0.5
    scale = (
        1 / getattr(config, "logits_scaling", 1.0) * (getattr(config, "logit_scale", None) or 1.0)
    )
    softcap = getattr(config, "final_logit_softcapping", None)
    return Lens(weight, bias, unembedding, eps, centred, scale, softcap)
