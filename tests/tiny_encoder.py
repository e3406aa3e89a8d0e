"""A random encoder in a folder, which stands in for the built-in judge's: nothing is downloaded.

It is as wide as the real one, whose classifier it is read by. Its vocabulary are letters, digits,
some punctuation, and a few words.
"""

import string
import tempfile
from functools import cache
from pathlib import Path

WORDS = "the a is why how what you your does my loaf dent flat rise oven more time hours . ? , ! :"


def make_encoder(folder: Path) -> Path:
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel

    signs = string.ascii_lowercase + string.digits
    names = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *WORDS.split(), *signs, *(f"##{c}" for c in signs)]
    pieces = {name: i for i, name in enumerate(dict.fromkeys(names))}
    tokenizer = Tokenizer(models.WordPiece(pieces, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(
        ("[SEP]", pieces["[SEP]"]), ("[CLS]", pieces["[CLS]"])
    )
    tokenizer.enable_padding(length=128)  # as the real one's file has it
    tokenizer.enable_truncation(128)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = BertConfig(
        vocab_size=len(pieces), hidden_size=384, num_hidden_layers=1, intermediate_size=8
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)  # with the pooler that the real one has
    return folder


@cache
def encoder_directory() -> Path:
    """The folder of this process's encoder."""
    return make_encoder(Path(tempfile.mkdtemp(prefix="encoder-")))
