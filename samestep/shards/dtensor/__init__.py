"""Parameters of which every rank holds a part: DTensors, and blocks made whole on their owners."""
