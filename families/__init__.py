"""Family files: one YAML document per Mixture-of-Experts family (package data)."""
