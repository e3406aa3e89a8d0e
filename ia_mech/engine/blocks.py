"""The decoder's blocks, and how layers are counted.

Layer convention, stated once for the whole project: layer 0 is what enters the first block (the
embeddings), layer l is the output of block l for l = 1 … L; all **before** the final norm. For
l >= 1 this is TransformerLens' ``blocks.{l-1}.hook_resid_post``.
"""

from torch import nn

from ia_mech.errors import UserError
from ia_mech.models.load import text_config


def find_blocks(model: nn.Module) -> nn.ModuleList:
    """The decoder's stack of blocks: the one list of modules as long as the model has layers.

    Raises:
        UserError: the architecture has no such list, or more than one.
    """
    decoder = _decoder(model)
    depth = text_config(model.config).num_hidden_layers
    stacks = [
        module
        for name, module in decoder.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == depth and "." not in name
    ]
    if len(stacks) != 1:
        raise UserError(
            f"the blocks of {type(model).__name__} could not be found ({len(stacks)} candidate "
            f"lists of {depth} modules)",
            "use a decoder-only architecture whose text model holds its blocks in one list",
        )
    return stacks[0]


def find_final_norm(model: nn.Module) -> nn.Module | None:
    """The norm between the last block and the unembedding; None if it can't be told."""
    norms = [
        module
        for name, module in _decoder(model).named_children()
        if "norm" in type(module).__name__.lower() and "emb" not in name
    ]
    return norms[0] if len(norms) == 1 else None


def _decoder(model: nn.Module) -> nn.Module:
    find = getattr(model, "get_decoder", None)
    decoder = find() if callable(find) else None
    decoder = getattr(model, "base_model", model) if decoder is None else decoder
    assert isinstance(decoder, nn.Module)
    return decoder
