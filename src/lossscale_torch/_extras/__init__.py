"""Features next to the scaler. The step does not need them."""
