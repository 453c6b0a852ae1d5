"""Stands in for MindSpeed: its feature manager, its patch manager and its adaptor, as far as we meet them."""
