"""Commands that speak: say, speak-all, and voices from recordings."""
