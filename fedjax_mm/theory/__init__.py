"""What the papers prove, one module per paper and one function per numbered statement."""
