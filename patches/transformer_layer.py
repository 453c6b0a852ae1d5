"""Says which layer is running, so that saved tensors have names that do not depend on what runs around them."""
from __future__ import annotations

from typing import Any

from mindspeed_swap import runtime
from mindspeed_swap.patches import modules
from mindspeed_swap.patches.registry import Patch, in_place_of


@in_place_of
def _forward(original: Any, self: Any, /, *args: Any, **kwargs: Any) -> Any:
    entering = args[0] if args else kwargs.get("hidden_states")
    running = runtime.get()
    with running.layer(self.layer_number, entering):
        if not running.names_modules:
            return original(self, *args, **kwargs)
        modules.name_modules(self)
        once = vars(self).get(modules.ONCE, False)
        return running.call(modules.LAYER, original, (self, *args), kwargs, keeps_outputs=True, once=once)


PATCHES: list[Patch] = [("megatron.core.transformer.transformer_layer.TransformerLayer.forward", _forward)]
