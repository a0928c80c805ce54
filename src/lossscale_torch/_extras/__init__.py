"""Optional features. The step of a scaler does not need them."""
