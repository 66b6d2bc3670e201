"""Federated algorithms, one short file each."""
