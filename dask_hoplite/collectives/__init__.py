"""Reductions and gatherings: operations on one value of each of many futures."""
