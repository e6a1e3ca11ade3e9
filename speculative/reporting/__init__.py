"""What people look at: tables, the HTML page, plots, the paper's figures, traces."""
