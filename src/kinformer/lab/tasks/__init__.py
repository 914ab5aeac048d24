"""The tasks that models are trained for: a page for every task, shared pages, and the table of tasks."""
