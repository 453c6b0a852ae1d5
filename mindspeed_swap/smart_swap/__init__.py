"""SmartSwap: finds in a few measured steps which saved tensors to swap."""
