"""Studies of a pair: the rows of a table, the best gamma, costs of steps, exactness."""
