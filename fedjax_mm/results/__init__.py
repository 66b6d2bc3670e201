"""Results: labelled Datasets with manifests, and the words for their names."""
