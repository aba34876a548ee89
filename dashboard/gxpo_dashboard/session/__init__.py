"""Session state: sign-in, URL parameters and navigation."""
