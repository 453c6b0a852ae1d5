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

    @property
    def changed(self) -> bool:
        """Something was changed in place; or a buffer replaced."""
        return any(
            tensor._version != version or module._buffers.get(name, tensor) is not tensor
            for (module, name), (tensor, version) in self._found.items()
        )

    def leave_out(self, part: ModuleState) -> None:
        """The state of a part that will not run again with the rest."""
        for name in part._found:
            self._found.pop(name, None)
