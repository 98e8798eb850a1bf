"""Faults by chance, and whether anything is lost, wrong, stuck or left behind by them."""
