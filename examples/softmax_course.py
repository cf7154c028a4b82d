# %% [markdown]
# # A course on GPU reductions, on a CPU
#
# A softmax, from its definition to a fused kernel, in cells that run without a GPU: Triton's kernels in Triton's
# interpreter, CUDA's in the emulator of the gallery. It needs `onepass`, `triton`, `nvidia-cuda-nvrtc` and a C++
# compiler. The pages of the course (`docs/course`) have the pictures and the other rungs.

# %%
import os

os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported: its kernels run on the CPU

import math
import random

import torch
import triton
import triton.language as tl

import onepass
from onepass.tools.gallery import variant
from onepass.tools.gallery.traffic import predict_all

torch.manual_seed(0)
random.seed(0)

# %% [markdown]
# ## 1. The definition
#
# `exp` of a large number overflows. Subtracting the row's maximum changes nothing but that.

# %%
x = torch.tensor([87.0, 88.0, 89.0])
print("without:", (x.exp() / x.exp().sum()).tolist())
e = (x - x.max()).exp()
print("with:   ", [round(v, 4) for v in (e / e.sum()).tolist()])

# %% [markdown]
# ## 2. What five steps cost
#
# The gallery knows what each rung reads and writes. The time of a kernel is that of its bytes, so a copy is the limit.

# %%
rungs = ["naive", "cuda-online", "triton-row"]
for name, p in predict_all(onepass.explain((4096, 4096), device="h200"), rungs).items():
    print(f"{name:12} reads {p.reads_formula:9} writes {p.writes_formula:9} at most {p.copy_fraction:.2f} of a copy")

# %% [markdown]
# ## 3. The pair
#
# `m` is the maximum so far and `l` the sum of `exp(x - m)` so far. Where a larger element comes, `l` is rescaled.


# %%
def merge(a, b):
    m = max(a[0], b[0])
    if m == -math.inf:
        return (m, 0.0)  # of nothing: -inf - -inf would be NaN
    return (m, a[1] * math.exp(a[0] - m) + b[1] * math.exp(b[0] - m))


pair = (-math.inf, 0.0)
for value in (2.0, 0.0, 3.0, 1.0, 5.0, 4.0):
    pair = merge(pair, (value, 1.0))
    print(f"{value:g} -> m = {pair[0]:g}, l = {pair[1]:.4f}")

# %% [markdown]
# The grouping does not matter. So lanes, warps, blocks and GPUs can each make a pair of their part.


# %%
def tree(pairs):
    """Merged in a random grouping."""
    pairs = list(pairs)
    while len(pairs) > 1:
        i = random.randrange(len(pairs) - 1)
        pairs[i : i + 2] = [merge(pairs[i], pairs[i + 1])]
    return pairs[0]


row = torch.randn(100).tolist()
found = {tuple(round(v, 9) for v in tree((v, 1.0) for v in row)) for _ in range(20)}
print(len(found), "result of 20 groupings:", found)

# %% [markdown]
# ## 4. The butterfly
#
# A lane exchanges with the lane whose number differs in one bit. After five exchanges all 32 lanes have everything.

# %%
lanes = [(v, 1.0) for v in row[:32]]
for mask in (16, 8, 4, 2, 1):
    lanes = [merge(lanes[lane], lanes[lane ^ mask]) for lane in range(32)]
    print(f"mask {mask:2}: {len({round(l, 9) for _, l in lanes}):2} different sums")

# %% [markdown]
# ## 5. A fused kernel in Triton
#
# A program loads a row once, keeps it, and writes the result once. Exercise: what does `other=0.0` break?


# %%
@triton.jit
def softmax_kernel(x_ptr, y_ptr, stride, n, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * stride + column, mask=column < n, other=-float("inf"))
    e = tl.exp(x - tl.max(x, 0))
    tl.store(y_ptr + row * stride + column, e / tl.sum(e, 0), mask=column < n)


def softmax(x):
    y = torch.empty_like(x)
    softmax_kernel[(len(x),)](x, y, x.stride(0), x.shape[1], triton.next_power_of_2(x.shape[1]))
    return y


x = torch.randn(5, 781)
print("largest difference below 1e-6:", bool((softmax(x) - torch.softmax(x, 1)).abs().max() < 1e-6))

# %% [markdown]
# ## 6. Judge it
#
# Random numbers alone are a mild judge. These rows have broken kernels that were published.

# %%
inf = math.inf
odd = {
    "around -200": torch.randn(3, 300) - 200,
    "around 1000": torch.randn(3, 300) + 1000,
    "one element": torch.randn(3, 1),
    "mostly -inf": torch.randn(3, 300).where(torch.rand(3, 300) < 0.1, -inf),
    "a power of two": torch.randn(3, 256),
}
for name, x in odd.items():
    right = torch.allclose(softmax(x), torch.softmax(x.double(), 1).float(), atol=1e-6)
    print(f"{name:15} {'right' if right else 'WRONG'}")

# %% [markdown]
# ## 7. A CUDA kernel, emulated
#
# One warp a row, with the butterfly of section 4. The emulator takes the PTX that NVRTC makes of the source, and runs
# it thread by thread. It checks every access to memory, and says nothing of the speed.

# %%
source = variant("cuda-warp").source
print(source[source.index("__device__ float warp_max") : source.index("__device__ float warp_sum")])

x = torch.randn(3, 100)
try:
    y = variant("cuda-warp").emulate(x)
    print("largest difference below 1e-6:", bool((y - torch.softmax(x, 1)).abs().max() < 1e-6))
except RuntimeError as reason:  # no C++ compiler, or no NVRTC
    print(reason)

# %% [markdown]
# ## 8. An operator
#
# A kernel becomes an operator of PyTorch with a fake kernel, which tells the shape, and a gradient.


# %%
@torch.library.custom_op("notebook::softmax", mutates_args=())
def softmax_op(x: torch.Tensor) -> torch.Tensor:
    return softmax(x)


@softmax_op.register_fake
def _(x):
    return torch.empty_like(x)


def gradient(ctx, g):
    (y,) = ctx.saved_tensors
    return y * (g - (g * y).sum(1, keepdim=True))


softmax_op.register_autograd(gradient, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output))

x = torch.randn(4, 50, requires_grad=True)
softmax_op(x)[:, 0].sum().backward()
print("the gradient of each row adds up to 0:", bool(x.grad.sum(1).abs().max() < 1e-6))

# %% [markdown]
# ## Where to go
#
# `onepass gallery` lists the other rungs, and `onepass gallery show NAME` prints one. The course explains them in
# order. `onepass gallery check FILE` judges a kernel of yours, and `onepass gallery mistakes` has kernels to mend.
