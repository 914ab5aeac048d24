"""Members compared: trained under one budget, measured in turns, reported in one page. Above runs and figures."""
