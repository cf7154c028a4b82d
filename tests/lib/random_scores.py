"""Random calls with scores: scale, softcap, bias, alibi, mask, causal, window, sink and empty, and their gradients."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from onepass import reference
from onepass.scored import _KERNELS, _NUMBERS_OF, _kernel_tensors
from onepass.scores import check_scores, distances

from .gradients import gradient
from .random_calls import POISON, REACH, SPECIALS, Call, View, draw_view
from .support import DTYPES, INTEGERS, accumulator, drawn_positions

LAYOUTS = ["contiguous", "contiguous", "permuted", "sliced"]
INPUT = "the input"


class Scored(Call):
    """A function of scores and, for most calls, gradients: by autograd, or by the engine's operator into any layout."""

    # Finite ones are small enough that their product with a scale is finite.
    specials: ClassVar = [value for value in SPECIALS if not 1e30 < abs(value) < math.inf]

    def __init__(self, seed: int, number: int):
        super().__init__(seed, number)
        rng, sizes = self.rng, self.view.sizes
        if self.function == "state":
            self.function = "softmax"
        if self.dtype in INTEGERS:
            self.dtype = torch.float32
        rank = max(len(sizes), 1)
        self.dims = sorted(d % rank for d in ([self.dim] if isinstance(self.dim, int) else self.dim))
        rows = [1 if d in self.dims else n for d, n in enumerate(sizes)]
        self.numbers: dict[str, Any] = {"empty": rng.choice(["nan", "zero"])}
        self.sides: dict[str, tuple[torch.dtype, View]] = {}

        def happens(share: float = 0.3) -> bool:
            return rng.random() < share

        def draw(name: str, most: Sequence[int]) -> None:
            """Draws a tensor that broadcasts to these sizes."""
            shape = [n if happens(0.6) else 1 for n in most]
            shape = shape[rng.randint(0, len(shape)) :] if happens() else shape
            view = draw_view(rng, shape, [*LAYOUTS, "expanded", "overlapping"], REACH)[1]
            self.sides[name] = (torch.bool if name == "mask" else rng.choice(DTYPES), view)

        if happens():
            draw("scale", rows)
        elif happens(0.5):
            self.numbers["scale"] = rng.choice([0.125, 0.3, -1.0, 2.5, 0.0])
        if happens():
            draw("sink", rows)
        elif happens():
            self.numbers["sink"] = rng.choice([0.0, 0.5, -30.0, -math.inf])
        if happens(0.2):
            self.numbers["softcap"] = rng.choice([0.5, 3.0, 50.0])
        for name in ("bias", "mask"):
            if happens(0.4):
                draw(name, sizes)
        if len(sizes) >= 2:
            self.numbers |= drawn_positions(rng, happens, lambda: torch.zeros(()), max(*sizes[-2:], 3))
            if self.numbers.pop("alibi", None) is not None:
                draw("alibi", sizes[:-2])
        self.way = rng.choice(["none", "autograd", "operator"]) if math.prod(sizes) and sizes else "none"
        self.grad, self.saved = self.draw(self.shape(), "expanded"), self.draw(sizes)
        self.dx, self.dx_type = self.draw(sizes), rng.choice([self.dtype, self.result])

    def draw(self, sizes: Sequence[int], *more: str) -> View:
        return draw_view(self.rng, sizes, [*LAYOUTS, *more], 4 * REACH)[1]

    def __str__(self) -> str:
        sides = ", ".join(f"{name} {str(dtype)[6:]} {view}" for name, (dtype, view) in self.sides.items())
        ways = {"none": "", "autograd": f", gradients of {self.grad}"}
        by_operator = f", gradient {self.dx_type} {self.dx} of {self.grad}, saved {self.saved}"
        return f"{super().__str__()}, with {self.numbers} {sides}{ways.get(self.way, by_operator)}"

    # Operands and calls -----------------------------------------------------------------------------------------------

    def operands(self) -> dict[str, Tensor]:
        given = super().operands()
        for name, (dtype, view) in self.sides.items():
            given[name] = self.lay(self.normal(name, view.reach()).to(dtype), view)
        self.options = {**self.numbers, **{name: given[name] for name in self.sides}}
        return given

    def normal(self, name: str, count: int) -> Tensor:
        rng = self.rng
        values = torch.randn(count, generator=torch.Generator().manual_seed(rng.randrange(2**31)), dtype=torch.float64)
        if name == "mask":
            return values < rng.choice([-1.5, 0.0, 1.0, 4.0])
        values = (values.abs() if name == "alibi" else values) * rng.choice([0.1, 1.0, 3.0])
        special = {"bias": -math.inf, "sink": -math.inf, "gradient": math.nan}.get(name, 0.0)
        # (No NaN in a gradient with a window: outside of it a kernel may read the gradient or not.)
        if rng.random() < 0.15 and not (name == "gradient" and {"causal", "window"} & self.numbers.keys()):
            values[rng.randrange(count) :: rng.choice([1, 2, 7, 64, 10**6])] = special
        return values

    def make(self, x: Tensor, **options: Any) -> Any:
        return super().make(x, **{**self.options, **options})

    def judge(self, given: Mapping[str, Tensor], y: Sequence[Tensor]) -> None:
        self.demand_form(y[0])
        x = given[INPUT].to(self.result)  # rounded as by the function
        self.judge_forward(x, y[0])
        if self.way == "autograd":
            self.check_autograd(given, x)
        elif self.way == "operator":
            self.check_operator(given, x, y[0])

    def check_autograd(self, given: Mapping[str, Tensor], x: Tensor) -> None:
        wanted = [INPUT, *(name for name in self.sides if name != "mask" and self.rng.random() < 0.7)]
        leaves = {name: given[name].detach().requires_grad_() for name in wanted}
        y = self.make(leaves[INPUT], **{name: leaves[name] for name in wanted[1:]})
        g = self.lay(self.normal("gradient", self.grad.reach()).to(y.dtype), self.grad)

        def make() -> Sequence[Tensor]:
            return torch.autograd.grad(y, list(leaves.values()), g, retain_graph=True)

        made = self.with_threads({**given, "the gradient": g}, make)
        of_rows = [1 if d in self.dims else n for d, n in enumerate(x.shape)]
        rows = (y.detach(), g) if self.function != "logsumexp" else (y.detach().reshape(of_rows), g.reshape(of_rows))
        self.judge_gradients(dict(zip(wanted, made, strict=True)), x, *rows)

    def check_operator(self, given: Mapping[str, Tensor], x: Tensor, y: Tensor) -> None:
        side, scores = check_scores(self.function, x, self.dims, self.options)
        function = "softmax" if self.function == "softmin" else self.function
        numbers, wide = (_NUMBERS_OF[function], self.dims, *scores), accumulator(y.dtype)
        scale, bias, alibi, _, mask = _kernel_tensors(x, side, wide)

        def laid(t: Tensor, view: View, dtype: torch.dtype) -> Tensor:
            return self.lay(torch.zeros(view.reach(), dtype=dtype), view).copy_(t)

        def into(launch: Callable[[Tensor], bool]) -> list[Tensor]:
            dx = self.lay(torch.full((self.dx.reach(),), POISON, dtype=self.dx_type), self.dx)
            self.demand(launch(dx), "there is no kernel")
            self.undisturbed(dx, self.dx)
            return [dx]

        if function == "logsumexp":
            of_rows = [1 if d in self.dims else n for d, n in enumerate(x.shape)]
            g, lse = (
                self.lay(t, View(tuple(of_rows), tuple(y.new_empty(of_rows).stride()), 0))
                for t in (self.normal("gradient", y.numel()).to(wide), self.scores_of(x)[2].to(wide).reshape(-1))
            )
            used = given[INPUT]

            def launch(dx: Tensor) -> bool:
                return _KERNELS[2](g, used, lse, scale, bias, alibi, mask, dx, False, *numbers)

            operands = {**given, "the gradient": g, "the logsumexp": lse}
            y = lse
        else:
            g = self.lay(self.normal("gradient", self.grad.reach()).to(y.dtype), self.grad)
            y = laid(y, self.saved, y.dtype)
            of_cap = laid(x, self.saved, self.dx_type) if scores.softcap else None
            if of_cap is not None:
                x = of_cap.to(y.dtype) if y.element_size() == 2 else of_cap

            def launch(dx: Tensor) -> bool:
                return _KERNELS[1](g, y, of_cap, None, scale, None, mask, dx, *numbers)

            operands = {**given, "the gradient": g, "the result": y}
        (dx,) = self.with_threads(operands, lambda: into(launch))
        self.judge_gradients({INPUT: dx}, x, y, g)

    # The definition ---------------------------------------------------------------------------------------------------

    def doubles(self) -> dict[str, Any]:
        return {n: v.double() if isinstance(v, Tensor) and n != "mask" else v for n, v in self.options.items()}

    def distances(self, x: Tensor) -> Tensor:
        return distances(x, check_scores(self.function, x, self.dims, self.options)[1]).abs().double()

    def scores_of(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(scores of x, the summed magnitudes of their terms, the logsumexp of each row)."""
        options = self.doubles()
        sink = options.pop("sink", None)
        del options["empty"]
        s = reference.score(self.function, x.double(), **options)
        size = (x.double() * options.get("scale", 1.0)).abs().clamp(max=options.get("softcap") or math.inf)
        if "bias" in options:
            size = size + options["bias"].abs()
        if "alibi" in options:
            size = size + options["alibi"][..., None, None] * self.distances(x)
        lse = reference.logsumexp(s, tuple(self.dims), True, sink=sink)
        return s, size.where(s.isfinite(), 0.0), lse

    def judge_forward(self, x: Tensor, y: Tensor) -> None:
        """Allows one rounding of the result, a few of each score, and those of a row's sum."""
        dims, kind, eps = tuple(self.dims), torch.finfo(y.dtype), torch.finfo(accumulator(y.dtype)).eps
        s, size, lse = self.scores_of(x)
        named = {"keepdim": True} if self.function == "logsumexp" else {}
        want = getattr(reference, self.function)(x, dims, **named, **self.doubles())
        error = 8 * eps * (1 + size + (lse - s).nan_to_num(0, 0, 0).abs())  # the error of the exponential of a score
        weights = (s - lse).exp().nan_to_num(0, 0, 0)
        row = (weights * error).sum(dims, keepdim=True) + eps * (8 + s.numel() / max(lse.numel(), 1) / 8)
        if self.function == "logsumexp":
            limit = (kind.eps + 4 * eps) * want.abs().clamp(min=1) + row
        elif self.function == "log_softmax":
            limit = (kind.eps + 4 * eps) * want.abs().clamp(min=1) + error + row
        else:
            limit = want.abs() * (kind.eps + error + row) + max(1.2e-38, kind.smallest_normal * kind.eps)
        self.demand_near(self.function, y, want.reshape(y.shape), limit.reshape(y.shape))

    def judge_gradients(self, made: Mapping[str, Tensor], x: Tensor, y: Tensor, g: Tensor) -> None:
        """Checks the gradients of the input and of the side tensors, from the gradient g of the result y, which has all
        dims. x is the rounded input."""
        function, dims, options = self.function.replace("softmin", "softmax"), tuple(self.dims), self.doubles()
        s, size, lse = self.scores_of(x)
        inner = torch.finfo(accumulator(y.dtype)).eps
        y, g = y.double(), g.double()
        if function == "logsumexp":
            ds, terms = gradient(function, g, s, dims, lse)
            terms = terms * (1 + size + lse.nan_to_num(0, 0, 0).abs() + (lse - s).nan_to_num(0, 0, 0).abs())
            total, empty = -g, lse == -math.inf
        else:
            ds, terms = gradient(function, g, y, dims)
            total, empty = (g * y if function == "softmax" else g).sum(dims, keepdim=True), torch.tensor(False)
        if function == "log_softmax":
            terms = g.abs() + (terms - g.abs()) * (1 + y.nan_to_num(0, 0, 0).abs())
            empty = y.amax(dims, keepdim=True) == -math.inf
        if options["empty"] == "zero":
            ds, terms = ds.masked_fill(empty, 0), terms.masked_fill(empty, 0)
        hides = {name: options[name] for name in ("mask", "causal", "window", "offset") if name in options}
        seen = reference.score("softmax", torch.zeros_like(s), **hides) == 0
        ds, terms, sign = ds.where(seen, 0.0), terms.where(seen, 0.0), -1 if self.function == "softmin" else 1
        scale, v = torch.as_tensor(options.get("scale", 1.0), dtype=torch.float64), x.double().where(seen, 0.0) * sign
        slope = 1.0 if "softcap" not in options else (v * scale / options["softcap"]).cosh().square().reciprocal()
        for name, got in made.items():
            shape = list(got.shape) + ([1, 1] if name == "alibi" else [])
            if name == "sink":
                factor, each = (options["sink"] - lse).exp(), -total
                factor = factor.masked_fill(lse == -math.inf, 0) if options["empty"] == "zero" else factor
                sizes = (g * y if function == "softmax" else g).abs().sum(dims, keepdim=True)
                sizes = sizes * (1 + (lse.abs() + options["sink"].abs()).nan_to_num(0, 0, 0))
            else:
                factor = {INPUT: scale * sign, "scale": v, "bias": torch.ones(())}.get(name)
                factor = -self.distances(x) if factor is None else factor
                each, sizes = ds * slope if name in (INPUT, "scale") else ds, terms
            want, sizes = (
                (t * f).sum_to_size(shape).reshape(got.shape) for t, f in ((each, factor), (sizes, factor.abs()))
            )
            kind, count = torch.finfo(got.dtype), each.numel() / max(got.numel(), 1)
            limit = kind.eps * want.abs() + (8 + count**0.5) * inner * sizes + 2 * max(kind.tiny * kind.eps, 1.2e-38)
            if got.element_size() == 2:
                limit = limit + 2.0**-15 * sizes
            if name != INPUT:  # these may be sums of the input's gradient, which is rounded and scaled
                of_x = torch.finfo(self.dtype)
                limit = limit + of_x.eps * sizes + count * of_x.tiny * of_x.eps * 8
            self.demand_near(f"the gradient of {name}", got, want, limit)
