"""How the results of providers look in plots and pages: labels, colours, order, words. No matplotlib is needed."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from onepass.tools.bench.cases import ITEMSIZE
from onepass.tools.bench.results import Row

# Label, colour and marker of each provider. The colours are Okabe's and Ito's, distinct with any colour vision.
_STYLES = {
    "onepass": ("onepass", "#0072B2", "o"),
    "torch": ("torch", "#D55E00", "s"),
    "torch-compile": ("torch.compile", "#E69F00", "^"),
    "naive": ("naive PyTorch", "#999999", "v"),
    "liger": ("Liger", "#009E73", "D"),
    "quack": ("QuACK", "#882255", "p"),
    "onepass-index": ("onepass, index", "#56B4E9", "P"),
    "onepass-plan": ("onepass, unsorted", "#CC79A7", "X"),
    "pyg-index": ("PyG, index", "#009E73", "D"),
    "pyg-ptr": ("PyG, ptr", "#882255", "p"),
    "pyg-unsorted": ("PyG, unsorted", "#999999", "v"),
    "pyg-index-compile": ("PyG, index, compiled", "#E69F00", "^"),
    "pyg-ptr-compile": ("PyG, ptr, compiled", "#D55E00", "s"),
    "onepass-triton": ("onepass (Triton)", "#56B4E9", "P"),
    "onepass-cuda": ("onepass (CUDA)", "#CC79A7", "X"),
    "onepass-cpu": ("onepass (CPU)", "#CC79A7", "X"),
}
# The variants of the gallery, with a family of colours per language. They are too many for one palette, so that the
# markers must distinguish them too.
GALLERY_STYLES = {
    "naive-jit": ("naive, TorchScript", "#8C6D46", "<"),
    "naive-compile": ("naive, torch.compile", "#5B3A1E", ">"),
    "triton-row": ("Triton, row", "#7CB342", "^"),
    "triton-persistent": ("Triton, persistent", "#1B7837", "d"),
    "triton-online": ("Triton, online", "#B8C400", "p"),
    "cpu-threepass": ("C++, three passes", "#00A3AD", "8"),
    "cpu-online": ("C++, online", "#00626B", "H"),
    "cuda-warp": ("CUDA, warp", "#E7298A", "*"),
    "cuda-block": ("CUDA, block", "#7B3294", "h"),
    "cuda-online": ("CUDA, online", "#A50F15", "X"),
    "cuda-auto": ("CUDA, auto", "#2D0A4E", "P"),
    "cuda-vector": ("CUDA, vector", "#F4A6C8", "<"),
    "cuda-registers": ("CUDA, registers", "#C51B7D", "s"),
    "cuda-rows": ("CUDA, rows", "#9E7BB5", "v"),
    "cuda-async": ("CUDA, async", "#E34A33", "D"),
    "cuda-cluster": ("CUDA, cluster", "#FC8D59", "^"),
    "cuda-grid": ("CUDA, grid", "#7F2704", "o"),
    "cuda-columns": ("CUDA, columns", "#54278F", "d"),
    "cuda-backward": ("CUDA, backward", "#807DBA", ">"),
}
_OTHER = (("#CC79A7", "<"), ("#F0E442", ">"), ("#009E73", "*"), ("#56B4E9", "p"), ("#E69F00", "h"), ("#999999", "d"))


def style(name: str, names: Sequence[str] = ()) -> tuple[str, str, str]:
    """Label, colour and marker; those of an unknown provider depend on its place in `names`."""
    known = _STYLES | GALLERY_STYLES
    if name in known:
        return known[name]
    others = [n for n in names if n not in known] or [name]
    return (name, *_OTHER[others.index(name) % len(_OTHER)])


def providers(rows: Iterable[Row]) -> list[str]:
    """onepass first, then the others in their order. The copy has no curve or bar of its own."""
    names = [n for n in dict.fromkeys(r.provider for r in rows) if n != "copy"]
    return sorted(names, key=lambda n: n != "onepass")


def is_sweep(rows: Sequence[Row]) -> bool:
    """Whether all cases are matrices with at least three row lengths, and either the same number of rows or as many
    rows as fit into the same number of elements."""
    shapes = {tuple(r.shape) for r in rows}
    if not all(len(r.shape) == 2 and r.dim in (-1, 1) for r in rows) or len({s[1] for s in shapes}) < 3:
        return False
    most = max(m * n for m, n in shapes)
    return len({s[0] for s in shapes}) == 1 or all((m + 1) * n > most for m, n in shapes)


def rows_text(rows: Sequence[Row]) -> str:
    """What the matrices of a sweep have in common: the number of rows, or the bytes that they fill."""
    if len({r.shape[0] for r in rows}) == 1:
        return f"{rows[0].shape[0]} rows"
    size = max(r.shape[0] * r.shape[1] * ITEMSIZE.get(r.dtype, 0) for r in rows)
    return f"{size / 2**30:.0f} GiB of rows" if size >= 2**30 else f"{size / 2**20:.0f} MiB of rows"


def limit_name(row: Row) -> str:
    """What the speed is a fraction of: a copy or, for gradients, an addition of the same bytes."""
    return "copy" if row.direction == "forward" else "add"


def why(row: Row) -> str:
    """Why a row has no time, in a word or two."""
    words = {"wrong": "wrong", "unsupported": "not supported", "skipped": "no memory", "disturbed": "disturbed"}
    return words.get((row.error or "").partition(":")[0], "error")
