"""What a gradient costs in memory: the tensors that are saved are those that torch saves, and peaks are torch's."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from lib.support import TORCH, maker, ours, peak

MB = 1 << 20
every_size = pytest.mark.parametrize(("shape", "dim"), [((64, 4096), 1), ((512, 33, 16), 1), ((4096, 64), 0)], ids=str)


def saved_tensors(call: Callable[[Tensor], Tensor], x: Tensor) -> list[tuple[str, torch.Size, torch.dtype]]:
    """What a call keeps for its backward: "input" or "result" where it is that memory, else "other"."""
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = call(x)
    names = {x.data_ptr(): "input", y.data_ptr(): "result"}
    return sorted((names.get(t.data_ptr(), "other"), t.shape, t.dtype) for t in saved)


def test_what_is_saved_is_what_torch_saves(function, dtype, engine, device):
    x = maker(dtype, device)(6, 40).requires_grad_()
    mine = saved_tensors(lambda t: ours(function)(t, 1, engine=engine), x)
    theirs = saved_tensors(lambda t: TORCH[function](t, 1), x)
    rounded = function == "logsumexp" and dtype.itemsize == 2  # the gradient is made from what was not rounded
    assert mine == ([theirs[0], ("other", theirs[1][1], torch.float32)] if rounded else theirs)
    assert [name for name, *_ in theirs] == (["input", "result"] if function == "logsumexp" else ["result"])


def test_a_saved_tensor_that_was_written_to_raises_as_torchs(function, engine, device):
    """Any that is saved, by an operation of torch or by an out= of ours; in torch's words, up to the node's name and
    the version that was found, which a call may raise by more than one."""
    for which in saved_tensors(lambda t: TORCH[function](t, 1), maker(torch.float32, device)(3, 4).requires_grad_()):
        errors = []
        for f in (lambda t: ours(function)(t, 1, engine=engine), lambda t: TORCH[function](t, 1)):
            for write in (lambda t: t.zero_(), lambda t: ours("softmax")(torch.zeros_like(t), 0, out=t)):
                x = maker(torch.float32, device)(3, 4).requires_grad_()
                inner = x * 1
                y = f(inner)
                with torch.no_grad():
                    write(inner if which[0] == "input" else y)
                with pytest.raises(RuntimeError, match="modified by an inplace operation") as info:
                    y.sum().backward()
                version, rest = str(info.value).split("is at version ")[1].split(";", 1)
                assert int(version) > 0
                errors.append(rest)
        assert len(set(errors)) == 1


def trained(f: Callable[[Tensor], Tensor], x: Tensor) -> Callable[[], Any]:
    def run() -> Any:
        y = f(x)
        g = torch.ones_like(y)
        return torch.autograd.grad(y, x, g)

    return run


@every_size
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_peaks_of_forward_and_backward_are_at_most_torchs(function, dtype, shape, dim, engine, device):
    if engine == "triton" and device == "cpu":
        pytest.skip("Triton's interpreter allocates as it likes")
    if device == "cuda" and dim != len(shape) - 1:
        pytest.skip("other dims are gathered by copies on a GPU")
    x = maker(dtype, device)(*shape).requires_grad_()
    mine = peak(trained(lambda t: ours(function)(t, dim, engine=engine), x), device)
    theirs = peak(trained(lambda t: TORCH[function](t, dim), x), device)
    assert x.nbytes <= mine <= theirs + 4096
    no_grad = x.detach()
    forward = peak(lambda: ours(function)(no_grad, dim, engine=engine), device)
    assert forward <= peak(lambda: TORCH[function](no_grad, dim), device) + 4096


def test_a_gradient_holds_no_more_than_its_operands():
    """The result, its gradient and the input's, of 8 MB each: no temporary beside them."""
    x = maker(torch.float32)(512, 4096).requires_grad_()
    assert x.nbytes == 8 * MB
    for function, whole in (("softmax", 3), ("log_softmax", 3), ("logsumexp", 1)):
        most = peak(trained(lambda t, f=function: ours(f)(t, 1), x), "cpu")
        assert whole * 8 * MB <= most < whole * 8 * MB + MB / 8


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_training_saves_no_more(function):
    compiled = torch.compile(lambda t: ours(function)(t, 1), fullgraph=True, backend="aot_eager")
    x = maker(torch.float32)(512, 4096).requires_grad_()
    assert peak(trained(compiled, x), "cpu") <= peak(trained(lambda t: ours(function)(t, 1), x), "cpu") + MB / 8
