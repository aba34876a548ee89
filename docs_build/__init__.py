"""Builds the documentation: generated pages and pictures (`write`), the site and its links (`build`)."""
