"""A visitor's session: sign-in, the address, and navigation between views."""
