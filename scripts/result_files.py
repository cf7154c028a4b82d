"""Which results files the tables and the pictures of the docs are made from (scripts/make_figures.py)."""

from __future__ import annotations

from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"

# The file of each suite that the docs show.
FILES = {
    "lengths": "lengths-h200-2026-11-28.json",
    "rows": "rows-h200-2026-11-22.json",
    "few": "few-h200-2026-11-28.json",
    "seeds": "seeds-h200-2026-11-24.json",
    "models": "models-h200-2026-11-24.json",
    "slide": "slide-h200-2026-11-26.json",
    "columns": "columns-h200-2026-11-30.json",
    "losses": "losses-h200-2026-11-27.json",
    "losses-compile": "losses-compile-h200-2026-11-29.json",
    "scores": "scores-h200-2026-12-01.json",
    "backward": "backward-h200-2026-11-22.json",
    "gallery-seeds": "seeds-gallery-h200-2026-11-24.json",
    "gallery-powers": "powers-gallery-h200-2026-11-28.json",
    "gallery-powers-cpu": "powers-gallery-cpu-2026-11-29.json",
    "cpu AVX2, 1 thread": "cpu-epyc-avx2-1t-2026-11-29.json",
    "cpu AVX2, 2 threads": "cpu-epyc-avx2-2t-2026-11-29.json",
    "cpu AVX-512, 1 thread": "cpu-xeon-avx512-1t-2026-11-28.json",
    "cpu AVX-512, 2 threads": "cpu-xeon-avx512-2t-2026-11-28.json",
    "cpu-backward AVX2, 1 thread": "cpu-backward-epyc-avx2-1t-2026-11-29.json",
    "cpu-backward AVX2, 2 threads": "cpu-backward-epyc-avx2-2t-2026-11-29.json",
    "cpu-backward AVX-512, 1 thread": "cpu-backward-xeon-avx512-1t-2026-11-28.json",
    "cpu-backward AVX-512, 2 threads": "cpu-backward-xeon-avx512-2t-2026-11-28.json",
}
# The files of `onepass bench segments` by device: segments-DEVICE-DATE.json, or with classes before the date.
SEGMENTS: dict[str, list[str]] = {}
for _path in sorted(RESULTS.glob("segments-*.json")):
    SEGMENTS.setdefault("-".join(_path.name.split("-")[:2]), []).append(_path.name)
SHARDED = (2, 4)  # numbers of GPUs
PHASES = "sharded-phases-h200-2026-11-27.json"  # measured on one GPU without peers
GPT = ("gpt-cpu-2026-11-27.json", "gpt-h200-2026-11-27.json")  # from examples/gpt.py
# The days of the last change to the speed of kernels of rows and columns, or to their plans. Older files are marked.
CHANGED = {"GPU": "2026-11-26", "columns": "2026-11-30", "CPU": "2026-11-28"}
OLDER = " (older code)"
# The files of random shapes, one for each seed.
RANDOM = [f"random-{seed}-h200-2026-11-26.json" for seed in range(1000, 1005)]
RANDOM_COLUMNS = [f"random-columns-{seed}-h200-2026-11-30.json" for seed in range(1000, 1005)]  # newer, of two classes
RANDOM_SCORES = ("scores-random-h200-2026-12-01.json",)
# The four lines of the README's table.
HEADLINES = (
    ("lengths", None, None),
    ("few", None, None),
    ("columns", None, "forward"),
    ("backward", None, None),
)
# (what a table calls it, the file, function or None for all, direction or None)
GPU = (
    ("1 GiB of rows, half of their lengths random", "lengths", None, None),
    ("1 GiB of rows, softmax", "rows", "softmax", None),
    ("1 GiB of rows, logsumexp", "rows", "logsumexp", None),
    ("4096 rows of 256 to 12672", "seeds", None, None),
    ("few long rows", "few", None, None),
    ("gradients of rows", "backward", None, None),
    ("another dim or layout", "columns", None, "forward"),
    ("gradients over another dim or layout", "columns", None, "backward"),
    ("shapes of models", "models", None, None),
)
README = tuple(workload for workload in GPU if workload[1:] in HEADLINES)
CPU = tuple((key, key, None, None) for key in FILES if key.startswith("cpu"))
OTHERS = {"torch": "torch", "torch-compile": "torch.compile", "liger": "Liger", "quack": "QuACK"}
# The pictures that the docs show: file, what `onepass plot` calls it -> its name in docs/plots.
PICTURES = {
    "lengths": {"lengths-softmax-forward-bfloat16": "lengths-h200-bfloat16"},
    "rows": {
        "row-lengths-softmax-forward-bfloat16": "rows-h200-bfloat16",
        "row-lengths-logsumexp-forward-float32": "logsumexp-h200-float32",
    },
    "few": {"few-long-rows-softmax-forward-float32": "few-h200-float32"},
    "backward": {"backward-softmax-backward-bfloat16": "backward-h200-bfloat16"},
    "columns": {
        "columns-softmax-forward-float32": "columns-h200-float32",
        "columns-softmax-forward-bfloat16": "columns-h200-bfloat16",
        "columns-softmax-backward-bfloat16": "columns-backward-h200-bfloat16",
    },
    "models": {"models-softmax-forward-bfloat16": "models-h200-bfloat16"},
    "slide": {
        "slide-rows-softmax-forward-bfloat16": "slide-rows-h200-bfloat16",
        "slide-other-dim-n-softmax-forward-float32": "slide-other-dim-n-h200-float32",
        "slide-other-dim-b-softmax-forward-bfloat16": "slide-other-dim-b-h200-bfloat16",
    },
    "gallery-seeds": {"tutorial-softmax-forward-float32": "gallery-seeds-h200"},
    "gallery-powers": {"powers-of-two-softmax-forward-float32": "gallery-powers-h200"},
    "cpu AVX2, 1 thread": {f"cpu-softmax-forward-{t}": f"cpu-epyc-{t}" for t in ("float32", "bfloat16")},
}


def link(file: str, text: str | None = None) -> str:
    """A link to a results file, marked if the kernels have changed since."""
    words = file.split("-")
    kind = "CPU" if "cpu" in words else "columns" if words[0] == "columns" else "GPU"
    is_older = file[-len("2026-11-26.json") :] < CHANGED[kind]
    return f"[{text or file.removesuffix('.json')}](benchmarks/results/{file}){OLDER * is_older}"
