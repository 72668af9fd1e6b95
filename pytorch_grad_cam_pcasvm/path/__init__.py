"""A path from target layers to features: recorded in one pass, pulled back in closed form or by autograd."""
