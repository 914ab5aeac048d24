"""Comparison of members: training under one budget, measurements in turns, and a report in one page."""
