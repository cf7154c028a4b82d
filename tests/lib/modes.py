"""Torch modes, and a backend of torch.compile, that record the functions and operators of a call."""

from typing import Any

import torch
from torch._functorch.aot_autograd import aot_module_simplified, make_boxed_func
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Functions(TorchFunctionMode):
    """Records the functions of torch that are called inside the context."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """Records the operators that run inside the context, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(operator)
        return operator(*args, **kwargs or {})

    def names(self) -> list[str]:
        return [str(operator) for operator in self.seen]

    def ours(self) -> list[str]:
        """The names of onepass's operators, without overload and underscore."""
        return [name.split(".")[1].lstrip("_") for name in self.names() if name.startswith("onepass.")]


class Graphs:
    """A backend that records the graphs of forward and backward, and runs them unchanged."""

    def __init__(self) -> None:
        self.made: list[torch.fx.GraphModule] = []

    def __call__(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        return aot_module_simplified(graph, inputs, fw_compiler=self._keep, bw_compiler=self._keep)

    def _keep(self, graph: torch.fx.GraphModule, inputs: Any) -> Any:
        self.made.append(graph)
        return make_boxed_func(graph.forward)

    def calls(self) -> list[list[str]]:
        """For each graph, the operators that it calls, except detach."""
        graphs = [[str(node.target) for node in g.graph.nodes if node.op == "call_function"] for g in self.made]
        return [[name for name in names if name != "aten.detach.default"] for names in graphs]

    def operators(self) -> list[list[str]]:
        """For each graph, the operators of onepass that it calls."""
        return [[name.split(".")[1] for name in names if name.startswith("onepass.")] for names in self.calls()]
