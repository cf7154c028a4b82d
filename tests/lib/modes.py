"""Torch modes that note what a call comes down to."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Functions(TorchFunctionMode):
    """Within, the functions of torch that are called."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(function)
        return function(*args, **kwargs or {})


class Operators(TorchDispatchMode):
    """Within, the operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(operator)
        return operator(*args, **kwargs or {})

    def names(self) -> list[str]:
        return [str(operator) for operator in self.seen]

    def ours(self) -> list[str]:
        """Those of onepass, without overload and underscore."""
        return [name.split(".")[1].lstrip("_") for name in self.names() if name.startswith("onepass.")]
