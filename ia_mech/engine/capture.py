"""Read the residual stream at chosen positions while the model runs.

Layer convention, stated once for the whole project: layer 0 is what enters the first block (the
embeddings), layer l is the output of block l for l = 1 … L; all **before** the final norm. For
l >= 1 this is TransformerLens' ``blocks.{l-1}.hook_resid_post``.
"""

from typing import Any

import torch
from torch import Tensor, nn

from ia_mech.errors import UserError
from ia_mech.models.load import text_config


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The stack of blocks of a model, of its text part if it has others.

    Raises:
        UserError: the architecture has no such list, or more than one.
    """
    return _find_stack(model)[1]


def find_final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the last block and the unembedding; None if it can't be told."""
    width = text_config(model.config).hidden_size
    norms = [
        module
        for name, module in _find_stack(model)[0].named_children()
        if "norm" in type(module).__name__.lower()
        and "emb" not in name
        and all(len(weight) == width for weight in module.parameters())
    ]
    return norms[0] if len(norms) == 1 else None


def _find_stack(model: Any) -> tuple[nn.Module, nn.ModuleList]:
    """The module that holds the blocks, and the blocks: the one list of modules in the decoder that
    is as long as the model has layers, but for those inside of it (as many experts, say)."""
    decoder, depth = model.get_decoder(), text_config(model.config).num_hidden_layers
    stacks = {
        name: module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth
    }
    outer = [name for name in stacks if not any(name.startswith(f"{other}.") for other in stacks)]
    if len(outer) != 1:
        raise UserError(
            f"the blocks of {type(model).__name__} could not be found ({len(outer)} candidate "
            f"lists of {depth} modules)",
            "use a decoder-only architecture whose text model holds its blocks in one list",
        )
    return decoder.get_submodule(outer[0].rpartition(".")[0]), stacks[outer[0]]


class ResidualCapture:
    """Keep the residual stream at given positions during one forward pass.

    Usage::

        with ResidualCapture(blocks, positions) as capture:
            model(...)
        capture.residuals()  # [batch, layers + 1, positions, d_model]

    The hooks keep only these positions, so memory doesn't grow with the sequence, and they are
    removed on exit, also when the forward pass raises.

    Args:
        blocks: the decoder's blocks, from :func:`find_blocks`.
        positions: ``[batch, positions]`` int64 indices into the padded sequence; -1 where a context
            lacks the position, which gives NaN.
    """

    def __init__(self, blocks: nn.ModuleList, positions: Tensor) -> None:
        self.blocks = blocks
        self.positions = positions
        self._indices: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}
        self.kept: list[Tensor] = []
        self._handles: list = []

    def __enter__(self) -> "ResidualCapture":
        self.kept = []
        self._handles = [
            self.blocks[0].register_forward_pre_hook(self._enter_first, with_kwargs=True),
            *(block.register_forward_hook(self._leave) for block in self.blocks),
        ]
        return self

    def __exit__(self, *_) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def _enter_first(self, _module, args, kwargs) -> None:
        self._keep(args[0] if args else kwargs["hidden_states"])

    def _leave(self, _module, _args, output) -> None:
        self._keep(output[0] if isinstance(output, tuple) else output)

    def _keep(self, hidden: Tensor) -> None:
        if hidden.ndim != 3:
            raise ValueError(f"a block gave a tensor of {hidden.ndim} dimensions, expected 3")
        # Copied once per device: for each block, it would wait for the copy.
        if hidden.device not in self._indices:
            at = self.positions.to(hidden.device)
            rows = torch.arange(len(at), device=hidden.device)[:, None]
            self._indices[hidden.device] = rows, at.clamp(min=0), (at < 0)[..., None]
        rows, at, lacking = self._indices[hidden.device]
        kept = hidden[rows, at]  # [batch, positions, d_model], a copy
        self.kept.append(kept.masked_fill_(lacking, torch.nan))

    def residuals(self) -> Tensor:
        """``[batch, layers + 1, positions, d_model]`` in the model's dtype.

        Raises:
            RuntimeError: a block ran more or less than once, so layers can't be told apart.
        """
        expected = len(self.blocks) + 1
        if len(self.kept) != expected:
            raise RuntimeError(f"{len(self.kept)} states captured, expected {expected}")
        return torch.stack([kept.to(self.kept[0].device) for kept in self.kept], dim=1)
