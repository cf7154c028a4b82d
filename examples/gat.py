"""A small graph attention network, trained from one seed by torch's scatter functions and by onepass.

    python examples/gat.py
    python examples/gat.py --nodes 20000 --degree 20 --steps 50 --device cuda

The nodes of a random graph have one of a few classes, and are mostly linked to others of theirs. Attention is a softmax
over the edges that end in a node (Velickovic et al., arXiv:1710.10903). torch's run makes it of five functions,
onepass's run of one, by segments that are found once. Both runs see the same graph, so their losses differ by nothing
but rounding: the program ends with an error if they do not agree.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

CLASSES, FEATURES, WIDTH, HEADS = 5, 32, 16, 4
TOLERANCE = 1e-3  # of losses
Softmax = Callable[[Tensor], Tensor]  # of scores of edges, (edges, heads)


class Attention(nn.Module):
    def __init__(self, width: int, out: int, heads: int) -> None:
        super().__init__()
        self.heads, self.out = heads, out
        self.linear = nn.Linear(width, heads * out, bias=False)
        self.of_source, self.of_target = (nn.Parameter(torch.randn(heads, out) * 0.1) for _ in range(2))

    def forward(self, x: Tensor, source: Tensor, target: Tensor, softmax: Softmax) -> Tensor:
        h = self.linear(x).view(-1, self.heads, self.out)
        of_source, of_target = ((h * by).sum(-1) for by in (self.of_source, self.of_target))
        weights = softmax(F.leaky_relu(of_source[source] + of_target[target], 0.2))
        messages = h[source] * weights.unsqueeze(-1)
        return torch.zeros_like(h).index_add(0, target, messages).flatten(1)


class Gat(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Attention(FEATURES, WIDTH, HEADS), Attention(HEADS * WIDTH, CLASSES, 1)

    def forward(self, x: Tensor, source: Tensor, target: Tensor, softmax: Softmax) -> Tensor:
        return self.second(F.elu(self.first(x, source, target, softmax)), source, target, softmax)


def scatter_softmax(target: Tensor, nodes: int) -> Softmax:
    def softmax(scores: Tensor) -> Tensor:
        index = target.unsqueeze(1).expand_as(scores)
        shape = nodes, scores.shape[1]
        top = scores.new_zeros(shape).scatter_reduce(0, index, scores.detach(), "amax", include_self=False)
        exponentials = (scores - top[target]).exp()
        return exponentials / scores.new_zeros(shape).scatter_add(0, index, exponentials)[target]

    return softmax


def make_graph(nodes: int, degree: int, seed: int, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Features, classes, and the edges: sources and targets in no order. Each node has an edge to itself."""
    g = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (nodes,), generator=g).sort().values
    ends = torch.randint(nodes, (2, nodes * degree), generator=g)
    stays = (classes[ends[0]] == classes[ends[1]]) | (torch.rand(ends.shape[1], generator=g) < 0.1)
    source, target = torch.cat([ends[:, stays], torch.arange(nodes).expand(2, -1)], 1)
    features = F.one_hot(classes, FEATURES) + torch.randn(nodes, FEATURES, generator=g) * 1.5
    return features.to(device), classes.to(device), source.to(device), target.to(device)


def train(given: argparse.Namespace, graph: tuple[Tensor, ...], softmax: Softmax) -> tuple[list[float], float, float]:
    """The losses, the share of nodes whose class is found in the end, the time of a step in ms."""
    torch.manual_seed(given.seed)
    x, classes, source, target = graph
    model = Gat().to(given.device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses, times = [], []
    for _ in range(given.steps):
        start = time.perf_counter()
        scores = model(x, source, target, softmax)
        loss = F.cross_entropy(scores, classes)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        times.append((time.perf_counter() - start) * 1e3)
    found = float((scores.argmax(1) == classes).float().mean())
    return losses, found, statistics.median(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=2000)
    parser.add_argument("--degree", type=int, default=30, help="edges per node, of which some are dropped")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    given = parser.parse_args()
    graph = make_graph(given.nodes, given.degree, given.seed, given.device)
    target = graph[3]
    segments = onepass.Segments(target, given.nodes)
    runs = {
        "torch": scatter_softmax(target, given.nodes),
        "onepass": lambda scores: onepass.segment_softmax(scores, segments),
    }
    print(f"{len(target)} edges of {given.nodes} nodes")
    losses = {}
    for name, softmax in runs.items():
        losses[name], found, step = train(given, graph, softmax)
        print(
            f"{name:<8} loss {losses[name][0]:.4f} to {losses[name][-1]:.4f}, {found:.1%} found, {step:.1f} ms a step"
        )
    difference = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    print(f"largest difference of the losses: {difference:.1e}")
    if not difference < TOLERANCE:
        sys.exit(f"the losses differ by more than {TOLERANCE}")


if __name__ == "__main__":
    main()
