"""A small GPT, trained from one seed by torch alone and by onepass: the losses, the time of a step and the memory.

    python examples/gpt.py --linear
    python examples/gpt.py --device cuda --vocab 50257 --batch 16 --length 1024 --width 768 --fused --linear

The code is torch's: attention is spelled out with F.softmax, or one fused call with --fused, and the loss is
F.cross_entropy. onepass's run is the same code within onepass.patch(). With --linear another run takes its loss from
onepass.linear_cross_entropy. All runs see the same batches, so their losses differ by nothing but rounding.
"""

import argparse
import json
import math
import statistics
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import onepass

TEXT = (Path(__file__).resolve().parent.parent / "LICENSE").read_bytes()
LAYERS = 4
TOLERANCE = 1e-3  # of losses
PROCESS = Path("/proc/self")


class Block(nn.Module):
    def __init__(self, width: int, fused: bool) -> None:
        super().__init__()
        self.heads, self.fused = max(width // 64, 1), fused
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.joined = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.before_attention(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
            future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=x.device).triu(1)
            mixed = F.softmax(scores.masked_fill(future, -torch.inf), dim=-1) @ v
        x = x + self.joined(mixed.transpose(1, 2).flatten(2))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, vocab: int, length: int, width: int, fused: bool) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, fused) for _ in range(LAYERS)), nn.LayerNorm(width))
        self.head = nn.Linear(width, vocab, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        """What the head makes logits of."""
        return self.blocks(self.tokens(ids) + self.places.weight[: ids.shape[1]])


def tokens(vocab: int) -> Tensor:
    """The text as bytes, or for a larger vocabulary as numbers of three bytes in a row."""
    a, b, c = (torch.tensor(list(TEXT))[i : len(TEXT) - 2 + i] for i in range(3))
    return ((a * 256 + b) * 256 + c) % vocab


class Run:
    """A model, what trains it, and of each step the loss, the seconds and the MB held besides what was held before."""

    def __init__(self, given: argparse.Namespace, linear: bool) -> None:
        torch.manual_seed(0)
        self.model = GPT(given.vocab, given.length, given.width, given.fused).to(given.device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, fused=True)
        self.linear, self.losses, self.seconds, self.mb = linear, [], [], []

    def step(self, window: Tensor) -> None:
        before = held(window.device, reset=True)
        begin = time.perf_counter()
        hidden, target = self.model(window[:, :-1]).flatten(0, 1), window[:, 1:].flatten()
        if self.linear:
            loss = onepass.linear_cross_entropy(hidden, self.model.head.weight, target)
        else:
            loss = F.cross_entropy(self.model.head(hidden), target)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.item())  # waits for the device
        self.seconds.append(time.perf_counter() - begin)
        self.mb.append(held(window.device) - before)


def held(device: torch.device, reset: bool = False) -> float:
    """The most MB since the last reset, which may be now: what torch allocated on a GPU, else what is resident."""
    if device.type == "cuda":
        if reset:
            torch.cuda.reset_peak_memory_stats()
        return torch.cuda.max_memory_allocated() / 1e6
    if not PROCESS.exists():
        return math.nan
    if reset:
        (PROCESS / "clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in (PROCESS / "status").open() if line.startswith("VmHWM")) / 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--vocab", type=int, default=16384, help="tokens that there are")
    parser.add_argument("--batch", type=int, default=8, help="windows of text a step")
    parser.add_argument("--length", type=int, default=64, help="tokens a window")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--fused", action="store_true", help="attention by scaled_dot_product_attention")
    parser.add_argument("--linear", action="store_true", help="another run with onepass.linear_cross_entropy")
    parser.add_argument("--json", type=Path, help="write curves, times and memory to this file")
    given = parser.parse_args()

    runs = {"torch": Run(given, False), "onepass": Run(given, False)}
    if given.linear:
        runs["onepass, linear"] = Run(given, True)
    text, draw = tokens(given.vocab), torch.Generator().manual_seed(1)
    patched = onepass.patch(report=True)
    patched.restore()  # until it is entered
    for _ in range(given.steps):
        starts = torch.randint(len(text) - given.length, (given.batch, 1), generator=draw)
        window = text[starts + torch.arange(given.length + 1)].to(given.device)
        for name, run in runs.items():
            with nullcontext() if name == "torch" else patched:
                run.step(window)

    print("step " + "".join(f"{name:>18}" for name in runs))
    for step in sorted({*range(0, given.steps, max(given.steps // 10, 1)), given.steps - 1}):
        print(f"{step:>4} " + "".join(f"{run.losses[step]:>18.5f}" for run in runs.values()))
    ms = {name: 1e3 * statistics.median(run.seconds) for name, run in runs.items()}
    mb = {name: statistics.median(run.mb) for name, run in runs.items()}
    print(f"\n{'run':<16}{'ms a step':>11}{'x torch':>9}{'MB a step':>11}")
    for name in runs:
        print(f"{name:<16}{ms[name]:>11.2f}{ms['torch'] / ms[name]:>9.2f}{mb[name]:>11.0f}")
    plain = runs["torch"].losses
    difference = max(abs(a - b) for run in runs.values() for a, b in zip(plain, run.losses, strict=True))
    agree = difference < TOLERANCE
    print(
        f"\nThe losses {'agree' if agree else 'DIFFER'}: by at most {difference:.2g} at each step.\n\n{patched.report}"
    )
    if given.json:
        record = {
            "device": torch.cuda.get_device_name() if given.device.startswith("cuda") else given.device,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            **{name: value for name, value in vars(given).items() if name not in ("device", "json")},
            "largest_difference": difference,
            "median_step_ms": ms,
            "peak_step_mb": mb,
            "served": patched.report.served,
            "fallbacks": {f"{name}: {why}": count for (name, why), count in patched.report.fallbacks.items()},
            "losses": {name: run.losses for name, run in runs.items()},
            "seconds": {name: run.seconds for name, run in runs.items()},
        }
        given.json.write_text(json.dumps(record, indent=1) + "\n")
    sys.exit(not agree)


if __name__ == "__main__":
    main()
