"""Learning problems of the models."""
