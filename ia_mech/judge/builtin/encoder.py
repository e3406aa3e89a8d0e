"""The sentence encoder that the built-in judge reads texts with: all-MiniLM-L6-v2, on a CPU."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import BertConfig, BertModel

from ia_mech.judge.builtin.features import FUNCTION_WORDS, WORD, Text, sentences

HALF = 95  # word pieces read of the start and of the end of a text that is longer than both
_BATCH = 2048  # word pieces in a batch
_FIRST, _RARE = 995, 29_522  # from about piece 1,000 on the vocabulary lists words by frequency


def unit(vectors: np.ndarray) -> np.ndarray:
    """The vectors, of length 1."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-9)


class Encoder:
    """The encoder of a folder, in single precision. Texts are read alone, whatever the batch."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.tokenizer.no_padding()
        self.tokenizer.no_truncation()
        config = BertConfig.from_pretrained(folder)
        self.model = BertModel(config, add_pooling_layer=False).eval()
        self.model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)
        vocabulary = self.tokenizer.get_vocab()
        self.weights = np.zeros(len(vocabulary))  # how much each piece says; see Text
        for piece, i in vocabulary.items():
            if piece not in FUNCTION_WORDS and WORD.search(piece) and piece[0] != "[":
                self.weights[i] = np.log(max(i - _FIRST, 1.1)) / np.log(_RARE)

    def read(self, texts: Sequence[str]) -> list[Text]:
        """The texts, in their order."""
        pieces = [self.pieces(text) for text in texts]
        states = self.states([ids for ids, _ in pieces])
        return [
            self._text(text, *piece, state)
            for text, piece, state in zip(texts, pieces, states, strict=True)
        ]

    def pieces(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        """``[pieces]`` of what is read of it, the two marks included, and where each begins."""
        encoding = self.tokenizer.encode(text.encode(errors="replace").decode())  # surrogates
        n = len(encoding.ids)
        kept = np.arange(n) if n <= 2 * HALF + 2 else np.r_[: HALF + 1, n - HALF - 1 : n]
        return np.array(encoding.ids)[kept], np.array([a for a, _ in encoding.offsets])[kept]

    @torch.inference_mode()
    def states(self, rows: Sequence[np.ndarray]) -> list[np.ndarray]:
        """``[pieces, width]`` of each row of pieces."""
        found = [np.empty(0)] * len(rows)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        while order:
            size = max(1, _BATCH // len(rows[order[-1]]))  # the longest first
            batch, order = order[-size:], order[:-size]
            ids = torch.nn.utils.rnn.pad_sequence(
                [torch.from_numpy(rows[i]) for i in batch], batch_first=True
            )
            states = self.model(ids, attention_mask=(ids > 0).long()).last_hidden_state.numpy()
            for i, state in zip(batch, states, strict=True):
                found[i] = state[: len(rows[i])].copy()  # not the batch with its padding
        return found

    def _text(self, text: str, ids: np.ndarray, begin: np.ndarray, states: np.ndarray) -> Text:
        """A text with its pieces' states; those of the marks around it count for its meaning."""
        spans, meaning = sentences(text), unit(states.mean(0))
        ids, begin, states = ids[1:-1], begin[1:-1], states[1:-1]
        within = [(begin >= a) & (begin < b) for a, b in spans]
        read = [(s, unit(states[w].mean(0))) for s, w in zip(spans, within, strict=True) if w.any()]
        read = read or [(spans[0], meaning)]
        parts = np.array([part for _, part in read])
        return Text(
            text, ids, unit(states), self.weights[ids], meaning, [s for s, _ in read], parts
        )
