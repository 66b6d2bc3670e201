"""Bhuyan, Moharir, Joshi, "Multi-Model Federated Learning with Provable Guarantees" (2022)."""
