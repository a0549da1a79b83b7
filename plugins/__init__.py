"""Hook specifications, the plugin manager and the components that fill the hooks."""
