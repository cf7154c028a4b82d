"""The probabilities of a large vocabulary, of which some classes are in memory at a time.

    python examples/stream_vocabulary.py
    python examples/stream_vocabulary.py --vocab 128256 --width 1024 --chunk 8192

A safetensors file has the weights of a head, a row for each class. The first pass reads them in chunks, makes the
logits of a chunk and merges its state into that of the rows. The second pass finishes each chunk by the state of the
whole row, and keeps the classes of the highest probabilities. The program ends with an error if they are not those of a
softmax of all logits. It needs the package safetensors.
"""

import argparse
import functools
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

import onepass

TOLERANCE = 1e-5  # of probabilities


def chunks(path: Path, hidden: Tensor, size: int) -> Iterator[tuple[int, Tensor]]:
    """The first class of each chunk, and its logits, (tokens, classes)."""
    with safe_open(path, "pt") as file:
        weight = file.get_slice("weight")
        for start in range(0, weight.get_shape()[0], size):
            yield start, hidden @ weight[start : start + size].T


def most_likely(path: Path, hidden: Tensor, size: int, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """The probabilities and the classes of the `count` most likely ones of each token, and its logsumexp."""
    whole = functools.reduce(onepass.merge, (onepass.state(logits) for _, logits in chunks(path, hidden, size)))
    best = torch.zeros(len(hidden), 0)
    classes = torch.zeros(len(hidden), 0, dtype=torch.int64)
    for start, logits in chunks(path, hidden, size):
        p = onepass.finish(logits, whole)
        best = torch.cat((best, p), 1)
        classes = torch.cat((classes, torch.arange(start, start + p.shape[1]).expand_as(p)), 1)
        best, order = best.topk(min(count, best.shape[1]))
        classes = classes.gather(1, order)
    return best, classes, whole.logsumexp()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=32000)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--chunk", type=int, default=3000, help="classes in memory at a time")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    torch.manual_seed(given.seed)
    hidden, weight = torch.randn(given.tokens, given.width), torch.randn(given.vocab, given.width) / given.width**0.5
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "head.safetensors"
        save_file({"weight": weight}, path)
        best, classes, lse = most_likely(path, hidden, given.chunk, 5)
    logits = hidden @ weight.T
    p = onepass.softmax(logits)
    difference = max(
        float((best - p.topk(best.shape[1]).values).abs().max()),
        float((best - p.gather(1, classes)).abs().max()),
        float((lse - onepass.logsumexp(logits, 1)).abs().max()),
    )
    print(f"{given.vocab} classes, {min(given.chunk, given.vocab)} at a time, {given.tokens} tokens")
    print(f"token 0: class {int(classes[0, 0])} with probability {float(best[0, 0]):.4f}")
    print(f"largest difference: {difference:.1e}")
    if not difference < TOLERANCE:
        sys.exit(f"the results differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
