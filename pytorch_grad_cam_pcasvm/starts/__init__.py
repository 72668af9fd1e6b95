"""Starts: a run of a network, and the activations from which what is asked of it starts."""
