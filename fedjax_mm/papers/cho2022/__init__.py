"""Cho et al., "Maximizing Global Model Appeal in Federated Learning" (2022)."""
