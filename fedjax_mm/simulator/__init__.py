"""The simulator: the call, its checks, its rounds and its records."""
