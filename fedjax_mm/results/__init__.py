"""Results: labelled Datasets with manifests, measures of curves, and figures."""
