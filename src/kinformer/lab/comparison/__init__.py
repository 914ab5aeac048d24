"""Comparison of members: trained under one budget, measured in turns, reported in one page."""
