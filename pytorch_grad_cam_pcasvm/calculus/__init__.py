"""Derivatives along a tape: pullbacks, secants, relevance, dual numbers."""
