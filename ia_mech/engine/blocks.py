"""The decoder's blocks, and how layers are counted.

Layer convention, stated once for the whole project: layer 0 is what enters the first block (the
embeddings), layer l is the output of block l for l = 1 … L; all **before** the final norm. For
l >= 1 this is TransformerLens' ``blocks.{l-1}.hook_resid_post``.
"""

from typing import Any

from torch import nn

from ia_mech.errors import UserError
from ia_mech.models.load import text_config


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """A model's stack of blocks; a multimodal model's are those of its text part.

    Raises:
        UserError: the architecture has no list of its blocks, or more than one that may be it.
    """
    return _find_stack(model)[1]


def find_final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the last block and the unembedding; None if it can't be identified."""
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
    """The module that holds the blocks, and the blocks. They are the decoder's one list of modules
    that is as long as the model has layers; lists inside that list (as many experts, say) don't
    count."""
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
