"""What modules keep from one call to the next in tensors. A call that changes them must not run twice: a running mean
would move twice, and that changes the result."""
from __future__ import annotations

from collections.abc import Iterable

import torch


class ModuleState:
    """Buffers, and tensors that are attributes, of modules and of all modules inside, as they were.

    What is not seen: numbers that are no tensors, and an attribute (not a buffer) that another tensor takes the place
    of, as of the last input: most of these are no state.
    """

    def __init__(self, modules: Iterable[object]) -> None:
        """Of what is no module, nothing."""
        self._found = {
            (module, name): (tensor, tensor._version)
            for outer in modules
            if isinstance(outer, torch.nn.Module)
            for module in outer.modules()
            for tensors in (module._buffers, vars(module))
            for name, tensor in tensors.items()
            if isinstance(tensor, torch.Tensor) and not tensor.is_inference()
        }

    def changed(self) -> set[tuple[torch.nn.Module, str]]:
        """Those that were changed in place; buffers also if they were replaced."""
        return {
            (module, name)
            for (module, name), (tensor, version) in self._found.items()
            if tensor._version != version or module._buffers.get(name, tensor) is not tensor
        }

    def accept(self, changes: Iterable[tuple[torch.nn.Module, str]]) -> None:
        """These count as they are now: made by what will not run again."""
        for module, name in changes:
            tensor = module._buffers.get(name, vars(module).get(name))
            if (module, name) in self._found and tensor is not None:
                self._found[module, name] = tensor, tensor._version
