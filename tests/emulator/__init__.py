"""Calls and gradients of the CUDA engine without a GPU: its host code (emulated.cpp) launches kernels on the package's
emulator (onepass.tools.emulator)."""

from onepass.tools.emulator import missing

from .calls import Emulator

__all__ = ["Emulator", "missing"]
