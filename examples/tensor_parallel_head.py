"""The head of a language model whose classes are split over ranks, and its loss.

    python examples/tensor_parallel_head.py
    python examples/tensor_parallel_head.py --ranks 4 --vocab 50257

Each rank has some rows of the head's weight, and makes the logits of its own classes alone (a column-parallel linear
layer, Shoeybi et al., arXiv:1909.08053). `onepass.distributed.cross_entropy` makes the loss of all of them by one
exchange of a few numbers per token; no logits cross. The gradient of the hidden states is the sum of what each rank
makes of its classes. The processes run on this machine, on gloo. Each ends with an error if the loss and the gradients
are not those of the whole head.
"""

import argparse
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

import onepass

TOLERANCE = 1e-5


class CopyToRanks(torch.autograd.Function):
    """The identity. Its gradient is the sum over the ranks, each of which goes on with a part of its own."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        total = grad.clone()
        dist.all_reduce(total)
        return total


def work(rank: int, given: argparse.Namespace, store: str) -> None:
    torch.set_num_threads(1)
    files = dist.FileStore(store, given.ranks)
    dist.init_process_group("gloo", store=files, rank=rank, world_size=given.ranks)
    torch.manual_seed(given.seed)  # the same on every rank
    hidden = torch.randn(given.tokens, given.width, requires_grad=True)
    weight = torch.randn(given.vocab, given.width) / given.width**0.5
    target = torch.randint(given.vocab, (given.tokens,))

    own = weight.tensor_split(given.ranks)[rank].clone().requires_grad_()
    logits = CopyToRanks.apply(hidden) @ own.T
    loss = onepass.distributed.cross_entropy(logits, target)
    loss.backward()

    all_weight = weight.clone().requires_grad_()
    again = hidden.detach().clone().requires_grad_()
    want = F.cross_entropy(again @ all_weight.T, target)
    want.backward()
    pairs = [
        (loss.detach(), want.detach()),
        (hidden.grad, again.grad),
        (own.grad, all_weight.grad.tensor_split(given.ranks)[rank]),
    ]
    difference = max(float((a - b).abs().max()) for a, b in pairs)
    if rank == 0:
        print(f"{given.vocab} classes on {given.ranks} ranks, {given.tokens} tokens")
        print(f"loss {loss.item():.6f}, of the whole head {want.item():.6f}")
        print(f"largest difference of loss and gradients: {difference:.1e}")
    dist.destroy_process_group()
    if not difference < TOLERANCE:
        sys.exit(f"rank {rank}: loss or gradients differ by more than {TOLERANCE}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--vocab", type=int, default=4001)
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (given, f"{folder}/store"), given.ranks, start_method="fork")


if __name__ == "__main__":
    main()
