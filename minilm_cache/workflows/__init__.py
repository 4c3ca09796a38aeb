"""What runs several dumps and trainings: chains, studies, plans, verification, the demo."""
