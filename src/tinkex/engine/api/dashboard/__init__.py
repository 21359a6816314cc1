"""The dashboard: pages of a server for people, rendered on the server; see docs/adr/0026-dashboard.md."""
