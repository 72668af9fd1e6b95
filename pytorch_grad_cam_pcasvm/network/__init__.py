"""The network: a backbone and a fitted head as one model, and the properties of its layers."""
