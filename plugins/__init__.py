"""Hook specifications, the plugin manager and the pieces that fill the hooks."""
