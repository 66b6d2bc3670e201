"""Results: labelled Datasets with manifests, and text for their coordinates."""
