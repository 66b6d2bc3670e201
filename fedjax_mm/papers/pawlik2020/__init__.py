"""Pawlik, "Federated Learning with Client Batching and Heterogeneous Data" (2020)."""
