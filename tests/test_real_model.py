"""The embedded model on real text: the checks of tiny models, with margins of a trained model."""

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from ia_mech.chat.format import ChatFormat
from ia_mech.data.conversations import open_conversations
from ia_mech.engine.blocks import find_final_norm
from ia_mech.engine.decode import Row, decode
from ia_mech.engine.installed import install
from ia_mech.engine.score import Turn, score
from ia_mech.engine.state import Prefix, prefill
from ia_mech.models.embedded import NAME
from ia_mech.models.load import ModelSpec, load

NEW_TOKENS = 4
GEMMA = "gemma-3-270m"
QWEN = "qwen2.5-coder-1.5b-instruct"


@pytest.fixture(scope="module", params=[NAME, pytest.param(GEMMA, marks=pytest.mark.slow)])
def subject(request):
    subject = load(ModelSpec(request.param, device="cpu"))  # fetched at most once per user
    install(subject.model)
    return subject


@pytest.fixture(scope="module")
def contexts(subject):
    """The two shortest of the built-in ones."""
    chat = ChatFormat(subject.tokenizer)
    every = [chat.context(c.messages) for c in open_conversations("builtin", limit=24)]
    return sorted(every, key=lambda context: len(context.ids))[:2]


@pytest.fixture(scope="module")
def prefilled(subject, contexts):
    prefixes = [Prefix(c.ids, [c.positions["header_last"]]) for c in contexts]
    return prefill(subject.model, prefixes)


def test_greedy_user_turns_equal_generate(subject, contexts, prefilled):
    chat = ChatFormat(subject.tokenizer)
    rows = [Row(i, 0.0, (0, 0)) for i in range(len(contexts))]
    decoded = decode(subject.model, [prefilled], rows, chat.stop_ids, NEW_TOKENS)
    settings = GenerationConfig(
        do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=chat.stop_ids, pad_token_id=0
    )
    for context, row in zip(contexts, decoded, strict=True):
        ids = torch.tensor([context.ids])
        written = subject.model.generate(
            ids, attention_mask=torch.ones_like(ids), generation_config=settings
        )[0, len(context.ids) :].tolist()
        if row.token_ids.tolist() != written:  # only where rounding may decide
            length = min(len(written), len(row.token_ids))
            first = int(np.argmax(row.token_ids[:length] != np.array(written[:length])))
            assert row.margins[first] < 1e-4


def test_residuals_equal_hidden_states(subject, contexts, prefilled):
    for index, context in enumerate(contexts):
        output = subject.model(torch.tensor([context.ids]), output_hidden_states=True)
        states = torch.stack(output.hidden_states)[:, 0, -1]  # [layers + 1, d_model]
        kept = prefilled.residuals[index, :, 0]
        error = (kept[:-1] - states[:-1]).norm(dim=-1) / states[:-1].norm(dim=-1)
        assert error.max() <= 1e-5  # batched and padded against alone
        last = find_final_norm(subject.model)(kept[-1])
        assert (last - states[-1]).norm() / states[-1].norm() <= 1e-5


def test_scores_equal_a_full_pass(subject, contexts, prefilled):
    ids = subject.tokenizer("How long does that take?", add_special_tokens=False)["input_ids"]
    (scored,) = score(subject.model, [prefilled], [Turn(0, ids)])
    full = subject.model(torch.tensor([[*contexts[0].ids, *ids]])).logits[0].log_softmax(-1)
    expected = full[-len(ids) - 1 : -1].gather(1, torch.tensor(ids)[:, None])[:, 0]
    torch.testing.assert_close(torch.as_tensor(scored.logprobs_raw), expected, atol=1e-4, rtol=1e-4)


# -- the models that they claim to be --------------------------------------------------------------


def greedy(subject, question: str, most: int) -> str:
    ids = subject.tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    written = subject.model.generate(**ids, max_new_tokens=most, do_sample=False)
    return subject.tokenizer.decode(written[0, ids["input_ids"].shape[1] :])


def test_the_default_model_answers_and_is_cut_into_tokens_like_the_original():
    subject = load(ModelSpec(device="cpu"))
    tokenizer, model, about = subject.tokenizer, subject.model, subject.describe()
    assert (about["layers"], about["d_model"], about["vocab"]) == (30, 576, 49152)
    assert about["architecture"] == "LlamaForCausalLM" and about["dtype"] == "float32"
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    # Digits are split off first, so that the line breaks before one stay together.
    assert tokenizer.tokenize("\n\n1") == ["ĊĊ", "1"]
    assert tokenizer.tokenize("\n\nA") == ["Ċ", "Ċ", "A"]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.decode(tokenizer("a\n\n1 b")["input_ids"]) == "a\n\n1 b"
    assert "Paris" in greedy(subject, "What is the capital of France?", 12)


@pytest.mark.slow
def test_a_pretrained_gemma_reads_english_as_it_was_trained_to():
    """Modern English that it hasn't seen, longer than its window. Norms that are off by 1, the
    usual fault of a conversion, give a perplexity of 10^7."""
    real = load(ModelSpec(GEMMA, device="cpu"))
    about = real.describe()
    assert (about["layers"], about["d_model"], about["vocab"]) == (18, 640, 262144)
    kinds = real.model.config.layer_types
    assert kinds.count("sliding_attention") == 15 and real.model.config.sliding_window == 512
    assert real.tokenizer("Hello, world! 20\n\n", add_special_tokens=False)["input_ids"] == [
        *(9259, 236764, 1902, 236888, 236743, 236778, 236771, 108)
    ]
    text = "\n\n".join(c.response for c in open_conversations("builtin", limit=8))
    ids = torch.tensor([real.tokenizer(text)["input_ids"]])
    assert ids[0, 0] == real.tokenizer.bos_token_id
    told = real.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])
    assert 24 < (-told.mean()).exp() < 27  # 26.6 by SmolLM2-135M, in tokens of much the same number
    assert -told[512:].mean() < -told[:512].mean()


@pytest.mark.slow
def test_the_second_model_answers_and_is_cut_into_tokens_like_the_original():
    real = load(ModelSpec(name=QWEN, device="cpu"))  # 8 GB of memory
    tokenizer, model, about = real.tokenizer, real.model, real.describe()
    assert (about["layers"], about["d_model"], about["vocab"]) == (28, 1536, 151936)
    assert about["architecture"] == "Qwen2ForCausalLM" and about["dtype"] == "float32"
    # The file has the embedding in 4 bits and the unembedding in 6: they aren't tied in it.
    assert not torch.equal(
        model.get_output_embeddings().weight, model.get_input_embeddings().weight
    )
    assert tokenizer.eos_token == "<|im_end|>" and model.generation_config.eos_token_id == 151645

    # The first ids are widely known; the rest follows from the expression that the file names.
    assert tokenizer("Hello, world!")["input_ids"] == [9707, 11, 1879, 0]
    assert tokenizer("<|im_start|>user\n")["input_ids"] == [151644, 872, 198]
    assert tokenizer.tokenize("in 2024") == ["in", "Ġ", "2", "0", "2", "4"]
    assert tokenizer.tokenize("a\n\n1") == ["a", "ĊĊ", "1"]
    assert tokenizer.tokenize("I'll she's") == ["I", "'ll", "Ġshe", "'s"]
    assert tokenizer("cafe\u0301")["input_ids"] == tokenizer("caf\u00e9")["input_ids"]
    for text in ("你好,世界!1234", "x  =\t3;\r\n\n  y", "naïve ﬁ 🙂"):
        assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    assert greedy(real, "What is the capital of France?", 12).endswith("<|im_end|>")
