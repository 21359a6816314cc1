"""The documentation site: generated pages, figures, and MkDocs hooks."""
