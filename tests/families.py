"""Small tokenizers that behave like those of real model families.

Each is trained in a moment on the text below and carries its family's special tokens, settings and
a chat template written from the family's documented format. None has learned anything: they are
for code that reads templates and token ids, where the shapes of the real families matter and their
vocabularies do not. Special tokens sit at the start or end of the vocabulary as they do in the
real tokenizer, and are plain added tokens where it has them so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerFast

# Families that follow the documented format of a released model.
REAL_FAMILIES = (
    "smollm2", "qwen3", "llama3_1", "gemma3", "glm4", "gpt_oss", "deepseek_v3", "mistral",
    "exaone", "nemotron_mini", "apriel", "kimi_k2", "gigachat3",
)  # fmt: skip
# Others have text as role markers, no user role, or a last user turn that silently disappears.
FAMILIES = (*REAL_FAMILIES, "zephyr_text", "no_user", "swallows")

# The stop tokens that a family's generation configuration lists besides what its tokenizer names,
# which can be only one.
FURTHER_EOS = {
    **dict.fromkeys(("qwen3", "qwen3_5"), ("<|endoftext|>",)),
    **dict.fromkeys(("glm4", "glm4_7"), ("<|user|>", "<|observation|>")),
    "llama3_1": ("<|end_of_text|>", "<|eom_id|>"),
    "gemma3": ("<end_of_turn>",),
    "gemma4": ("<turn|>",),
    "gpt_oss": ("<|endoftext|>", "<|call|>"),
    "apriel": ("<|end|>",),
    "kimi_k2": ("<|im_end|>",),
}

TEMPLATES = Path(__file__).parent / "fixtures" / "templates"

VOCABULARY = 800
"""Learned pieces and bytes; the special tokens of most families come on top."""

TEXT = """\
The user asks a question and the assistant answers it. The system message comes first, the user
turn second, the assistant turn third; then the user writes again. A model reads the whole dialogue
as tokens: system, user, assistant, user, assistant, user.

Can you tell me how the lighthouse works? Yes, of course. A lamp burns at the top of the tower, and
a lens gathers the light into a beam. The lens turns once in 12 seconds, so that ships at sea count
the flashes and know which tower they see.

Thanks, that helps! I'm still not sure about the lens, though. Why doesn't it melt? Because the
light that passes through glass does not stay in the glass. It's only the part that is absorbed
which warms it, and that part is small.

Could you write it as a list?

1. Light the lamp at dusk.
2. Wind the clock that turns the lens.
3. Write the weather in the book: wind, cloud, rain, 1013 hPa, 8 degrees.
4. Put the lamp out at dawn.

What is 17 times 24? 17 times 24 is 408. And half of that? Half of 408 is 204. Are you sure? Yes:
204 + 204 = 408, and 408 / 24 = 17.

Please fix this function for me:

def mean(values):
    total = 0.0
    for value in values:
        total += value
    return total / len(values)

It divides by zero when the list is empty, so check for that first:

    if not values:
        return None

Okay, I've changed it, and now the tests pass. Thank you so much! You're welcome. Is there anything
else that you want to know? No, that was all. Actually, one more thing: could you explain what you
just said, but shorter, and in simple words? Sure. An empty list has no mean, so we say so and stop.

Cutting Knowledge Date: December 2023
Today Date: 26 Jul 2024

You are a helpful assistant. Knowledge cutoff: 2024-06. Current date: 2025-06-28. Reasoning: medium.
Valid channels: analysis, commentary, final. Channel must be included for every message.
# Instructions: always answer in the language of the question.

Wie weit ist es bis zum Hafen? Ungefähr drei Kilometer, immer am Wasser entlang. Où est le café ?
Là-bas, près de l'église. ¿Cuánto cuesta? Son veinte pesos. 灯塔在哪里？灯塔在海边。 Привет! 🙂

The keeper was forty years old when the old lamp was taken down. She kept a book of everything that
passed: fishing boats in the morning, a steamer on Tuesday, two whales, a balloon with a torn side,
the doctor's yacht. "Nobody reads it," said her brother. "Somebody will," she answered, and she
wrote that down as well. In winter the waves broke over the rocks and salt dried on the windows, so
that the beam looked grey from land. In summer children came to climb the 198 steps and to ask why
the light was not burning in the daytime; she let them hold the brass handle, and told them that a
light is for those who cannot see the land, not for those who are already standing on it.

Write me a poem. Give me another example. That doesn't look right, can you try again? What do you
mean by that? Make it longer. Make it funny. I think there is a mistake in the second step. Great,
now do the same for the other file. How would that change if the price were 15% higher? Who wrote
this book? Where can I find more about it? hello hi hey ok yes no thanks
"""

ROLES = "user assistant model system developer final analysis commentary\n\n" * 20
"""So that role names are one token each, with and without a space, as in the real vocabularies."""

# The splitting rules of the GPT-4 and GPT-4o tokenizers, which the families below share.
_CL100K = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CLITIC = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_O200K = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CLITIC}"
    rf"|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CLITIC}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!-/:-@\[-`{-~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_WORDS = "words"

Kind = Literal["bytes", "gemma", "metaspace"]


@dataclass(frozen=True)
class _Recipe:
    """What makes a family's tokenizer: splitting rules, special tokens and where they stand."""

    kind: Kind = "bytes"
    splits: tuple[str, ...] = (_WORDS,)
    first: tuple[str, ...] = ()
    last: tuple[str, ...] = ()
    ordinary: tuple[str, ...] = ()
    """Added tokens at the end that the real tokenizer does not mark as special."""
    prefix: tuple[str, ...] = ()
    """Special tokens that encoding puts in front of a text on its own."""
    bos: str | None = None
    eos: str | None = None
    pad: str | None = None
    unk: str | None = None
    nfc: bool = False


def _marks(text: str) -> tuple[str, ...]:
    return tuple(text.split(" "))


_CHATML = _Recipe(
    first=_marks("<|endoftext|> <|im_start|> <|im_end|>"),
    bos="<|im_start|>",
    eos="<|im_end|>",
    pad="<|im_end|>",
    unk="<|endoftext|>",
)

_GLM_MARKS = (
    "<|endoftext|> [MASK] [gMASK] [sMASK] <sop> <eop> <|system|> <|user|> <|assistant|> "
    "<|observation|>"
)
_KIMI_MARKS = (
    "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|> [PAD]"
)
_THINK = ("<think>", "</think>")

_RECIPES: dict[str, _Recipe] = {
    "smollm2": _CHATML,
    "qwen3": _Recipe(
        splits=(_CL100K.format(digits=""),),
        last=_marks("<|endoftext|> <|im_start|> <|im_end|>"),
        ordinary=_marks("<tool_call> </tool_call> <think> </think>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
        nfc=True,
    ),
    "llama3_1": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks(
            "<|begin_of_text|> <|end_of_text|> <|finetune_right_pad_id|> <|start_header_id|> "
            "<|end_header_id|> <|eom_id|> <|eot_id|> <|python_tag|>"
        ),
        prefix=("<|begin_of_text|>",),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
    ),
    "gemma3": _Recipe(
        kind="gemma",
        first=_marks("<pad> <eos> <bos> <unk> <start_of_turn> <end_of_turn>"),
        ordinary=tuple("\n" * n for n in range(1, 9)),
        prefix=("<bos>",),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        unk="<unk>",
    ),
    "glm4": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks(_GLM_MARKS),
        prefix=_marks("[gMASK] <sop>"),
        eos="<|endoftext|>",
        pad="<|endoftext|>",
    ),
    "gpt_oss": _Recipe(
        splits=(_O200K,),
        last=_marks(
            "<|startoftext|> <|endoftext|> <|return|> <|constrain|> <|channel|> <|start|> "
            "<|end|> <|message|> <|call|> <|endofprompt|>"
        ),
        bos="<|startoftext|>",
        eos="<|return|>",
        pad="<|endoftext|>",
    ),
    "deepseek_v3": _Recipe(
        splits=_DEEPSEEK,
        first=_marks("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"),
        ordinary=_marks("<｜User｜> <｜Assistant｜>"),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
    ),
    "mistral": _Recipe(
        kind="metaspace",
        first=_marks(
            "<unk> <s> </s> [INST] [/INST] [TOOL_CALLS] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] "
            "[TOOL_RESULTS] [/TOOL_RESULTS]"
        ),
        prefix=("<s>",),
        bos="<s>",
        eos="</s>",
        unk="<unk>",
    ),
    "exaone": _Recipe(
        first=_marks("[PAD] [BOS] [EOS] [UNK] [|system|] [|user|] [|assistant|] [|endofturn|]"),
        bos="[BOS]",
        eos="[|endofturn|]",
        pad="[PAD]",
        unk="[UNK]",
    ),
    "nemotron_mini": _Recipe(
        first=_marks("<unk> <s> </s> <extra_id_0> <extra_id_1>"), bos="<s>", eos="</s>", unk="<unk>"
    ),
    "apriel": _Recipe(
        first=_marks("<unk> <s> </s> <pad> <|system|> <|user|> <|assistant|> <|end|>"),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
        unk="<unk>",
    ),
    "kimi_k2": _Recipe(
        splits=(_O200K,),
        last=_marks(
            "[BOS] [EOS] <|im_end|> <|im_user|> <|im_assistant|> <|im_system|> <|im_middle|>"
        ),
        bos="[BOS]",
        eos="[EOS]",
    ),
    "gigachat3": _Recipe(
        first=_marks("<unk> <s> </s> <|role_sep|> <|message_sep|>"),
        bos="<s>",
        eos="</s>",
        unk="<unk>",
    ),
    "zephyr_text": _Recipe(
        kind="metaspace",
        first=_marks("<unk> <s> </s>"),
        prefix=("<s>",),
        bos="<s>",
        eos="</s>",
        pad="</s>",
        unk="<unk>",
    ),
    "qwen3_5": _Recipe(
        splits=(_CL100K.format(digits=""),),
        last=_marks("<|endoftext|> <|im_start|> <|im_end|>"),
        ordinary=_THINK,
        eos="<|im_end|>",
        pad="<|endoftext|>",
        nfc=True,
    ),
    "glm4_7": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks(_GLM_MARKS),
        ordinary=_THINK,
        eos="<|endoftext|>",
        pad="<|endoftext|>",
    ),
    "gemma4": _Recipe(
        kind="gemma",
        first=_marks("<pad> <eos> <bos> <unk> <|turn> <turn|> <|channel> <channel|> <|think|>"),
        ordinary=tuple("\n" * n for n in range(1, 9)),
        prefix=("<bos>",),
        bos="<bos>",
        eos="<eos>",
        pad="<pad>",
        unk="<unk>",
    ),
    "kimi_k2_thinking": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks(_KIMI_MARKS),
        ordinary=_THINK,
        bos="[BOS]",
        eos="<|im_end|>",
        pad="[PAD]",
    ),
    "kimi_vl": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks(_KIMI_MARKS),
        bos="[BOS]",
        eos="<|im_end|>",
        pad="[PAD]",
    ),
    "smollm3": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        last=_marks("<|begin_of_text|> <|end_of_text|> <|im_start|> <|im_end|>"),
        ordinary=_THINK,
        bos="<|begin_of_text|>",
        eos="<|im_end|>",
        pad="<|im_end|>",
    ),
    "deepseek_r1": _Recipe(
        splits=_DEEPSEEK,
        first=_marks("<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜▁pad▁｜>"),
        ordinary=("<｜User｜>", "<｜Assistant｜>", *_THINK),
        bos="<｜begin▁of▁sentence｜>",
        eos="<｜end▁of▁sentence｜>",
        pad="<｜end▁of▁sentence｜>",
    ),
    "magistral": _Recipe(
        splits=(_O200K,),
        first=_marks(
            "<unk> <s> </s> [INST] [/INST] [SYSTEM_PROMPT] [/SYSTEM_PROMPT] [THINK] [/THINK]"
        ),
        prefix=("<s>",),
        bos="<s>",
        eos="</s>",
        unk="<unk>",
    ),
    "seed_oss": _Recipe(
        splits=(_CL100K.format(digits="{1,3}"),),
        first=_marks("<seed:bos> <seed:pad> <seed:eos> <seed:think> </seed:think>"),
        bos="<seed:bos>",
        eos="<seed:eos>",
        pad="<seed:pad>",
    ),
    "no_user": _CHATML,
    "swallows": _CHATML,
}


def template(family: str) -> str:
    """The text of a family's chat template."""
    return (TEMPLATES / f"{family}.jinja").read_text(encoding="utf-8")


@cache
def build(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of one of ``FAMILIES``. It is shared between callers: copy it to change it."""
    return _wrap(_RECIPES[family], template(family))


def eos_ids(family: str) -> list[int]:
    """The ids of all stop tokens that a family's generation configuration lists."""
    tokenizer = build(family)
    return [tokenizer.eos_token_id, *map(tokenizer.vocab.get, FURTHER_EOS.get(family, ()))]


@cache
def plain() -> PreTrainedTokenizerFast:
    """A tokenizer without a chat template, as base models have. Shared between callers."""
    end = "<|endoftext|>"
    return _wrap(_Recipe(first=(end,), bos=end, eos=end, unk=end), None)


def _wrap(recipe: _Recipe, chat_template: str | None) -> PreTrainedTokenizerFast:
    """Train the recipe's tokenizer and give it the interface of a released one."""
    tokenizer = _train_bytes(recipe) if recipe.kind == "bytes" else _train_pieces(recipe)
    tokenizer.add_special_tokens(_added(recipe.first + recipe.last, special=True))
    tokenizer.add_tokens(_added(recipe.ordinary, special=False))
    _finish(tokenizer, recipe)
    named = {recipe.bos, recipe.eos, recipe.pad, recipe.unk}
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=recipe.bos,
        eos_token=recipe.eos,
        pad_token=recipe.pad,
        unk_token=recipe.unk,
        extra_special_tokens=[t for t in recipe.first + recipe.last if t not in named],
        chat_template=chat_template,
        model_input_names=["input_ids", "attention_mask"],
        clean_up_tokenization_spaces=False,
    )


def _added(tokens: Sequence[str], special: bool) -> list[AddedToken]:
    """Added tokens that match exactly, untouched by normalisation."""
    return [AddedToken(token, normalized=False, special=special) for token in tokens]


def _lines() -> list[str]:
    """The training text, line by line, blank lines joined to the one before."""
    text = re.findall(r"[^\n]*\n+", TEXT + ROLES)
    return text + [word + "\n" for word in ROLES.split()]


def _train_bytes(recipe: _Recipe) -> Tokenizer:
    """A byte-level BPE with the recipe's splitting rules."""
    tokenizer = Tokenizer(models.BPE())
    if recipe.nfc:
        tokenizer.normalizer = normalizers.NFC()
    words = recipe.splits == (_WORDS,)
    steps: list[pre_tokenizers.PreTokenizer] = (
        [pre_tokenizers.Digits(individual_digits=True)]
        if words
        else [pre_tokenizers.Split(Regex(rule), "isolated") for rule in recipe.splits]
    )
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY + len(recipe.first),
        special_tokens=list(recipe.first),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_lines(), trainer)
    return tokenizer


def _train_pieces(recipe: _Recipe) -> Tokenizer:
    """A SentencePiece-like BPE: spaces as ``▁``, bytes for whatever the alphabet lacks."""
    learner = Tokenizer(models.BPE())
    learner.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY - 256, show_progress=False)
    learner.train_from_iterator([x.strip("\n") for x in _lines() if x.isascii()], trainer)
    model = json.loads(learner.to_str())["model"]
    learned = sorted(model["vocab"], key=model["vocab"].__getitem__)
    pieces = [*recipe.first, *(f"<0x{byte:02X}>" for byte in range(256)), *learned]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={piece: number for number, piece in enumerate(pieces)},
            merges=[tuple(pair) for pair in model["merges"]],
            unk_token=recipe.unk,
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    if recipe.kind == "gemma":
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        restore: decoders.Decoder = decoders.Replace("▁", " ")
    else:
        scheme = {"replacement": "▁", "prepend_scheme": "first", "split": False}
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(**scheme)
        restore = decoders.Metaspace(**scheme)
    tokenizer.decoder = decoders.Sequence([restore, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _finish(tokenizer: Tokenizer, recipe: _Recipe) -> None:
    """Put the recipe's prefix in front of encoded text, as the real tokenizer does."""
    steps: list[processors.PostProcessor] = []
    if recipe.kind == "bytes":
        steps.append(processors.ByteLevel(trim_offsets=False))
    if recipe.prefix:
        start = " ".join(f"{token}:0" for token in recipe.prefix)
        steps.append(
            processors.TemplateProcessing(
                single=f"{start} $A:0",
                pair=f"{start} $A:0 $B:1",
                special_tokens=[(t, tokenizer.token_to_id(t)) for t in recipe.prefix],
            )
        )
    tokenizer.post_processor = processors.Sequence(steps)
