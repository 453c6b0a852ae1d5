"""The one shared swap manager and allocator core. Knows nothing of Megatron. ``trace``, ``plan``, ``simulate`` and
``solve`` import no torch."""
