"""Workflows that combine dumps and trainings: chains, studies, plans, verification and the demo."""
