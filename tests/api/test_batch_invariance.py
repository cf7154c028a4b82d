"""Batch invariance: the switches, and a row's bits over the number of rows, its place, and every tier of a GPU."""

import concurrent.futures

import pytest
import torch

import onepass

F32, F16, BF16, F64 = torch.float32, torch.float16, torch.bfloat16, torch.float64


def _elsewhere() -> bool:
    """What another thread sees."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        return pool.submit(onepass.is_batch_invariant).result()


@pytest.mark.parametrize("switched", [False, True])
def test_the_context_goes_before_the_switch_and_is_of_its_thread(switched):
    is_on, context = onepass.is_batch_invariant, onepass.batch_invariant(not switched)
    assert onepass.set_batch_invariant(switched) is False
    try:
        with context:
            assert (is_on(), _elsewhere()) == (not switched, switched)
            with onepass.batch_invariant(switched):
                assert is_on() is switched
            assert is_on() is not switched
        with pytest.raises(KeyError), context:
            raise KeyError
        assert is_on() is switched
        with context, context:
            assert is_on() is not switched
        assert is_on() is switched
    finally:
        assert onepass.set_batch_invariant(False) is switched


@pytest.mark.parametrize("wrong", [1, None, "on"])
def test_what_is_no_bool_is_refused(wrong):
    for call in (onepass.batch_invariant, onepass.set_batch_invariant):
        with pytest.raises(TypeError, match="enabled must be a bool"):
            call(wrong)


def test_explain_shows_the_plan_of_the_context():
    assert onepass.explain((1, 65536), device="h200").tier == "cluster"
    few = onepass.explain((1, 2**20), device="h200").launch
    with onepass.batch_invariant():
        assert onepass.explain((1, 2**20), device="h200").launch["blocks_per_row"] < few["blocks_per_row"]


@pytest.mark.parametrize("dim", [-1, -2])
@pytest.mark.parametrize("dtype", [F32, BF16], ids=["float32", "bfloat16"])
def test_scores(dtype, dim, device):
    """A slice has the same bits alone, whatever else its tensors hold, and wherever they begin."""
    for n in (1, 7, 33, 256, 1000, 5001):
        shape, rows = ((13, 4, n), (13, 4, 1)) if dim == -1 else ((13, n, 4), (13, 1, 4))
        make = torch.Generator().manual_seed(n)
        x, bias, mask, sink = (torch.randn(like, generator=make).to(device) for like in (shape, shape[1:], shape, rows))
        x, bias, mask = x.to(dtype), bias.to(dtype), mask > -1
        with onepass.batch_invariant():
            biased = {"scale": 0.3, "bias": bias, "causal": True, "empty": "zero"}
            for given in ({"mask": mask, "empty": "zero"}, biased, {"sink": sink}):
                y = onepass.softmax(x, dim, **given)
                for at in (0, 5, 12):
                    own = {k: v[at : at + 1] if k in ("mask", "sink") else v for k, v in given.items()}
                    assert torch.equal(onepass.softmax(x[at : at + 1].clone(), dim, **own)[0], y[at]), (n, list(given))


@pytest.mark.parametrize("scores", [{}, {"scale": 0.3, "softcap": 5.0}], ids=["plain", "scored"])
@pytest.mark.parametrize("dtype", [F32, BF16, F64], ids=["float32", "bfloat16", "float64"])
def test_bits_of_a_row_on_a_cpu(dtype, scores):
    """Alone, and in tensors of any layout."""

    def results(x, g, dim):
        """Of all functions, and of their gradients where that is g; a row's numbers along `dim`."""
        x = x.detach().requires_grad_()
        with onepass.batch_invariant():
            for f in (onepass.softmax, onepass.log_softmax, onepass.softmin, onepass.logsumexp):
                y = f(x, dim, **scores)
                yield y.detach() if y.dim() == x.dim() else y.detach().unsqueeze(dim)
                yield torch.autograd.grad(y, x, g if y.dim() == x.dim() else g.select(dim, 0))[0]

    for n, rows in ((1, 40), (3, 40), (20, 40), (33, 40), (300, 40), (1000, 20), (5001, 20), (70_001, 1)):
        generator = torch.Generator().manual_seed(n)
        x, g = (torch.randn(4, n, rows, generator=generator).to(dtype) for _ in range(2))
        place = 3, slice(None), rows - 1
        alone = list(results(x[place].clone(), g[place].clone(), 0))
        some = x[2:, :, rows // 2 :], g[2:, :, rows // 2 :]
        for a, b in ((x, g), (x.mT.contiguous().mT, g), some, (x[3], g[3]), (x[..., -1], g[..., -1].clone())):
            dim = 0 if a.shape[0] == n else 1
            for got, want in zip(results(a, b, dim), alone, strict=True):
                row = got[-1] if dim == 1 else got
                row = row[:, -1] if row.dim() == 2 else row
                assert torch.equal(row, want), (n, tuple(a.shape), a.stride())


def test_bits_of_scored_rows_do_not_depend_on_how_large_the_result_is():
    """Large ones are written past the caches."""
    x = torch.randn(8000, 1025, generator=torch.Generator().manual_seed(1)).to(BF16)
    with onepass.batch_invariant():
        parts = [onepass.softmax(part.clone(), -1, scale=0.3) for part in x.split(50)]
        assert torch.equal(torch.cat(parts), onepass.softmax(x, -1, scale=0.3))


# On a GPU: a length or two of every tier that an invariant plan takes.
LENGTHS = [3, 8, 33, 40, 64, 100, 197, 256, 500, 781, 1000, 1025, 2048, 2500, 5000, 9000, 9001, 16384, 32001, 50257]
LENGTHS += [65536, 100_000, 151_936, 262_144, 700_001, 3_000_000]


@pytest.mark.gpu
@pytest.mark.parametrize("n", LENGTHS)
@pytest.mark.parametrize("function", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("dtype", [F32, BF16, F16, F64], ids=lambda t: str(t)[6:])
def test_bits_of_a_row_on_a_gpu(dtype, function, n):
    f = getattr(onepass, function)
    generator = torch.Generator("cuda").manual_seed(n)
    row = torch.randn(n, device="cuda", generator=generator, dtype=torch.float32).to(dtype)
    tiers = set()
    f(row, -1)  # this launch is cached, and is not what the context takes
    with onepass.batch_invariant():
        alone = f(row, -1)
        for rows in (1, 2, 5, 64, 300, 5000):
            if rows * n > 2**23:
                continue
            for pad, offset in ((0, 0), (0, 1), (1, 0), (3, 5)):
                whole = torch.randn(offset + rows * (n + pad), device="cuda", generator=generator).to(dtype)
                x = whole[offset:].view(rows, n + pad)[:, :n]
                places = {0, rows // 2, rows - 1}
                for place in places:
                    x[place] = row
                y = f(x, -1)
                tiers.add(onepass.explain(x, function=function).tier)
                for place in places:
                    assert torch.equal(y[place], alone), (rows, pad, offset, place)
    assert tiers
