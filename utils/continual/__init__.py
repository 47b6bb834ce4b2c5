"""Training through a sequence of experiences without losing what was learned before; docs/CONTINUAL.md explains it."""
