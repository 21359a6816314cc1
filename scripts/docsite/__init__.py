"""What makes the documentation site: generated pages, figures, and the hooks of the site's builder."""
