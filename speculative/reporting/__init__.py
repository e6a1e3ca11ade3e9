"""Output for people: tables, the HTML page, plots, the paper's figures, traces."""
