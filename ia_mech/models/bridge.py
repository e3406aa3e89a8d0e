"""Hand a run's activations to TransformerLens users, under its hook names.

Layer 0 is ``blocks.0.hook_resid_pre``, layer l >= 1 is ``blocks.{l-1}.hook_resid_post``.
"""

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ia_mech.run import Run

if TYPE_CHECKING:
    from transformer_lens import ActivationCache


def hook_name(layer: int) -> str:
    """The TransformerLens name of a layer in this project's convention."""
    return "blocks.0.hook_resid_pre" if layer == 0 else f"blocks.{layer - 1}.hook_resid_post"


def hook_tensors(run: Run, layers: list[int] | None = None) -> dict[str, Tensor]:
    """The run's residual stream as ``{hook name: [contexts, positions, d_model]}``, for these
    layers or all, read into memory.

    The position axis holds the run's kept positions (``run.positions``), not every token.
    """
    return {
        hook_name(layer): torch.stack([run.residuals(layer, p) for p in run.positions], dim=1)
        for layer in (run.layers if layers is None else layers)
    }


def activation_cache(run: Run, model, layers: list[int] | None = None) -> "ActivationCache":
    """The tensors of :func:`hook_tensors` as a TransformerLens ``ActivationCache`` (importing takes
    20 s); ``model`` is the ``TransformerBridge`` of the run's model."""
    from transformer_lens import ActivationCache

    return ActivationCache(hook_tensors(run, layers), model)
