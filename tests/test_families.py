"""The fixture families render what their documented formats say."""

from datetime import datetime

import families
import pytest
from transformers.utils import chat_template_utils

USER, ASSISTANT, AGAIN = (
    {"role": "user", "content": "q"},
    {"role": "assistant", "content": "r"},
    {"role": "user", "content": "s"},
)
SYSTEM = {"role": "system", "content": "y"}

EXPECTED = {
    "smollm2": (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
        "<|im_start|>user\ns<|im_end|>\n"
    ),
    "qwen3": (
        "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\nr<|im_end|>\n"
        "<|im_start|>user\ns<|im_end|>\n"
    ),
    "llama3_1": (
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n"
        "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\nr<|eot_id|>"
        "<|start_header_id|>user<|end_header_id|>\n\ns<|eot_id|>"
    ),
    "gemma3": (
        "<bos><start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\nr<end_of_turn>\n"
        "<start_of_turn>user\ns<end_of_turn>\n"
    ),
    "glm4": "[gMASK]<sop><|user|>\nq<|assistant|>\nr<|user|>\ns",
    "gpt_oss": (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\n"
        "Knowledge cutoff: 2024-06\nCurrent date: 2024-07-26\n\nReasoning: medium\n\n"
        "# Valid channels: analysis, commentary, final. "
        "Channel must be included for every message.<|end|>"
        "<|start|>user<|message|>q<|end|>"
        "<|start|>assistant<|channel|>final<|message|>r<|end|>"
        "<|start|>user<|message|>s<|end|>"
    ),
    "deepseek_v3": (
        "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>r<｜end▁of▁sentence｜><｜User｜>s"
    ),
    "mistral": "<s>[INST] q[/INST] r</s>[INST] s[/INST]",
    "zephyr_text": "<|user|>\nq</s>\n<|assistant|>\nr</s>\n<|user|>\ns</s>\n",
}


@pytest.fixture(autouse=True)
def fixed_date(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two templates print today's date; transformers lets no caller pass a clock of their own."""

    class Clock:
        @staticmethod
        def now() -> datetime:
            return datetime(2024, 7, 26)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)


def render(family: str, *messages: dict[str, str], **options: object) -> str:
    """The text of a dialogue in the family's format."""
    return families.build(family).apply_chat_template(list(messages), tokenize=False, **options)


@pytest.mark.parametrize("family", EXPECTED)
def test_a_dialogue_renders_as_documented(family: str) -> None:
    assert render(family, USER, ASSISTANT, AGAIN) == EXPECTED[family]


@pytest.mark.parametrize("family", EXPECTED)
def test_the_rendered_text_survives_its_tokens(family: str) -> None:
    tokenizer = families.build(family)
    ids = tokenizer(EXPECTED[family], add_special_tokens=False)["input_ids"]
    assert tokenizer.decode(ids) == EXPECTED[family]
    assert tokenizer.unk_token_id not in ids
    assert max(tokenizer.get_vocab().values()) == len(tokenizer) - 1 < 1000


@pytest.mark.parametrize(
    ("family", "text"),
    [
        ("smollm2", "<|im_start|>system\ny<|im_end|>\n<|im_start|>user\nq<|im_end|>\n"),
        ("gemma3", "<bos><start_of_turn>user\ny\n\nq<end_of_turn>\n"),
        ("glm4", "[gMASK]<sop><|system|>\ny<|user|>\nq"),
        ("deepseek_v3", "<｜begin▁of▁sentence｜>y<｜User｜>q"),
        ("mistral", "<s>[INST] y\n\nq[/INST]"),
    ],
)
def test_system_text_goes_where_the_family_puts_it(family: str, text: str) -> None:
    assert render(family, SYSTEM, USER) == text
