"""What models are trained for: a folder for every task, what the tasks share, and the table of them."""
