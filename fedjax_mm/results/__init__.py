"""Results: labelled Datasets with manifests, and texts for their coordinates."""
