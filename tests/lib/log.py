"""Which operators a call comes down to."""

from __future__ import annotations

from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode


class Log(TorchDispatchMode):
    """Within, the names of the operators that run, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        return func(*args, **kwargs or {})

    def ours(self) -> list[str]:
        """Those of onepass, without overload and underscore."""
        return [name.split(".")[1].lstrip("_") for name in self.seen if name.startswith("onepass.")]
