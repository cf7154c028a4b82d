"""A small GPT over characters, trained twice from one seed: by torch alone, and with torch's softmax family patched.

    python examples/gpt.py --steps 300 --device cuda --json gpt.json

Attention is spelled out with F.softmax, the loss is F.cross_entropy. Both runs see the same batches, so their losses
differ by nothing but rounding.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

TEXT = (Path(__file__).resolve().parent.parent / "LICENSE").read_text()
CHARACTERS = sorted(set(TEXT))
LAYERS, HEADS, WIDTH = 4, 4, 128


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.joined = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        qkv = self.qkv(self.before_attention(x)).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        scores = q @ k.transpose(-2, -1) / (WIDTH // HEADS) ** 0.5
        weights = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1)
        x = x + self.joined((weights @ v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, context: int) -> None:
        super().__init__()
        self.characters, self.places = nn.Embedding(len(CHARACTERS), WIDTH), nn.Embedding(context, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.last, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(CHARACTERS))
        self.register_buffer("future", torch.ones(context, context, dtype=torch.bool).triu(1))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.characters(ids) + self.places.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x, self.future)
        return self.head(self.last(x))


def train(steps: int, device: str, batch: int, context: int) -> tuple[list[float], list[float]]:
    """The loss and the seconds of each step."""
    torch.manual_seed(0)
    model = GPT(context).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    text = torch.tensor([CHARACTERS.index(c) for c in TEXT])
    draw = torch.Generator().manual_seed(1)
    losses, seconds = [], []
    for _ in range(steps):
        starts = torch.randint(len(text) - context, (batch, 1), generator=draw)
        window = text[starts + torch.arange(context + 1)].to(device)
        begin = time.perf_counter()
        loss = F.cross_entropy(model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())  # waits for the device
        seconds.append(time.perf_counter() - begin)
    return losses, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=8, help="windows of text a step")
    parser.add_argument("--context", type=int, default=64, help="characters a window")
    parser.add_argument("--json", type=Path, help="write both curves and all times to this file")
    given = parser.parse_args()
    size = (given.device, given.batch, given.context)

    train(5, *size)  # what is only slow once is not timed
    plain, plain_seconds = train(given.steps, *size)
    with onepass.patch(report=True) as patched:
        train(5, *size)
        ours, our_seconds = train(given.steps, *size)

    print("step     torch   patched")
    for step in sorted({*range(0, given.steps, max(given.steps // 10, 1)), given.steps - 1}):
        print(f"{step:>4}  {plain[step]:8.5f}  {ours[step]:8.5f}")
    difference = max(abs(a - b) for a, b in zip(plain, ours, strict=True))
    print(f"largest difference of the losses: {difference:.2g}")
    medians = [1e3 * statistics.median(seconds) for seconds in (plain_seconds, our_seconds)]
    print(f"median step: torch {medians[0]:.2f} ms, patched {medians[1]:.2f} ms\n\n{patched.report}")
    if given.json:
        record = {
            "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
            "torch": torch.__version__,
            "batch": given.batch,
            "context": given.context,
            "largest_difference": difference,
            "median_step_ms": dict(zip(("torch", "patched"), medians, strict=True)),
            "served": patched.report.served,
            "fallbacks": {f"{name}: {why}": count for (name, why), count in patched.report.fallbacks.items()},
            "losses": {"torch": plain, "patched": ours},
            "seconds": {"torch": plain_seconds, "patched": our_seconds},
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
