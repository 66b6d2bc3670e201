"""What models learn."""
