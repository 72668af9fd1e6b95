"""Models: a backbone, the preparation of pictures and a fitted head, as one thing and one file."""
