"""Networks, device operations and weights: everything that knows tensors and nothing that knows drafting."""
