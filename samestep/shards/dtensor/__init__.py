"""Parameters that are DTensors, and the exchange of their blocks with owners."""
