"""Number of bytes of text per token."""

from __future__ import annotations

import json
import re
from pathlib import Path

_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"  # SentencePiece's notation


def bytes_of_tokens(tokenizer: str, vocab_size: int) -> tuple[int, ...]:
    """Number of bytes of text per token; 0 for special tokens.

    Text that a tokenizer drops, such as spaces, or does not know is not counted.

    Args:
        tokenizer: a tokenizer.json that the `tokenizers` library has accepted.
        vocab_size: number of its tokens.
    """
    facts = json.loads(Path(tokenizer).read_text(encoding="utf-8"))
    model, added = facts["model"], facts.get("added_tokens") or []
    vocabulary = model["vocab"]
    if isinstance(vocabulary, list):  # (text, score) of a Unigram model
        vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
    decoder = json.dumps(facts["decoder"], ensure_ascii=False)
    sizes = [0] * vocab_size
    for text, number in vocabulary.items():
        if text != model.get("unk_token") and number < vocab_size:
            sizes[number] = _size(text, decoder)
    for token in added:  # stored literally
        if token["id"] < vocab_size:
            sizes[token["id"]] = 0 if token["special"] else len(token["content"].encode())
    return tuple(sizes)


def _size(token: str, decoder: str) -> int:
    """Bytes of text that a token stands for, in the notation of a decoder.

    Args:
        decoder: the tokenizer's decoder, as JSON.
    """
    if '"ByteLevel"' in decoder:
        return len(token)  # one letter per byte
    if '"ByteFallback"' in decoder and re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return 1
    if '"WordPiece"' in decoder:
        token = token.removeprefix("##")
    return len((token.replace(_SPACE, " ") if _SPACE in decoder else token).encode())
