"""What is patched in Megatron, one file per patched thing. Each file has a table ``PATCHES`` of (target, wrapper).

``arguments`` is installed by importing the adaptor; the rest once arguments have been parsed and a flag asks for it.
"""
