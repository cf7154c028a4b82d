"""The modules: torch.nn's in all but the repr of what is not the default, picklable, compiled and exported."""

import copy
import pickle

import pytest
import torch

import onepass
from lib.support import assert_defined, maker, same

MODULES = {  # a module, the function it calls, torch's module, its repr
    "Softmax": (onepass.nn.Softmax(1), "softmax", torch.nn.Softmax(1), "Softmax(dim=1)"),
    "LogSoftmax": (onepass.nn.LogSoftmax(dim=-2), "log_softmax", torch.nn.LogSoftmax(-2), "LogSoftmax(dim=-2)"),
    "Softmin": (onepass.nn.Softmin(0), "softmin", torch.nn.Softmin(0), "Softmin(dim=0)"),
    "LogSumExp": (
        onepass.nn.LogSumExp(1, keepdim=True, engine="cpu"),
        "logsumexp",
        None,
        "LogSumExp(dim=1, keepdim=True, engine=cpu)",
    ),
}


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", MODULES)
def test_a_module_its_copies_and_graphs_of_it_do_what_torchs_does(name, tmp_path):
    ours, function, theirs, text = MODULES[name]
    theirs = theirs or (lambda x: torch.logsumexp(x, 1, keepdim=True))
    x = maker(torch.float32)(3, 4, 5).requires_grad_()
    mine, want = ours(x), theirs(x)
    assert_defined(function, mine.detach(), x.detach(), ours.dim)
    assert mine.shape == want.shape
    g = torch.randn(want.shape)
    torch.testing.assert_close(torch.autograd.grad(mine, x, g), torch.autograd.grad(want, x, g))
    torch.save(ours, tmp_path / "module.pt")
    loaded = torch.load(tmp_path / "module.pt", weights_only=False)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours)), loaded):
        assert same(other(x), mine)
        assert repr(other) == repr(ours) == text
        assert not [*other.state_dict(), *other.parameters()]
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), ours)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for graph in (compiled, torch.export.export(model, (x,)).module()):
        torch.testing.assert_close(graph(x), model(x))


@pytest.mark.parametrize("kind", [onepass.nn.Softmax, onepass.nn.LogSoftmax, onepass.nn.Softmin])
def test_options(kind):
    assert kind().dim == -1
    module = kind((0, 1), dtype=torch.float64, engine="cpu")
    y = module(maker(torch.float32)(3, 4))
    assert y.dtype is torch.float64
    assert repr(module) == f"{kind.__name__}(dim=(0, 1), dtype=torch.float64, engine=cpu)"
    with pytest.raises(ValueError, match="'fpu'"):
        kind(engine="fpu")(y)
    with pytest.raises(IndexError, match="got 2"):
        kind(2)(y)
    with pytest.raises(TypeError, match="positional"):
        kind(0, torch.float32)
