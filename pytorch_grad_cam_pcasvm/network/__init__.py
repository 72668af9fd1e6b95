"""The network: a backbone and a fitted head as one model, and what can be found out about its layers."""
