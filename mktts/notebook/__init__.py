"""What only notebooks need: tables, player, plots, evidence, headless runs."""
