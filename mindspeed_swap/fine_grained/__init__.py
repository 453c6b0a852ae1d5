"""Fine-grained swap: the user's own list of layers and operators, from a YAML file (``--swap-config``)."""
