"""Tools for the notebooks: tables, a live player, plots, records, headless runs and the site."""
