"""Who may use a server: addresses, keys, web pages, names; and the id that every request has."""
